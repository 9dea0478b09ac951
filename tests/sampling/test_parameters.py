"""Every parameter does what a naive float64 oracle says, alone and with the others, in plain rows and in draft rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specserve.errors import ConfigError
from specserve.kernels import _torch_sampling, reference
from specserve.kernels._torch_sampling import SamplingArrays
from specserve.ops import NO_TOKEN_LEFT
from specserve.ops.fixed_point import row_total
from specserve.sampling import bad_words, edits
from specserve.sampling.edits import row_depths
from specserve.sampling.inputs import SampledSeq, SamplingInput
from specserve.sampling.sampler import Sampler, draft_arrays, edited
from specserve.testing import path_to, sampled
from specserve.types import Draft, Failure, Ids, SamplingParams, Sequence, Verdict

VOCAB = 12
OPS = reference.Kernels(torch.device("cpu"), torch.float32)
Oracle = Callable[..., np.ndarray | None]
Make = Callable[..., Sequence]

token_ids = st.integers(0, VOCAB - 1)
# Multiples of 1/8 and penalties that are powers of two are exact in float32, so that equals stay equal in the oracle.
logit_rows = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
options = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.7]),
        "top_k": st.integers(-1, VOCAB + 2),
        "top_p": st.sampled_from([0.037, 0.31, 0.61, 0.89, 0.973]),
        "min_p": st.sampled_from([0.013, 0.171, 0.57, 0.931]),
        "repetition_penalty": st.sampled_from([0.5, 2.0, 4.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.25, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.125, 1.0]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-100.0, -1.25, 0.5, 3.0]), max_size=3),
        "allowed_token_ids": st.lists(token_ids, min_size=2, max_size=VOCAB),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(token_ids, max_size=2),
        "bad_ids": st.lists(st.lists(token_ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "eos_ids": st.frozensets(token_ids, max_size=2),
    },
)


@st.composite
def drafts(draw: Any) -> Draft:
    """A chain or a tree of at most four nodes; siblings differ."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(0, 4))):
        parent = draw(st.integers(-1, node - 1))
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        token = draw(st.sampled_from(sorted(set(range(VOCAB)) - taken)))
        parents.append(parent)
        tokens.append(token)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


def _words(allowed: list[list[bool]]) -> Ids:
    rows = np.zeros((len(allowed), 32), np.uint8)
    rows[:, : len(allowed[0])] = allowed
    return np.packbits(rows, axis=1, bitorder="little").view(np.int32)


def _arrays(params: list[SamplingParams]) -> SamplingArrays:
    """How rows are sampled that are so many."""
    drafts = draft_arrays([SampledSeq(Draft.empty(), own, 0, 0, row, None) for row, own in enumerate(params)])
    at = np.arange(len(params))
    return SamplingArrays(at, *drafts.laws, drafts.seqs[1], 0 * at)


def _filtered(scores: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return _torch_sampling.filtered(scores, _arrays(params))


def _probabilities(scores: torch.Tensor, params: list[SamplingParams], masks: Ids | None = None) -> torch.Tensor:
    return _torch_sampling.probabilities(scores, _arrays(params), masks)


def _path(draft: Draft, row: int) -> list[int]:
    return [int(draft.tokens[i]) for i in path_to(draft, row - 1)]


@settings(max_examples=250, derandomize=True)
@given(data=st.data(), own=options, draft=drafts(), masked=st.booleans())
def test_the_law_of_every_row_is_the_oracles(
    data: st.DataObject, own: dict[str, Any], draft: Draft, masked: bool, sequence: Make, oracle: Oracle
) -> None:
    tokens = data.draw(st.lists(token_ids, min_size=2, max_size=8))
    seq = sequence(tokens, data.draw(st.integers(1, len(tokens))), **own)
    logits = [data.draw(logit_rows) for _ in range(len(draft) + 1)]
    bits = st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB)
    allowed = [data.draw(bits) for _ in logits] if masked else None
    raw = torch.tensor(logits)
    before = raw.clone()
    masks = _words(allowed) if allowed else None
    scores = edited(raw, sampled([seq], [draft], [0]))
    assert torch.equal(raw, before), "the caller's logits were changed"
    hashed = torch.zeros(VOCAB, dtype=torch.int64)
    best = _torch_sampling.sample(scores, _arrays([SamplingParams(temperature=0.0)] * len(scores)), hashed, masks)
    laws = _probabilities(scores, [seq.params] * len(scores), masks) if seq.params.temperature else None
    for row in range(len(scores)):
        expected = oracle(logits[row], seq, _path(draft, row), allowed[row] if allowed else None)
        if expected is None:
            assert best[row] == NO_TOKEN_LEFT
        elif laws is None:
            assert expected[best[row]] == 1
        else:
            np.testing.assert_allclose(laws[row].numpy(), expected, rtol=1e-9, atol=1e-12)


