"""A server whose engine is several processes: one that is killed, or stands still, is told to every client, and the
next engine says the same; whatever ends, nothing is left."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.http.test_lifecycle import LONG, engine_is_another, receive_all, request_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)
SHORT = {**LONG, "max_tokens": 12}


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def divided(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, serving_process: Any, request: pytest.FixtureRequest
) -> Iterator[Any]:
    options = {f"{request.param}-parallel-size": 2, "stall-timeout-s": 1.5, "threads": 1, "served-model-name": "tiny"}
    with serving_process(tiny, tmp_path_factory.mktemp("divided"), **options) as served:
        yield served


def others(served: Any) -> list[int]:
    """The processes of its engine's model beside the engine."""
    engine = served.engine_pid
    return [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text("utf-8").split()]


def tokens(served: Any) -> list[int]:
    reply = served.post("/v1/completions", SHORT)
    assert reply.status == 200, reply.json
    return list(reply.json["choices"][0]["token_ids"])


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_process_that_is_lost(divided: Any, fault: int) -> None:
    said, engine, (other,) = tokens(divided), divided.engine_pid, others(divided)
    streams = [divided.raw(request_of({**LONG, "stream": True, "n": 2})) for _ in range(3)]
    assert streams[0].recv(10)
    os.kill(other, fault)
    ends = [receive_all(talk) for talk in streams]
    assert all(b'data: {"error"' in text or b'{"error":{' in text for text in ends)
    engine_is_another(divided, engine)
    divided.until(lambda: not Path(f"/proc/{other}").exists() and not Path(f"/proc/{engine}").exists())
    assert tokens(divided) == said


def test_the_server_ends_with_all_processes(tiny: Path, tmp_path: Path, serving_process: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        (folder := tmp_path / str(int(number))).mkdir()
        with serving_process(tiny, folder, **{"tensor-parallel-size": 2, "threads": 1}) as served:
            engine, (other,) = served.engine_pid, others(served)
            os.kill(served.process.pid, number)
            served.process.wait(30)
            wait_for_end(engine, other)


def wait_for_end(*pids: int) -> None:
    until = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until, "they end with the server"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text("utf-8")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("option", "size", "says"),
    [("tensor-parallel-size", 3, "it may be 1, 2, 4"), ("pipeline-parallel-size", 9, "it may be at most ")],
)
def test_a_size_that_does_not_fit_ends_the_start(
    tiny: Path, tmp_path: Path, serving_process: Any, option: str, size: int, says: str
) -> None:
    with serving_process(tiny, tmp_path, ready=False, **{option: size}) as served:
        assert served.process.wait(60) == 2
        assert says in served.said
