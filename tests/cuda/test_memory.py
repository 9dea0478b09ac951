"""What graphs take of a GPU's memory: measured where the KV cache would be short of it, and left for them; how long a
start waits for them, and what it shows meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.cache.sizing import logit_rows, step_bytes
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.errors import CapacityError
from specserve.ops import Input, capture
from specserve.ops.backend import KernelOptions
from specserve.ops.capture import Captured, recorded_bytes, recording_at_start
from specserve.registry import KERNELS
from specserve.testing import fake_cuda, write_tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

MIB = 2**20
INPUTS = [Input(torch.int64)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("memory") / "tiny", "llama", seed=3)


@contextmanager
def gpu(free_bytes: int = 2**31) -> Iterator[Any]:
    """Yields Triton's kernels."""
    with pytest.MonkeyPatch.context() as patch, fake_cuda(free_bytes) as device:
        patch.delenv("SPECSERVE_ISA", raising=False)
        kernels: Any = KERNELS.find("triton")
        patch.setattr(kernels, "buckets", (2, 4, 8))
        patch.setattr("specserve.engine.build.tested", lambda ops, *asked: ops)
        yield kernels.create(KernelOptions(device, "float32", "none"))


def started(tiny: Path, progress: bool = False, **options: Any) -> Built:
    config: dict[str, Any] = {
        "max_num_seqs": 512,
        "max_num_batched_tokens": 512,
        "max_model_len": 256,
        "drafter": "none",
        **options,
    }
    made = EngineConfig(model=str(tiny), device="cuda", dtype="float32", threads=1, adaptive=False, **config)
    return build(made, progress=progress)


@pytest.mark.parametrize("free", [50 * MIB, 100 * MIB])
def test_graphs_have_what_they_take(tiny: Path, free: int) -> None:
    """With what a step takes beside them: what is free at the end is enough for that."""
    with gpu(free) as ops:
        built = started(tiny)
        assert "90% of what 0.01 GiB of graphs leave" in built.summary
        executor: Any = built.engine.executor
        spec = executor.runner.model.spec
        step = step_bytes(512, spec.step_width, logit_rows(spec.vocab_size, 512, 512), spec.vocab_size)
        left = torch.cuda.mem_get_info(ops.device)[0] - step
        assert 0 < left < 0.11 * (built.num_kv_bytes + left)


def test_they_are_not_measured_where_all_fits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.engine.build.recorded_bytes", lambda *asked: pytest.fail("measured"))
    with gpu():
        assert "all sequences at full length" in started(tiny).summary
        assert "kv_cache_gib" in started(tiny, kv_cache_gib=0.01).summary


def test_graphs_that_leave_nothing_end_the_start(tiny: Path) -> None:
    said = r"there are 0\.000 GiB \(90% of what 0\.01 GiB of graphs leave; 0\.0\d\d GiB free\)"
    with gpu(15 * MIB), pytest.raises(CapacityError, match=said):
        started(tiny)


def test_what_was_measured_is_gone() -> None:
    with gpu() as ops:
        free = torch.cuda.mem_get_info(ops.device)[0]
        assert recorded_bytes(ops.device, lambda: torch.zeros(MIB, dtype=torch.uint8, device=ops.device)) == MIB
        assert torch.cuda.mem_get_info(ops.device)[0] == free
        kept = torch.zeros(MIB, dtype=torch.uint8, device=ops.device)
        assert free - torch.cuda.mem_get_info(ops.device)[0] == kept.nbytes


def doubled(plan: Any, numbers: Tensor) -> Tensor:
    return 2 * numbers


def test_a_start_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The largest is captured, in whose memory the others find room, and they when they are asked for."""
    seen: list[int] = []

    def noted(plan: Any, numbers: Tensor) -> Tensor:
        seen.append(len(numbers))
        return doubled(plan, numbers)

    monkeypatch.setattr(capture, "LONGEST_S", 0.0)
    with gpu() as ops:
        with recording_at_start(progress=False):
            captured = Captured(ops, noted, INPUTS, 8)
        assert set(seen) == {8}
        assert "Of 3 graphs 1 were captured within 0 s" in caplog.text
        captured.start([torch.arange(2).numpy()], 2)
        assert captured.finish().tolist() == [0, 2]
        assert captured.is_replayed
        assert set(seen) == {8, 2}


def test_captures_are_shown(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gpu() as ops:
        for visible in (False, True):
            with recording_at_start(visible):
                Captured(ops, doubled, INPUTS, 8)
            shown = capsys.readouterr()
            assert ("Capturing graphs" in shown.err) == visible
            assert shown.out == ""
        Captured(ops, doubled, INPUTS, 8)
        with recording_at_start(progress=True):
            Captured(ops, doubled, INPUTS, 1)
        assert capsys.readouterr().err == "", "one is no work to wait for"
        started(tiny, progress=True)
        assert "Capturing graphs" in capsys.readouterr().err
