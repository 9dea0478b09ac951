"""Tokens that native kernels sample against those of the torch reference: same noise, same filters, same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specserve.kernels import reference
from specserve.ops import NO_TOKEN_LEFT, NOT_FINITE, SamplingArrays
from specserve.ops.isa import choose_isa
from specserve.sampling.inputs import num_logit_rows
from specserve.sampling.noise import hash_tokens, row_keys
from specserve.sampling.sampler import Sampler, sampling_arrays
from specserve.testing import sampled
from specserve.types import Draft, Ids, SamplingParams, Sequence

cpu = pytest.importorskip("specserve.kernels.cpu", exc_type=ImportError)
SETS = cpu.instruction_sets()
SETS = SETS[SETS.index(choose_isa("auto", SETS, "native")) :]  # SPECSERVE_ISA hides faster ones
OPS = reference.Kernels(torch.device("cpu"), torch.float32)
KERNELS = {isa: cpu.Kernels(torch.float32, "none", 2, isa) for isa in SETS}

filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.7, 10.0]),
        "top_k": st.sampled_from([0, 1, 2, 17, 40, 10_000]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    }
)

sequences = st.fixed_dictionaries(
    {
        "filters": st.one_of(st.just({"temperature": 0.0}), filters),
        "draft": st.sampled_from([0, 1, 2]),
        "share": st.sampled_from([None, None, 0.0, 0.05, 0.5]),
        "broken": st.sampled_from([None, None, None, torch.nan, torch.inf]),
    }
)
DRAFTS = [
    Draft.empty(),
    Draft.chain([3, 7]),
    Draft(np.array([3, 9, 11], np.int32), np.array([-1, -1, 0], np.int32)),
]


def examples(n: int) -> settings:
    """At most so many, and fewer where the profile says so."""
    return settings(max_examples=min(n, settings().max_examples))


def arrays(params: list[SamplingParams], rows: list[int] | None = None) -> SamplingArrays:
    """For rows seeded by their index."""
    keys = row_keys(list(range(len(params))), [5] * len(params), [0] * len(params))
    return sampling_arrays(range(len(params)) if rows is None else rows, params, keys.numpy())


def check(isa: str, scores: Tensor, params: list[SamplingParams], masks: Ids | None = None) -> list[int]:
    """The tokens that the native kernels and torch agree on, by a mask and by scores that it has been applied to."""
    sampling, hashed = arrays(params), hash_tokens(torch.arange(scores.shape[1]))
    masked = scores if masks is None else scores.masked_fill(~bits(masks, scores.shape[1]), -torch.inf)
    wanted = OPS.sample(masked, sampling, hashed, None).tolist()
    assert OPS.sample(scores, sampling, hashed, masks).tolist() == wanted
    assert KERNELS[isa].sample(scores, sampling, hashed, masks).tolist() == wanted
    return wanted


def bits(masks: Ids, vocab: int) -> Tensor:
    """Bool [rows, vocab], one bit after the other."""
    words = masks.view(np.uint32)
    return torch.tensor([[bool(row[t // 32] >> np.uint32(t % 32) & 1) for t in range(vocab)] for row in words])


def random_masks(rows: int, vocab: int, share: float, rng: np.random.Generator) -> Ids:
    """Rows in which this share of the tokens may come; bits behind the vocabulary are noise."""
    words = -(-vocab // 32)
    chosen = rng.random((rows, 32 * words)) < share
    return np.packbits(chosen, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("isa", KERNELS)
@examples(40)
@given(
    each=st.lists(filters, min_size=1, max_size=8),
    vocab=st.sampled_from([1, 2, 15, 16, 17, 300, 5001]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_samples_what_torch_samples(
    isa: str, each: list[dict[str, float]], vocab: int, spread: float, seed: int
) -> None:
    """Scores on a grid make ties at every border; ruled-out tokens are -inf."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(len(each), vocab, generator=generator) * spread * 4).round() / 4
    scores[:, 1:][torch.rand(len(each), vocab - 1, generator=generator) < 0.2] = -torch.inf
    check(isa, scores, [SamplingParams(**kwargs) for kwargs in each])


