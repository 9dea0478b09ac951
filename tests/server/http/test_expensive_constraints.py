"""Constraints that take long to compile cost those who send them: nobody else waits. Servers as they are by default."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.alone

DEAR = 10


def expensive(name: str) -> dict[str, Any]:
    """A request of about 5 KB whose schema takes minutes to compile."""
    words = [f"{name}{i}{'x' * 300}" for i in range(16)]
    schema = {"allOf": [{"type": "string", "pattern": f".*{word}.*"} for word in words]}
    return {"prompt": "x", "max_tokens": 4, "guided_json": schema}


def innocent(*words: str) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 8, "guided_choice": list(words)}


def read(path: Path) -> bytes:
    """A file of /proc; empty where its process or thread is gone, even between opening and reading."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_bytes()
    return b""


def trial_seconds(api: int) -> float:
    """CPU time of all processes in which this server has tried constraints."""

    def used(pid: int, since: int) -> int:
        """Of a process with what it has waited for, or of the latter alone."""
        return sum(map(int, read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[since:15]))

    def children(pid: int) -> list[int]:
        """Each thread has its own."""
        return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in read(path).split()]

    found = used(api, 13)  # those that are gone
    for worker in children(api):
        if b"structured.worker" in read(Path(f"/proc/{worker}/cmdline")):
            found += used(worker, 11) + sum(used(copy, 11) for copy in children(worker))
    return found / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def ordinary(tiny: Path, serving_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving_process(tiny, tmp_path_factory.mktemp("ordinary")) as served:
        assert served.post("/v1/completions", innocent("warm", "up")).status == 200
        yield served


def begun(served: Any, body: dict[str, Any]) -> socket.socket:
    """The connection on which a request waits for its answer."""
    text = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    made: socket.socket = served.raw(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text, 280)
    return made


def is_answered(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def is_at_rest(served: Any) -> bool:
    """Whether nothing is tried."""
    before = trial_seconds(served.process.pid)
    time.sleep(0.5)
    return trial_seconds(served.process.pid) - before <= 0.02


def test_dropped_ones_cost_nobody_anything(ordinary: Any) -> None:
    """They are gone from the queue with their clients, and what runs of them ends."""
    before = trial_seconds(ordinary.process.pid)
    talks = [begun(ordinary, expensive(f"dropped{i}")) for i in range(DEAR)]
    ordinary.until(lambda: trial_seconds(ordinary.process.pid) > before + 0.05)
    time.sleep(0.2)  # all of them are in
    for talk in talks:
        talk.close()
    reply = ordinary.post("/v1/completions", innocent("yes", "no"))
    assert reply.json["choices"][0]["text"] in ("yes", "no")
    ordinary.until(lambda: is_at_rest(ordinary))
    assert trial_seconds(ordinary.process.pid) - before < 3.0, "ten of them would be 20"


def test_cheap_ones_do_not_wait_behind_expensive_ones(ordinary: Any) -> None:
    with ExitStack() as stack:
        before = trial_seconds(ordinary.process.pid)
        waiting = [stack.enter_context(begun(ordinary, expensive(f"waiting{i}"))) for i in range(DEAR)]
        ordinary.until(lambda: trial_seconds(ordinary.process.pid) > before + 0.05)
        for i in range(3):
            assert ordinary.post("/v1/completions", innocent(f"a{i}", f"b{i}")).status == 200
        assert trial_seconds(ordinary.process.pid) - before < 5.0, "all of them would be 20"
        assert sum(map(is_answered, waiting)) <= 2, "the expensive ones still wait"
    ordinary.until(lambda: is_at_rest(ordinary))


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"queue-timeout-s": 1}, 503, b"queue_timeout"),
        ({"request-timeout-s": 1, "queue-timeout-s": 0}, 504, b"timeout"),
    ],
    ids=["queue", "request"],
)
def test_deadlines_hold_for_trials(
    tiny: Path, serving_process: Any, tmp_path: Path, options: dict[str, float], status: int, code: bytes
) -> None:
    """Each takes 2 s of a core, the last one 10."""
    with serving_process(tiny, tmp_path, **options) as served:
        for talk in [begun(served, {**expensive(f"late{i}"), "stream": i % 2 == 0}) for i in range(5)]:
            answer = b"".join(iter(lambda talk=talk: talk.recv(2**16), b""))
            talk.close()
            assert answer.startswith(b"HTTP/1.1 %d " % status) and b'"code":"%s"' % code in answer, answer
            assert (b"Retry-After: 1" in answer) == (status == 503)
        served.until(lambda: is_at_rest(served))
