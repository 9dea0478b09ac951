"""A CUDA device, or one that is faked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specserve.registry import KERNELS
from specserve.testing import fake_cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.delenv("SPECSERVE_ISA", raising=False)  # a CPU's instructions, which a GPU refuses
    if torch.cuda.is_available():
        yield torch.device("cuda:0")
        return
    with fake_cuda() as device:
        monkeypatch.setattr(KERNELS.find("triton"), "buckets", (1, 4, 16, 40))  # each is run twice, op by op
        # Seconds, op by op, for each engine; test_selftest.py has it.
        monkeypatch.setattr("specserve.engine.build.tested", lambda ops, *asked: ops)
        yield device