def judge(mode: str, vocab: int = VOCAB) -> Callable[..., list[Verdict | Failure]]:
    return Sampler(vocab, mode, OPS).verdicts


def one(verdicts: list[Verdict | Failure]) -> Verdict:
    (verdict,) = verdicts
    assert isinstance(verdict, Verdict)
    return verdict


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "logit_bias": {3: 1.5, 7: -2.0},
    "bad_ids": ((4, 5), (9,), (2, 8, 1)),
    "min_tokens": 5,
    "stop_token_ids": [0],
    "top_k": 8,
    "top_p": 0.93,
    "min_p": 0.02,
}


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, -1, 0, 1, 1, 4]], ids=["chain", "tree"])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_draft_row_is_the_row_of_plain_decoding(parents: list[int], greedy: bool, sequence: Make) -> None:
    """Row by row and bit for bit what the row is once its path has been committed: penalties, bad words and min_tokens
    count what is in the window."""
    generator = torch.Generator().manual_seed(5)
    own = EVERYTHING | ({"temperature": 0} if greedy else {})
    for trial in range(25):
        tokens = torch.randint(VOCAB, (6,), generator=generator).tolist()
        picks = torch.randperm(VOCAB, generator=generator)[: len(parents)].numpy().astype(np.int32)
        draft = Draft(picks, np.array(parents, np.int32))
        logits = torch.randn(len(parents) + 1, VOCAB, generator=generator) * 2
        seq = sequence(tokens, 2, trial, **own)
        together = edited(logits, sampled([seq], [draft], [0]))
        assert not torch.equal(together, logits)
        for row in range(len(logits)):
            later = sequence([*tokens, *_path(draft, row)], 2, trial, **own)
            alone = edited(logits[row : row + 1], sampled([later], [Draft.empty()], [0]))
            assert torch.equal(alone[0], together[row])
            if not greedy:
                shaped = [_filtered(scores, [seq.params] * len(scores)) for scores in (alone, together)]
                assert torch.equal(shaped[0][0], shaped[1][row])


def test_prompt_counts_for_repetition_alone(sequence: Make) -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0]])

    def rows(**own: float) -> SamplingInput:
        return sampled([sequence([0, 1, 2, 3, 2], 2, **own)], [Draft.empty()], [0])

    assert edited(logits, rows(repetition_penalty=2.0)).tolist() == [[1.0, -4.0, 1.0, -4.0, 1.0]]
    assert edited(logits, rows(presence_penalty=0.5)).tolist() == [[2.0, -2.0, 1.5, -2.5, 1.0]]
    assert edited(logits, rows(frequency_penalty=0.5)).tolist() == [[2.0, -2.0, 1.0, -2.5, 1.0]]


def test_nothing_asked_costs_nothing(sequence: Make) -> None:
    """No copy of the logits unless something edits them."""
    logits = torch.randn(3, VOCAB)
    rows = sampled(
        [sequence([1, 2], 1), sequence([3], 1, min_tokens=0, temperature=0.0)],
        [Draft.chain([4]), Draft.empty()],
        [0, 2],
    )
    assert edited(logits, rows) is logits


def test_one_sequences_parameters_leave_the_other_rows_alone(sequence: Make) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    plain, changed = sequence([1, 2, 3], 1), sequence([1, 2, 3], 1, allowed_token_ids=[1, 5], **EVERYTHING)
    drafts = [Draft.chain([1]), Draft.chain([2]), Draft.chain([3])]
    scores = edited(logits, sampled([plain, changed, plain], drafts, [0, 2, 4]))
    masks = np.full((6, 1), -1, np.int32)
    masks[2:4] = 0b101010
    params = [SamplingParams()] * 6
    for found, wanted in (
        (scores, logits),
        (_probabilities(logits, params, masks), _probabilities(logits, params)),
    ):
        assert torch.equal(found[:2], wanted[:2])
        assert torch.equal(found[4:], wanted[4:])
        assert not torch.equal(found[2:4], wanted[2:4])


some_scores = st.lists(st.sampled_from([-1.0, 0.5, 2.0, -math.inf]), min_size=VOCAB, max_size=VOCAB)
broken_scores = st.lists(st.sampled_from([-1.0, math.inf, math.nan]), min_size=VOCAB, max_size=VOCAB)


