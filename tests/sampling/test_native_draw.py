"""Tokens that native kernels draw against those that torch draws: same noise, same filters, same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specserve.sampling.filters import laws, shape
from specserve.sampling.noise import draw, hash_tokens, row_keys
from specserve.types import SamplingParams

cpu = pytest.importorskip("specserve.kernels.cpu", exc_type=ImportError)
KERNELS = {isa: cpu.Kernels(torch.float32, "none", 2, isa) for isa in cpu._native.instruction_sets()}

filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-6, 0.3, 1.0, 1.7, 10.0]),
        "top_k": st.sampled_from([0, 1, 2, 17, 40, 10_000]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    }
)


def both(isa: str, scores: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """What torch and the native kernels draw in rows of their own, seeded by the row."""
    hashed = hash_tokens(torch.arange(scores.shape[1]))
    keys = row_keys(list(range(len(scores))), [5] * len(scores), [0] * len(scores))
    native = KERNELS[isa].draw(scores, np.arange(len(scores)), laws(params), keys, hashed)
    return draw(shape(scores, params), keys, hashed), native


@pytest.mark.parametrize("isa", KERNELS)
@settings(max_examples=40, deadline=None)
@given(
    each=st.lists(filters, min_size=1, max_size=8),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 300, 5001]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_draws_what_torch_draws(isa: str, each: list[dict[str, float]], vocab: int, spread: float, seed: int) -> None:
    """Scores on a grid make ties at every border; ruled-out tokens are -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(len(each), vocab, generator=generator) * spread * 4).round() / 4
    scores[:, 1:][torch.rand(len(each), vocab - 1, generator=generator) < 0.2] = -torch.inf
    wanted, got = both(isa, scores, [SamplingParams(**kwargs) for kwargs in each])
    assert torch.equal(wanted, got)


@pytest.mark.parametrize("isa", KERNELS)
def test_exactly_k_within_the_first_look(isa: str) -> None:
    """Where just k tokens lie near the best, the others are no less ruled out."""
    scores = torch.full((500, 2000), 4.0)
    scores[:, :40] = 20.0 + torch.rand(500, 40)
    params = [SamplingParams(temperature=8.0, top_k=40)] * 500
    wanted, got = both(isa, scores, params)
    assert torch.equal(wanted, got)
    assert int(got.max()) < 40


@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_a_row_without_a_best_token_draws_any_and_spoils_no_other(isa: str, bad: float) -> None:
    scores = torch.randn(3, 100)
    scores[1] = bad
    wanted, got = both(isa, scores, [SamplingParams(temperature=1.0, top_p=0.9, top_k=7)] * 3)
    assert torch.equal(wanted[[0, 2]], got[[0, 2]])
    assert 0 <= int(got[1]) < 100


@pytest.mark.parametrize("isa", KERNELS)
def test_rows_are_drawn_wherever_they_lie(isa: str) -> None:
    """Row indices pick rows of a wider tensor, whose rows may be padded."""
    wide = torch.randn(10, 128)
    scores, params = wide[:, :100], [SamplingParams(temperature=1.0)] * 3
    hashed, keys = hash_tokens(torch.arange(100)), row_keys([1, 2, 3], [0, 1, 2], [0] * 3)
    rows = np.array([7, 2, 9])
    got = KERNELS[isa].draw(scores, rows, laws(params), keys, hashed)
    assert torch.equal(got, draw(shape(scores[rows].contiguous(), params), keys, hashed))
