"""Log-probabilities: native kernels and torch agree in every bit, both are right, and neither needs memory or time out
of proportion to the logits."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specserve.kernels import _torch_sampling, reference
from specserve.ops import fraction_bits
from specserve.sampling.logprobs import token_logprobs
from specserve.types import TokenLogprobs

cpu = pytest.importorskip("specserve.kernels.cpu", exc_type=ImportError)
OPS = reference.Kernels(torch.device("cpu"), torch.float32)
KERNELS = {isa: cpu.Kernels(torch.float32, "none", 2, isa) for isa in cpu._native.instruction_sets()}

shapes = st.fixed_dictionaries(
    {
        "vocab": st.sampled_from([1, 2, 15, 16, 17, 33, 255, 257, 1000, 5003]),
        "spread": st.sampled_from([0.0, 0.5, 3.0, 30.0, 1e4]),
        "grid": st.sampled_from([None, 2.0]),
        "ruled_out": st.sampled_from([0.0, 0.5, 0.99]),
        "broken": st.sampled_from([None, None, math.nan, math.inf]),
        "seed": st.integers(0, 2**16),
    }
)


def rows_of(vocab: int, spread: float, grid: float | None, ruled_out: float, broken: float | None, seed: int):
    """Six rows of a wider tensor: ties on a grid, both zeros, tokens ruled out, a row that cannot be used, one where
    nothing may come, one that grows, so that each of its tokens is the best so far."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(6, vocab + 7, generator=generator) * spread
    wide = wide if grid is None else (wide * grid).round() / grid
    logits = wide[:, :vocab]
    logits[torch.rand(logits.shape, generator=generator) < ruled_out] = -torch.inf
    logits[1, ::2] = -0.0
    logits[4] = logits[4].sort().values
    if broken is not None:
        logits[2, -1] = broken
        logits[3] = -torch.inf
    return logits, torch.randint(vocab, (6,), generator=generator).tolist()


@pytest.mark.parametrize("isa", KERNELS)
@settings(max_examples=100)
@given(shape=shapes, ks=st.lists(st.sampled_from([0, 1, 3, 20, 64]), min_size=6, max_size=6))
def test_native_scores_are_those_of_torch_bit_for_bit(isa: str, shape: dict, ks: list[int]) -> None:
    logits, tokens = rows_of(**shape)
    order = [5, 0, 3, 2, 1, 4]
    tokens, native = [tokens[row] for row in order], KERNELS[isa]
    wanted = token_logprobs(OPS, logits, order, tokens, ks)
    found = token_logprobs(native, logits, order, tokens, ks)
    assert list(map(bits, found)) == list(map(bits, wanted))
    for i, row in enumerate(order):
        (alone,) = token_logprobs(native, logits[row : row + 1], [0], tokens[i : i + 1], ks[i : i + 1])
        assert bits(alone) == bits(found[i])


def bits(entry: TokenLogprobs) -> object:
    """Equal where every bit is: -0.0 is not 0.0."""
    return entry.token, entry.rank, list(map(str, [entry.logprob, *entry.top.items()]))


@settings(max_examples=100)
@given(shape=shapes, k=st.sampled_from([0, 1, 7, 64]))
def test_scores_are_right(shape: dict, k: int) -> None:
    """Against float64, and one token after the other."""
    logits, tokens = rows_of(**shape)
    for row, entry in enumerate(token_logprobs(OPS, logits, range(6), tokens, [k] * 6)):
        scores, token = logits[row].double().tolist(), tokens[row]
        peak = max(scores)
        if not math.isfinite(sum(score for score in scores if score != -math.inf)) or peak == -math.inf:
            assert entry == TokenLogprobs(token, -math.inf, len(scores), {})
            continue
        order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))[:k]
        total = peak + math.log(math.fsum(math.exp(score - peak) for score in scores))
        wanted = [scores[t] - total for t in (token, *order)]
        assert (entry.token, list(entry.top)) == (token, order)
        assert entry.rank == 1 + sum(score > scores[token] for score in scores)
        np.testing.assert_allclose([entry.logprob, *entry.top.values()], wanted, rtol=1.2e-7, atol=1e-9)


def test_exponentials_are_right_to_their_last_digits_and_one_at_zero() -> None:
    x = torch.linspace(-64, 0, 100_001, dtype=torch.float64)
    found = _torch_sampling._exp_below_zero(x.clone())
    assert found[-1] == 1
    np.testing.assert_allclose(found.numpy(), np.exp(x.numpy()), rtol=2e-14)
    assert _torch_sampling._exp_below_zero(torch.tensor([-1e9, -math.inf]).double()).tolist() == [found[0]] * 2


@pytest.mark.parametrize("vocab", [1, 2, 4096, 151_936, 2**20])
def test_sums_of_equal_logits_do_not_overflow(vocab: int) -> None:
    assert vocab * 2 ** fraction_bits(vocab) < 2**63
    for ops in (OPS, *KERNELS.values()):
        (entry,) = token_logprobs(ops, torch.full((1, vocab), 5.0), [0], [vocab - 1], [1])
        assert entry.logprob == pytest.approx(-math.log(vocab), abs=1e-6)
        assert (entry.rank, list(entry.top)) == (1, [0])


def test_torch_goes_over_slices_whatever_the_vocabulary() -> None:
    """The same numbers from slices of any size; none larger than it has to be."""
    logits = torch.randn(7, 3000, generator=torch.Generator().manual_seed(0))
    sizes = []
    work = _torch_sampling._score_slice

    def watched(raw: torch.Tensor, chosen: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
        sizes.append(raw.numel())
        return work(raw, chosen, k)

    wanted = token_logprobs(OPS, logits, range(7), [*range(7)], [5] * 7)
    with (
        mock.patch.object(_torch_sampling, "_score_slice", watched),
        mock.patch.object(_torch_sampling, "_SLICE", 7000),
    ):
        assert token_logprobs(OPS, logits, range(7), [*range(7)], [5] * 7) == wanted
    assert sizes == [6000, 6000, 6000, 3000]
    assert _torch_sampling._SLICE * 8 <= 2**22
