"""The pulse of a step: kernels count up while they work, and another process can see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.request import Request
from specserve.kernels.reference import Kernels
from specserve.machine.pulse import Pulse, shared_memory
from specserve.runtime.executor import local
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams


def test_a_recorded_step_beats_within_itself(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=3)
    engine = build(EngineConfig(model=str(folder), dtype="float32", max_model_len=128, threads=2)).engine
    pulse = Pulse()
    local(engine.executor).runner.ops.watch(pulse)
    engine.add(Request(id="r", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=2, ignore_eos=True)))
    engine.step()
    assert pulse.count >= 2 * 3, "several times in each of three layers"


def test_the_reference_beats_with_each_product() -> None:
    kernels, pulse = Kernels(torch.device("cpu"), torch.float32), Pulse()
    kernels.watch(pulse)
    weight = kernels.pack(torch.ones(64, 64))
    for count in range(1, 4):
        kernels.linear(torch.ones(4, 64), weight)
        assert pulse.count == count


def test_another_process_sees_it() -> None:
    memory = shared_memory()
    try:
        pulse = Pulse(memory)
        program = (
            "import sys; from specserve.machine.pulse import Pulse\n"
            "p = Pulse(int(sys.argv[1])); [p.beat() for _ in range(7)]"
        )
        subprocess.run([sys.executable, "-c", program, str(memory)], pass_fds=[memory], check=True)
    finally:
        os.close(memory)
    assert pulse.count == 7, "the memory outlives its descriptor"
