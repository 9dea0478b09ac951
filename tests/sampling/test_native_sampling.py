"""Tokens that native kernels sample against those of the torch reference: same noise, same filters, same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from specserve.config import VERIFICATIONS
from specserve.kernels import reference
from specserve.ops import NO_TOKEN_LEFT, NOT_FINITE, DraftArrays, Ops
from specserve.ops.isa import choose_isa
from specserve.sampling.inputs import SampledSeq
from specserve.sampling.noise import hash_tokens
from specserve.sampling.sampler import Sampler, draft_arrays, edited
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
        "filters": st.one_of(st.just({"temperature": 0.0}), filters, st.just({"repetition_penalty": 1.7})),
        "share": st.sampled_from([None, None, 0.0, 0.05, 0.5]),
        "broken": st.sampled_from([None, None, None, torch.nan, torch.inf]),
    }
)


def examples(n: int) -> settings:
    """At most so many, and fewer where the profile says so."""
    return settings(max_examples=min(n, settings().max_examples))


def arrays(params: list[SamplingParams]) -> DraftArrays:
    """For rows seeded by their index, none of which may keep the best by raw logits unseen."""
    drafts = draft_arrays([SampledSeq(Draft.empty(), own, row, 5, row, None) for row, own in enumerate(params)])
    drafts.seqs[2] = True
    return drafts


def sample(ops: Ops, scores: Tensor, drafts: DraftArrays, masks: Ids | None) -> Ids:
    """The token of each row, or why it has none."""
    best, hashed = torch.zeros(len(scores), dtype=torch.int64), hash_tokens(torch.arange(scores.shape[1]))
    found = ops.verify(scores, best, drafts, hashed, masks, "coupled")
    assert found.counts.tolist() == (found.tokens >= 0).tolist()
    assert not found.nodes.any()
    return found.tokens


def check(isa: str, scores: Tensor, params: list[SamplingParams], masks: Ids | None = None) -> list[int]:
    """The tokens that the native kernels and torch agree on, by a mask and by scores that it has been applied to."""
    drafts = arrays(params)
    masked = scores if masks is None else scores.masked_fill(~bits(masks, scores.shape[1]), -torch.inf)
    wanted = sample(OPS, masked, drafts, None).tolist()
    assert sample(OPS, scores, drafts, masks).tolist() == wanted
    assert sample(KERNELS[isa], scores, drafts, masks).tolist() == wanted
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
    drafts = arrays([SamplingParams(temperature=1.0)] * count)
    unfiltered = sample(KERNELS[isa], scores, drafts, masks)
    assert len(np.unique(unfiltered)) > 100, "sampled from all over the vocabulary"
    low, high = np.zeros(count), np.ones(count)
    for _ in range(60):
        top_p = drafts.laws[2] = (low + high) / 2
        by_mask = sample(KERNELS[isa], scores, drafts, masks)
        assert np.array_equal(by_mask, sample(KERNELS[isa], masked, drafts, None))
        inside = by_mask == unfiltered
        low, high = np.where(inside, low, top_p), np.where(inside, top_p, high)


@st.composite
def drafts_of(draw: st.DrawFn, vocab: int) -> Draft:
    """None, a chain or a tree of likely and unlikely tokens, one-hot or drawn from anything, even where that is not
    what it says."""
    parents: list[int] = []
    tokens: list[int] = []
    is_chain = draw(st.booleans())
    for node in range(draw(st.integers(0, 6))):
        parent = node - 1 if is_chain else draw(st.integers(-1, node - 1))
        elders = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        parents.append(parent)
        tokens.append(draw(st.sampled_from(sorted({*range(8)} - elders))))
    nodes = np.array(tokens, np.int32), np.array(parents, np.int32)
    kind = draw(st.sampled_from([None, None, torch.float32, torch.float64]))
    if kind is None or not tokens:
        return Draft(*nodes)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    q = random.dirichlet(np.full(vocab, 0.3), len(tokens)) * 0.5
    q[np.arange(len(tokens)), tokens] += 0.5
    return Draft(*nodes, torch.tensor(q).to(kind))


@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize("isa", KERNELS)
@examples(60)
@given(data=st.data())
def test_drafts_are_verified_alike_by_native_kernels_and_torch(
    isa: str, verification: str, sequence: Callable[..., Sequence], data: st.DataObject
) -> None:
    """Greedy and sampled, free and constrained, with chains and trees of drafts, broken rows and rows in which nothing
    may come: every number of the result, alone and among others."""
    vocab, asked = 70, data.draw(st.lists(sequences, min_size=1, max_size=6))
    drafts = [data.draw(drafts_of(vocab)) for _ in asked]
    seqs = [sequence([i, 5, 8], 2, 2**63 * (i % 2) + i, **each["filters"]) for i, each in enumerate(asked)]
    starts = np.cumsum([0, *(len(draft) + 1 for draft in drafts)]).tolist()
    rows = sampled(seqs, drafts, starts[:-1])
    generator, rng = torch.Generator().manual_seed(data.draw(st.integers(0, 999))), np.random.default_rng(1)
    logits = (torch.randn(starts[-1], vocab, generator=generator) * 4).round() / 2
    logits[:, :8] += data.draw(st.sampled_from([0, 3]))
    masks = np.full((starts[-1], 3), -1, np.int32)
    for start, end, each in zip(starts, starts[1:], asked, strict=False):
        if each["share"] is not None:
            masks[start:end] = random_masks(end - start, vocab, each["share"], rng)
        if each["broken"] is not None:
            logits[end - 1, 3] = each["broken"]
    best = torch.where(logits.amax(-1).isfinite(), logits.argmax(-1), -1)
    given_masks = data.draw(st.sampled_from([None, masks]))
    scores, hashed = edited(logits, rows), hash_tokens(torch.arange(vocab))
    wanted, found = (
        ops.verify(scores, best, draft_arrays(rows.seqs), hashed, given_masks, verification)
        for ops in (OPS, KERNELS[isa])
    )
    for one, other in zip(wanted, found, strict=True):
        assert one.tolist() == other.tolist()
    native = Sampler(vocab, verification, KERNELS[isa])
    together = native.verdicts(logits, rows, given_masks, best)
    assert Sampler(vocab, verification, OPS).verdicts(logits, rows, given_masks) == together
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        own = None if given_masks is None else given_masks[start:end]
        alone = sampled(seqs[i : i + 1], drafts[i : i + 1], [0])
        assert native.verdicts(logits[start:end], alone, own, best[start:end]) == [together[i]]


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
    """In a wider tensor, whose rows may be padded, with more rows after them."""
    scores = torch.randn(10, 128)[:, :100]
    params = [SamplingParams(temperature=1.0), SamplingParams(), SamplingParams(temperature=0.0)]
    for masks in (None, random_masks(3, 100, 0.5, np.random.default_rng(0))):
        wanted = check(isa, scores[:3].contiguous(), params, masks)
        for ops in (KERNELS[isa], OPS):
            assert sample(ops, scores, arrays(params), masks).tolist() == wanted


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
    greedy = arrays([SamplingParams(temperature=0.0)] * 3)
    for ops in (KERNELS[isa], OPS):
        assert sample(ops, torch.from_numpy(scores)[:, :vocab], greedy, masks).tolist() == wanted
