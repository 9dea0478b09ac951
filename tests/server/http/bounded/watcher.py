"""Watches a server from a process of its own, so that nothing a test does delays what is measured: streams that run
beside a case, and /health every 20 ms. A program; conftest.py starts it.

    python watcher.py < orders: one line of JSON {"port", "api", "engine", "streams"}, then any line to end

Prints "watching" once every stream has tokens and, at the end, one line of JSON. A delay is told as the wall clock has
it, as the processor time that the process in question used meanwhile, and as the lesser of the two, `held_s`: what the
process itself was busy with. A machine that is shared or slow to wake a process makes the first longer, and threads
that compute beside a free event loop the second; work that holds up others makes both longer.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

POLL_S = 0.02
BEGUN = 5  # gaps of every stream before it counts
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """Seconds that all threads of a process have run; infinite once it has ended, as nothing bounds its delays."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return float("inf")
    return (int(fields[11]) + int(fields[12])) * _TICK_S


@dataclass
class Delays:
    """Times between two marks, of one process."""

    pid: int
    number: int = 0
    sum_s: float = 0.0
    longest_s: float = 0.0  # by the wall clock
    busiest_s: float = 0.0  # of processor time
    held_s: float = 0.0  # the largest of what is the lesser of both
    _begun: tuple[float, float] | None = None

    def begin(self) -> None:
        self._begun = time.monotonic(), processor_s(self.pid)

    def end(self) -> None:
        if self._begun is None:
            return
        wall_s = time.monotonic() - self._begun[0]
        busy_s = min(processor_s(self.pid) - self._begun[1], 1e6)
        self.number += 1
        self.sum_s += wall_s
        self.longest_s = max(self.longest_s, wall_s)
        self.busiest_s = max(self.busiest_s, busy_s)
        self.held_s = max(self.held_s, min(wall_s, busy_s))
        self._begun = None

    def forget(self) -> None:
        self.number, self.sum_s, self.longest_s, self.busiest_s, self.held_s = 0, 0.0, 0.0, 0.0, 0.0


@dataclass
class Stream:
    """One request, streamed again and again as long as it ends well. `runs` are the bytes of each response. The time up
    to its first token is no gap: a request may wait in the queue."""

    port: int
    body: bytes
    delays: Delays
    runs: list[bytearray] = field(default_factory=list)

    def start(self) -> socket.socket:
        """HTTP/1.0: a body without chunks, up to the end of the connection."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(self.body)}\r\n\r\n".encode() + self.body)
        self.runs.append(bytearray())
        return connection

    def hear(self, connection: socket.socket, waiting: selectors.BaseSelector) -> None:
        try:
            piece = connection.recv(65536)
        except OSError:
            piece = b""
        self.runs[-1] += piece
        if b"data: " in piece:
            self.delays.end()
            self.delays.begin()
        if not piece:
            waiting.unregister(connection)
            connection.close()
            if self.runs[-1].endswith(b"data: [DONE]\n\n"):
                waiting.register(self.start(), selectors.EVENT_READ, self)


class Health:
    """Polls /health on one connection; a delay is from a question to its answer."""

    def __init__(self, port: int, delays: Delays) -> None:
        self.delays, self.waits = delays, False
        self._connection = socket.create_connection(("127.0.0.1", port))

    def start(self) -> socket.socket:
        return self._connection

    def ask(self) -> None:
        if not self.waits:
            self.waits = True
            self.delays.begin()
            self._connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def hear(self, connection: socket.socket, waiting: selectors.BaseSelector) -> None:
        if connection.recv(65536):
            self.waits = False
            self.delays.end()
        else:
            waiting.unregister(connection)


def watch(orders: dict[str, Any]) -> dict[str, Any]:
    """Everything, until standard input has something to read."""
    port, engine = orders["port"], orders["engine"]
    streams = [Stream(port, json.dumps(body).encode(), Delays(engine)) for body in orders["streams"]]
    health = Health(port, Delays(orders["api"]))
    everyone = [health.delays, *(stream.delays for stream in streams)]
    waiting = selectors.DefaultSelector()
    waiting.register(sys.stdin, selectors.EVENT_READ)
    for source in (health, *streams):
        waiting.register(source.start(), selectors.EVENT_READ, source)
    next_poll, is_told, ends = 0.0, False, False
    while not ends:
        for key, _ in waiting.select(max(0.0, next_poll - time.monotonic())):
            if key.data is None:
                ends = True
            else:
                key.data.hear(key.fileobj, waiting)
        if time.monotonic() >= next_poll:
            health.ask()
            next_poll = time.monotonic() + POLL_S
        if not is_told and all(delays.number > BEGUN for delays in everyone):
            is_told = True
            for delays in everyone:
                delays.forget()
            print("watching", flush=True)
    for delays in everyone:
        delays.end()  # what has not come yet is late as well
    return {
        "loop": asdict(health.delays),
        "gaps": [asdict(s.delays) for s in streams],
        "runs": list(map(_runs, streams)),
    }


def _runs(stream: Stream) -> list[dict[str, Any]]:
    """Of each response the tokens, and what it said instead of them."""
    found = []
    for heard in stream.runs:
        head, _, rest = bytes(heard).partition(b"\r\n\r\n")
        events = [json.loads(part[6:]) for part in rest.split(b"\n\n")[:-1] if part.startswith(b"data: {")]
        choices = [choice for event in events for choice in event.get("choices", ())]
        tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
        errors = [event["error"] for event in events if "error" in event]
        status = head.split(b" ")[1].decode() if head else "none"
        found.append({"status": status, "tokens": tokens, "errors": errors})
    return found


def main() -> None:
    orders = json.loads(sys.stdin.buffer.raw.readline())  # type: ignore[attr-defined]  # raw: none of it waits unseen
    print(json.dumps(watch(orders)), flush=True)


if __name__ == "__main__":
    main()
