"""Layouts that are combined: several processes that answer, with replicas, with models in several processes, and with
prompts that are computed apart. Their text is that of one process, and whoever is killed or stopped costs its own
clients only, and leaves nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import layout as module
from specserve.config import EngineConfig
from specserve.layout import Layout
from specserve.llm import LLM
from specserve.ops.choice import choose_ops
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams
from tests.processes import family, is_alive, own_bytes
from tests.server.rounds import API, BODIES, ENGINE, OPTIONS, RANK, STALL_S, Loss, Rounds

NATIVE = importlib.util.find_spec("specserve.kernels._native") is not None
KILL, STOP, SOME = signal.SIGKILL, signal.SIGSTOP, "some"
OPTIONS_OF: dict[str, dict[str, int]] = {
    "data": {"data-parallel-size": 2},
    "tensor": {"tensor-parallel-size": 2},
    "pipeline": {"pipeline-parallel-size": 2},
}
LOSSES = {  # the first two always
    "data": [Loss(API, KILL, SOME), Loss(ENGINE, KILL, SOME, 1), Loss(ENGINE, STOP, SOME), Loss(API, STOP, SOME, 1)],
    "tensor": [Loss(RANK, KILL), Loss(API, KILL, SOME), Loss(RANK, STOP), Loss(ENGINE, KILL)],
    "pipeline": [Loss(RANK, STOP), Loss(API, KILL, SOME, 1), Loss(RANK, KILL), Loss(ENGINE, STOP)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What one process says, without drafts."""
    params = [
        SamplingParams(temperature=body["temperature"], seed=body.get("seed"), max_tokens=24, ignore_eos=True)
        for body in BODIES
    ]
    options: dict[str, Any] = {name.replace("-", "_"): value for name, value in OPTIONS.items()}
    with LLM(str(folder), threads=1, drafter="none", **options) as llm:
        return [each.outputs[0].token_ids for each in llm.generate([body["prompt"] for body in BODIES], params)]


@pytest.fixture(scope="module")
def one() -> int:
    """What a process has for itself that looks what an engine would find."""
    code = "import specserve.doctor; from specserve.cache.sizing import own_memory; print(own_memory())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def rounds_of(expected: list[list[int]], num_rounds: int) -> Callable[..., Rounds]:
    """Of a server, and of what is beside it."""
    return lambda served, *beside: Rounds(served, expected, num_rounds, *beside)


@pytest.mark.parametrize("layout", OPTIONS_OF)
def test_processes_that_answer_with_engines_of_a_layout(
    layout: str,
    folder: Path,
    rounds_of: Callable[..., Rounds],
    one: int,
    tmp_path: Path,
    serving_process: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not NATIVE and layout != "data":
        pytest.skip("Built without native kernels.")
    options: dict[str, Any] = {**OPTIONS, **OPTIONS_OF[layout], "stall-timeout-s": STALL_S, "api-processes": 2}
    with serving_process(folder, tmp_path, "--admin", "--no-adaptive", "--drafter=ngram", **options) as served:
        rounds = rounds_of(served)
        sizes = {name.replace("-", "_"): value for name, value in {**OPTIONS, **OPTIONS_OF[layout]}.items()}
        num_replicas = sizes.pop("data_parallel_size", 1)
        check_memory(served, folder, Layout(EngineConfig(**sizes), num_replicas, 0, 2), one, monkeypatch)
        rounds.run(LOSSES[layout])
        if layout == "data":
            text = served.get("/metrics").body.decode()
            assert set(re.findall(r'replica="(\d+)"', text)) == {"0", "1"}
        check_end(served)


def check_memory(served: Any, folder: Path, layout: Layout, one: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server's processes have committed is what was told before the start, without what a step works on at
    most, a cache that nobody has filled, and libraries, which other programs map, too."""
    monkeypatch.setattr(module, "own_memory", lambda: one)
    ops = choose_ops(torch.device("cpu"), "float32", "none", 1)
    found = module.estimate(layout, folder, ops, 2**36)
    told = found.weights + found.processes - module._LIBRARY_BYTES
    real = own_bytes(served.process.pid)
    assert real == pytest.approx(told, rel=0.1), f"{real / 2**20:.0f} MiB, and {told / 2**20:.0f} MiB were told"


def check_end(served: Any) -> None:
    """All processes end with a coordinator that is killed."""
    pids = family(served.process.pid)[1:]
    assert len(pids) > 3
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait()
    until = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "Traceback" not in served.said