@given(
    st.lists(some_scores | some_scores | some_scores | broken_scores, min_size=3, max_size=3),
    st.lists(st.just(-1) | token_ids.map(lambda i: 1 << i) | st.integers(0, 2**VOCAB - 1), min_size=3, max_size=3),
)
def test_greedy_rows_under_masks_say_the_same_with_and_without_a_best_token(
    rows_: list[list[float]], words: list[int]
) -> None:
    """The short way, by each row's known best token, and the long way; ties, empty masks and broken rows too."""
    logits, masks = torch.tensor(rows_), np.array(words, np.int32)[:, None]
    peak = logits.amax(-1)
    best = torch.where(
        peak.isfinite(), torch.tensor([row.index(max(row)) if row[0] == row[0] else 0 for row in rows_]), -1
    )
    best = torch.where(logits.isnan().any(-1), -1, best)
    greedy = SamplingParams(temperature=0.0)
    seqs = [Sequence("r", i, [1, 2], 1, greedy, 0, 9) for i in range(2)]
    rows = sampled(seqs, [Draft.chain([3]), Draft.empty()], [0, 2])
    sampler = Sampler(VOCAB, "coupled", OPS).verdicts
    assert sampler(logits, rows, masks, best) == sampler(logits, rows, masks, None)


@pytest.mark.parametrize("vocab", [31, 32, 33, 70])
def test_mask_bits_of_wide_vocabularies(vocab: int, sequence: Make) -> None:
    """Every bit of every word, the sign bit too, and none beyond the vocabulary."""
    words = -(-vocab // 32)
    for token in range(vocab):
        mask = np.zeros((1, words), np.int32)
        mask[0, token // 32] = -(2**31) if token % 32 == 31 else 1 << token % 32
        rows = sampled([sequence([1], 1, token)], [Draft.empty()], [0])
        assert one(judge("coupled", vocab)(torch.zeros(1, vocab), rows, mask)).tokens == [token]


@pytest.mark.parametrize("vocab", [3, 511, 513, 9000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
def test_top_p_of_wide_vocabularies(vocab: int, spread: float) -> None:
    """Wherever the search for the nucleus stops widening; against a plain sort in float64."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator) * spread
    shares = [0.01, 0.5, 0.9, 0.999]
    kept = _filtered(logits, [SamplingParams(top_p=share) for share in shares]) > -torch.inf
    for row, share in enumerate(shares):
        law = torch.softmax(logits[row].double(), -1)
        best = law.sort(descending=True).values
        inside = best.cumsum(-1) - best < share - 1e-12
        assert torch.equal(kept[row], law >= best[inside][-1])


def test_filters_come_in_vllms_order() -> None:
    """min-p, then top-k, then top-p of what those two left."""
    law = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]])

    def kept(**own: Any) -> int:
        return int((_filtered(law.log(), [SamplingParams(**own)]) > -torch.inf).sum())

    assert kept(top_p=0.75) == 3
    assert kept(top_p=0.75, top_k=3) == 2  # 4/9 + 3/9 of what top-k left
    assert kept(top_p=0.75, min_p=0.7) == 2  # 4/7 alone is too little
    assert kept(top_p=0.55, min_p=0.7) == 1
    assert kept(top_k=4, min_p=0.7) == 2


@pytest.mark.parametrize("own", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 1.0}])
def test_equals_of_the_last_one_kept_stay(own: dict[str, Any]) -> None:
    kept = _filtered(torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]), [SamplingParams(**own)]) > -torch.inf
    assert kept.tolist() == [[False, True, True, False, True]]


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-4])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature: float) -> None:
    scores = torch.tensor([[1.0, -torch.inf, 3.0, 2.9]])
    assert _probabilities(scores, [SamplingParams(temperature=temperature)]).tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_greedy_takes_the_lowest_of_equals(sequence: Make) -> None:
    for vocab in (5, 64, 1001, 40_000):
        logits = torch.zeros(1, vocab)
        logits[0, vocab // 2 :] = 1.0
        verdict = one(
            judge("coupled", vocab)(logits, sampled([sequence([1], 1, temperature=0)], [Draft.empty()], [0]), None)
        )
        assert verdict.tokens == [vocab // 2]


@pytest.mark.parametrize("mode", ["coupled", "rejection", "block"])
def test_greedy_walks_the_best_in_every_mode(mode: str, sequence: Make) -> None:
    logits = torch.zeros(5, VOCAB)
    for row, token in enumerate([3, 9, 5, 1, 7]):
        logits[row, token] = 4.0
    draft = Draft(
        np.array([2, 3, 1, 5], np.int32), np.array([-1, -1, 1, 1], np.int32), torch.rand(4, VOCAB).softmax(-1)
    )
    for best, tokens, path in ((5, [3, 5, 7], [1, 3]), (8, [3, 8], [1])):
        logits[2] = 0.0
        logits[2, best] = 4.0
        verdict = one(judge(mode)(logits, sampled([sequence([1], 1, temperature=0.0)], [draft], [0]), None))
        assert (verdict.tokens, verdict.path) == (tokens, path)


def test_row_total_is_a_sum_without_an_order() -> None:
    values = torch.rand(3, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [math.fsum(row.tolist()) for row in values]
    np.testing.assert_allclose(row_total(values, 5000).numpy(), expected, rtol=1e-13)
    assert torch.equal(row_total(values, 5000), row_total(values.flip(-1), 5000))
    full = torch.ones(2, 4096, dtype=torch.float64)
    assert row_total(full, 4096).tolist() == [4096.0, 4096.0]  # no overflow at the bound


def test_row_depths() -> None:
    assert row_depths(Draft(np.zeros(4, np.int32), np.array([-1, 0, -1, 1], np.int32))) == [0, 1, 2, 1, 3]


def test_padding_rows_and_half_precision_are_welcome(sequence: Make) -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits[3:] = torch.nan
    rows = sampled([sequence([1], 1, 5)], [Draft.chain([2, 3])], [0])
    assert judge("coupled")(logits, rows, None) == judge("coupled")(logits[:3].float(), rows, None)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'coupled'"):
        Sampler(4, "copled", OPS)


FAULTS = [
    (edits, "_Prepared.edits", "if depth < missing", "if missing", "min_tokens ignores the draft"),
    (bad_words, "_backwards", "texts[parent + 1]", "texts[0]", "bad words ignore the path"),
    (
        bad_words,
        "forbidden",
        "_completing(words, text)",
        "words.lasts[0]",
        "bad words forbid their last token anywhere",
    ),
    (
        bad_words,
        "_completing",
        "bisect_right(words.stems, text) - 1",
        "len(words.stems) - 1",
        "another stem is looked at",
    ),
    (edits, "apply_edits", ".add_(biases)", ".copy_(biases)", "bias replaces the logit"),
    (
        edits,
        "apply_edits",
        "(scores.shape[1],), -torch.inf,",
        "(scores.shape[1],), torch.inf,",
        "allowed tokens not enforced",
    ),
    (edits, "_penalised", "logits > 0", "logits < 0", "repetition rewards"),
    (edits, "_Occurrences.drafted", "added[parent + 1]", "added[0]", "penalties forget a part of the path"),
    (_torch_sampling, "_masked", "== 0", "== 1", "mask inverted"),
    (_torch_sampling, "_keep_top_k", "best.gather(1, widths[:, None] - 1)", "best[:, -1:]", "another row's top-k"),
]


@pytest.mark.parametrize(
    ("module", "name", "old", "new"), [fault[:4] for fault in FAULTS], ids=[fault[4] for fault in FAULTS]
)
def test_every_planted_fault_is_caught(
    module: ModuleType, name: str, old: str, new: str, planted: Callable[..., Any], sequence: Make, oracle: Oracle
) -> None:
    with planted(module, name, old, new), pytest.raises(AssertionError):
        check_rows(sequence, oracle)


def test_without_a_fault_the_same_rows_pass(sequence: Make, oracle: Oracle) -> None:
    check_rows(sequence, oracle)


def check_rows(sequence: Make, oracle: Oracle) -> None:
    """Rows of three sequences with everything on, the last with another top_k, against the oracle."""
    random = np.random.default_rng(0)
    draft = Draft(np.array([4, 2, 8, 5, 1], np.int32), np.array([-1, -1, 1, 0, 2], np.int32))
    seqs = [sequence([7, 3, 7, 0, 3], 2, 0, **EVERYTHING, allowed_token_ids=[*range(k)]) for k in (12, 10)]
    seqs.append(sequence([7, 3, 7, 0, 3], 2, 0, **EVERYTHING | {"top_k": 2}))
    logits = random.normal(0, 2, (18, VOCAB)).astype(np.float32)
    logits[:, [0, 1, 5]] += 3  # a stop token and the ends of bad words, all wanted
    allowed = random.random((18, VOCAB)) < 0.8
    scores = edited(torch.from_numpy(logits), sampled(seqs, [draft] * 3, [0, 6, 12]))
    laws = _probabilities(scores, [seqs[row // 6].params for row in range(18)], _words(allowed.tolist())).numpy()
    for row in range(18):
        expected = oracle(logits[row].tolist(), seqs[row // 6], _path(draft, row % 6), allowed[row].tolist())
        assert expected is not None
        assert np.abs(laws[row] - expected).max() < 1e-5, row
