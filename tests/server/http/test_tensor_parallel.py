"""A server whose engine is several processes: whatever ends it, nothing is left. What happens where one of them is
lost is in tests/server/engine/test_layouts.py."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import is_alive

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)


def others(served: Any) -> list[int]:
    """The processes of its engine's model beside the engine."""
    engine = served.engine_pid
    return [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text("utf-8").split()]


def test_the_server_ends_with_all_processes(tiny: Path, tmp_path: Path, serving_process: Any, num_rounds: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL) * num_rounds:
        (folder := tmp_path / str(int(number))).mkdir(exist_ok=True)
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