@pytest.mark.parametrize("isa", KERNELS)
@examples(60)
@given(
    each=st.lists(filters, min_size=1, max_size=6),
    vocab=st.sampled_from([1, 2, 31, 32, 33, 64, 300, 2001]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    share=st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_samples_under_a_mask_what_torch_samples_of_masked_scores(
    isa: str, each: list[dict[str, float]], vocab: int, spread: float, share: float, seed: int
) -> None:
    """Ties, ruled-out tokens, rows in which nothing may come, and rows in which all may."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    scores = (torch.randn(len(each), vocab, generator=generator) * spread * 4).round() / 4
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = -torch.inf
    masks = random_masks(len(each), vocab, share, rng)
    masks[rng.random(len(each)) < 0.2] = -1
    check(isa, scores, [SamplingParams(**kwargs) for kwargs in each], masks)


@pytest.mark.parametrize("isa", KERNELS)
def test_a_row_samples_the_same_whether_scores_or_a_mask_rule_tokens_out(isa: str) -> None:
    """The same kernels on the same row, as a batch with a penalty in it has it and as one without: a sum over what is
    left may not depend on where it lies, not by its last bit. So each row's top_p is halved down to the border at which
    its nucleus takes in the token that it draws of all, and there the two must agree. The law is steep, or else a sum
    of its weights is exact in any order."""
    rng, count, vocab = np.random.default_rng(7), 300, 500
    scores = torch.from_numpy(rng.normal(0, 6, (count, vocab)).astype(np.float32))
    masks = random_masks(count, vocab, 0.7, rng)
    masked = scores.masked_fill(~bits(masks, vocab), -torch.inf)
    sampling, hashed = arrays([SamplingParams(temperature=1.0)] * count), hash_tokens(torch.arange(vocab))
    unfiltered = KERNELS[isa].sample(scores, sampling, hashed, masks)
    assert len(np.unique(unfiltered)) > 100, "sampled from all over the vocabulary"
    low, high = np.zeros(count), np.ones(count)
    for _ in range(60):
        sampling = replace(sampling, top_p=(low + high) / 2)
        by_mask = KERNELS[isa].sample(scores, sampling, hashed, masks)
        assert np.array_equal(by_mask, KERNELS[isa].sample(masked, sampling, hashed, None))
        inside = by_mask == unfiltered
        low, high = np.where(inside, low, sampling.top_p), np.where(inside, sampling.top_p, high)


@pytest.mark.parametrize("isa", KERNELS)
@examples(40)
@given(data=st.data())
def test_a_batch_of_all_kinds_is_judged_the_same_by_native_kernels_and_torch(
    isa: str, sequence: Callable[..., Sequence], data: st.DataObject
) -> None:
    """Greedy and sampled, free and constrained, with chains and trees of drafts, broken rows and rows in which nothing
    may come: the same verdicts and failures."""
    vocab, asked = 70, data.draw(st.lists(sequences, min_size=1, max_size=6))
    seqs = [sequence([i, 5, 8], 2, 100 + i, **each["filters"]) for i, each in enumerate(asked)]
    drafts = [DRAFTS[each["draft"]] for each in asked]
    starts = np.cumsum([0, *(len(draft) + 1 for draft in drafts)]).tolist()
    rows = sampled(seqs, drafts, starts[:-1])
    generator, rng = torch.Generator().manual_seed(data.draw(st.integers(0, 999))), np.random.default_rng(1)
    logits = (torch.randn(num_logit_rows(rows.seqs), vocab, generator=generator) * 4).round() / 2
    masks = np.full((num_logit_rows(rows.seqs), 3), -1, np.int32)
    for start, end, each in zip(starts, starts[1:], asked, strict=False):
        if each["share"] is not None:
            masks[start:end] = random_masks(end - start, vocab, each["share"], rng)
        if each["broken"] is not None:
            logits[end - 1, 3] = each["broken"]
    best = torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    native, torchs = (Sampler(vocab, "coupled", ops).verdicts for ops in (KERNELS[isa], OPS))
    wanted = torchs(logits, rows, masks)
    assert torchs(logits, rows, masks, best) == wanted
    assert native(logits, rows, masks, best) == wanted


@pytest.mark.parametrize("isa", KERNELS)
def test_exactly_k_within_the_first_look(isa: str) -> None:
    """Where just k tokens lie near the best, the others are no less ruled out."""
    scores = torch.full((500, 2000), 4.0)
    scores[:, :40] = 20.0 + torch.rand(500, 40)
    params = [SamplingParams(temperature=8.0, top_k=40)] * 500
    assert max(check(isa, scores, params)) < 40


@pytest.mark.parametrize("isa", KERNELS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_best_token_says_why_and_spoils_no_other(isa: str, bad: float, temperature: float) -> None:
    scores = torch.randn(3, 100)
    scores[1] = bad
    found = check(isa, scores, [SamplingParams(temperature=temperature, top_p=0.9, top_k=7)] * 3)
    assert found[1] == (NOT_FINITE if bad > 0 else NO_TOKEN_LEFT)
    assert min(found[0], found[2]) >= 0


@pytest.mark.parametrize("isa", KERNELS)
def test_rows_are_sampled_wherever_they_lie(isa: str) -> None:
    """Row indices pick rows of a wider tensor, whose rows may be padded; their masks are picked with them."""
    wide, rows = torch.randn(10, 128), [7, 2, 9]
    scores, params = wide[:, :100], [SamplingParams(temperature=1.0), SamplingParams(), SamplingParams(temperature=0.0)]
    masks, hashed = random_masks(10, 100, 0.5, np.random.default_rng(0)), hash_tokens(torch.arange(100))
    for some, own in ((None, None), (masks, masks[rows])):
        got = KERNELS[isa].sample(scores, arrays(params, rows), hashed, some).tolist()
        assert got == check(isa, scores[rows].contiguous(), params, own)
        assert got == OPS.sample(scores, arrays(params, rows), hashed, some).tolist()


@pytest.mark.parametrize("isa", KERNELS)
@given(data=st.data())
@examples(150)
def test_the_best_of_those_that_may_come(isa: str, data: st.DataObject) -> None:
    """Against every token, one after the other: ties, words of all tokens, the last word, rows of a wider tensor."""
    vocab = data.draw(st.sampled_from([1, 31, 32, 33, 64, 100, 1000]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scores = rng.integers(-3, data.draw(st.sampled_from([-2, 4, 1000])), (3, vocab + 5)).astype(np.float32)
    scores[rng.random(scores.shape) < data.draw(st.sampled_from([0.0, 0.9]))] = -np.inf
    share = data.draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    some = rng.random((3, -(-vocab // 32) * 32)) < share
    some[:, :32] |= data.draw(st.booleans()) and share > 0  # a whole word
    infinite = data.draw(st.booleans())
    if infinite:
        scores[1, 0], some[1, 0] = np.inf, True
    masks = np.packbits(some, axis=1, bitorder="little").view(np.int32)
    wanted = []
    for row in range(3):
        may_come = [token for token in range(vocab) if some[row, token] and scores[row, token] > -np.inf]
        wanted.append(max(may_come, key=lambda token: scores[row, token], default=NO_TOKEN_LEFT))
    if infinite:
        wanted[1] = NOT_FINITE
    greedy, hashed = arrays([SamplingParams(temperature=0.0)] * 3), hash_tokens(torch.arange(vocab))
    for ops in (KERNELS[isa], OPS):
        assert ops.sample(torch.from_numpy(scores)[:, :vocab], greedy, hashed, masks).tolist() == wanted
