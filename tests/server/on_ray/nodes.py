"""Ray nodes on this machine, as a process that obeys lines on its standard input:

    add NAME CPUS           a node that has the resource NAME; the first is the cluster's head, and so
                            is the first after that was killed, at the same address
    processes NAME [WORD]   those of the node, that have the word in their command line
    kill NAME               the node is gone, as if its machine were: all its processes get a SIGKILL
    stop                    all nodes

It answers each with a line of JSON, and ends with whoever started it; so do the nodes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

STORE_BYTES = 80 * 2**20  # about the least that Ray takes; engines put nothing there


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster, nodes = Cluster(shutdown_at_exit=True), dict[str, Any]()
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]  # of all heads
    for line in sys.stdin:
        told: dict[str, Any] = {}
        match line.split():
            case ["add", name, cpus]:
                nodes[name] = cluster.add_node(
                    num_cpus=int(cpus),
                    resources={name: 1},
                    object_store_memory=STORE_BYTES,
                    include_dashboard=False,
                    **({} if cluster.head_node else {"gcs_server_port": port}),
                )
                told = {"address": cluster.address}
            case ["processes", name, *words]:
                pids = descendants(raylet(nodes[name]))
                told = {"pids": [pid for pid in pids if all(word in command_line(pid) for word in words)]}
            case ["kill", name]:
                pid = raylet(nodes[name])
                for each in [*descendants(pid), pid]:
                    with suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case ["stop"]:
                cluster.shutdown()
        print(json.dumps(told), flush=True)


def raylet(node: Any) -> int:
    """The process of a node from which its others descend."""
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text("utf-8").split()):
                found += [child, *descendants(child)]
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except OSError:
        return ""


if __name__ == "__main__":
    main()
