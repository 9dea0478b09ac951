"""A Ray cluster on this machine, of which nothing is left after the tests."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

NODES = Path(__file__).with_name("nodes.py")
MARK = "SPECSERVE_TEST_RAY"  # in the environment of all processes of a cluster, which inherit it from each other
END_S = 30.0


class Cluster:
    """Ray nodes. `address` is that of the head."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "RAY_TMPDIR": str(folder), MARK: self.mark, "RAY_USAGE_STATS_ENABLED": "0"}
        self._log = (folder / "nodes.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(NODES)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip
        self.address = ""

    def add(self, name: str, num_cpus: int = 1) -> None:
        self.address = self._ask(f"add {name} {num_cpus}")["address"]

    def kill(self, name: str) -> None:
        """As if the machine were gone."""
        self._ask(f"kill {name}")

    def processes(self, name: str, word: str) -> list[int]:
        """Those of a node that have a word in their command line."""
        found: list[int] = self._ask(f"processes {name} {word}")["pids"]
        return found

    def stop(self) -> None:
        """All nodes, and by force what is left of them."""
        try:
            with suppress(BrokenPipeError, ValueError):
                self._ask("stop")
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(END_S)
        finally:
            self._process.kill()
            self._process.wait()
            end = time.monotonic() + END_S
            while left := self._left():
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                assert time.monotonic() < end, f"processes cannot be ended: {left}"
                time.sleep(0.05)
            self._process.stdout.close()
            self._log.close()

    def _left(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def _ask(self, line: str) -> Any:
        """What the nodes' process answers; Ray says other things in between."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for said in self._process.stdout:
            with suppress(ValueError):
                return json.loads(said)
        raise ValueError("The nodes' process has ended.")


@contextmanager
def cluster_of_this_machine() -> Iterator[Cluster]:
    """Without nodes yet."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets' paths have 107 characters at most
    made = Cluster(folder)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Without nodes yet. Skipped where Ray is absent, unless SPECSERVE_REQUIRE_RAY is set."""
    absent = [name for name in ("ray", "cryptography") if importlib.util.find_spec(name) is None]
    if absent and not os.environ.get("SPECSERVE_REQUIRE_RAY"):
        pytest.skip(f"{', '.join(absent)}: pip install 'specserve[ray]'")
    with cluster_of_this_machine() as made:
        yield made


@pytest.fixture(scope="module")
def llm_cluster() -> Iterator[Cluster]:
    """A node with room for Ray Serve LLM. Skipped where that is absent, unless SPECSERVE_REQUIRE_RAY_LLM is set."""
    absent = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    if absent and not os.environ.get("SPECSERVE_REQUIRE_RAY_LLM"):
        pytest.skip(f"{', '.join(absent)}: `make ray-llm` installs what Ray Serve LLM needs")
    with cluster_of_this_machine() as made:
        made.add("head", num_cpus=8)
        yield made
