"""A seed decides a text: not the draft, not the batch, not the row's place. And a bad row fails its own sequence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from specserve.kernels import reference
from specserve.kernels._torch_sampling import SamplingArrays, filtered, probabilities
from specserve.sampling.inputs import SamplingInput, ScoredTokens, num_logit_rows
from specserve.sampling.noise import Purpose, hash_tokens, row_keys, sample
from specserve.sampling.sampler import Sampler, draft_arrays, edited
from specserve.testing import path_to, sampled
from specserve.types import Draft, Failure, Sequence, TokenLogprobs, Verdict

VOCAB = 61
OPS = reference.Kernels(torch.device("cpu"), torch.float32)
MODES = ("coupled", "rejection", "block")
Make = Callable[..., Sequence]


@cache
def _logits(text: tuple[int, ...], vocab: int = VOCAB) -> torch.Tensor:
    """A model: float32 [vocab] for any text. About as sure of itself with many tokens as with few."""
    spread = 3 if vocab == VOCAB else 6
    return torch.from_numpy(np.random.default_rng([vocab, *text]).normal(0, spread, vocab).astype(np.float32))


def _rows_of(seqs: list[Sequence], drafts: list[Draft], vocab: int = VOCAB) -> tuple[torch.Tensor, SamplingInput]:
    """What the model says about each row, and the rows."""
    logits = [
        _logits((*seq.tokens, *(int(draft.tokens[i]) for i in path_to(draft, node))), vocab)
        for seq, draft in zip(seqs, drafts, strict=True)
        for node in range(-1, len(draft))
    ]
    starts = np.cumsum([0, *(len(draft) + 1 for draft in drafts)])[:-1].tolist()
    return torch.stack(logits), sampled(seqs, drafts, starts)


def _one(verdicts: list[Verdict | Failure]) -> Verdict:
    (verdict,) = verdicts
    assert isinstance(verdict, Verdict)
    return verdict


MIX: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 7, "logprobs": 3},
    {"top_p": 0.8},
    {"min_p": 0.1, "logprobs": 0},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    {"repetition_penalty": 1.4, "temperature": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4, "logprobs": 5},
    {"logit_bias": {3: 5.0, 9: -3.0}},
    {"allowed_token_ids": [1, 5, 9, 30, 60]},
    {"bad_ids": ((3,), (7, 9))},
    {"min_tokens": 20, "stop_token_ids": [4, 5], "eos_ids": frozenset({0})},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 9, "eos_ids": frozenset({0, 1, 2})},
    {"temperature": 0.01},
    {"temperature": 9.0, "top_p": 0.999},
    {"top_p": 0.3, "repetition_penalty": 0.8, "logit_bias": {1: 2.0}, "bad_ids": ((2,),), "logprobs": 1},
    {"temperature": 3.0, "top_k": 40},
    {"bad_ids": tuple((*path, end) for path in ((), (8,), (5, 8), (8, 5), (5, 8, 5), (7, 9)) for end in (1, 4, 30))},
    {"temperature": 0.0, "logit_bias": {i: i / 9 - 3 for i in range(50)}, "bad_ids": ((5, 3), (3, 5), (5, 8, 5, 3))},
    {"allowed_token_ids": [*range(3, 40)], "stop_token_ids": [*range(20)], "min_tokens": 9, "frequency_penalty": 0.9},
]


def _draft(kind: str, seq: Sequence, vocab: int = VOCAB) -> Draft:
    """What the model is likely to say next, or not at all, as a chain, a dense chain, or a tree."""
    if kind == "none":
        return Draft.empty()
    if kind == "tree":
        tokens = np.argsort(-_logits(tuple(seq.tokens), vocab).numpy(), kind="stable")[:3]
        below = [int(_logits((*seq.tokens, int(token)), vocab).argmax()) for token in tokens]
        return Draft(np.array([*tokens, *below], np.int32), np.array([-1, -1, -1, 0, 1, 2], np.int32))
    chain: list[int] = []
    laws: list[torch.Tensor] = []
    for depth in range(4):
        logits = _logits((*seq.tokens, *chain), vocab)
        if kind == "dense":
            laws.append(torch.softmax(logits * 0.8, -1))
            keys = row_keys([seq.seed], [len(seq.tokens) + depth], [Purpose.SAMPLE])
            chain.append(int(sample((logits * 0.8).double()[None], keys, hash_tokens(torch.arange(vocab)))))
        else:
            chain.append(int(logits.argmin() if kind == "bad" else logits.argmax()))
    return Draft.chain(chain, torch.stack(laws) if kind == "dense" else None)


KINDS = ("none", "good", "bad", "dense", "tree")


def _text(kind: str, own: dict[str, Any], seed: int, sequence: Make, mode: str = "coupled") -> tuple[list[int], int]:
    """Twelve tokens of output, and how many drafts of them were accepted."""
    tokens, accepted = [5, 8, 5], 0
    while len(tokens) < 15:
        seq = sequence(tokens, 2, seed, **own)
        draft = _draft(kind, seq)
        logits, rows = _rows_of([seq], [draft])
        verdict = _one(Sampler(VOCAB, mode, OPS).verdicts(logits, rows, None))
        tokens, accepted = [*tokens, *verdict.tokens], accepted + len(verdict.path)
    return tokens[:15], accepted


def test_the_same_seed_says_the_same_with_any_draft(sequence: Make) -> None:
    accepted = dict.fromkeys(KINDS, 0)
    for (index, own), seed in itertools.product(enumerate(MIX), (1, 2**64 - 1)):
        texts = {}
        for kind in KINDS:
            texts[kind], num = _text(kind, own, seed + index if seed == 1 else seed - index, sequence)
            accepted[kind] += num
        assert all(text == texts["none"] for text in texts.values()), own
    assert accepted["none"] == 0
    assert min(accepted[kind] for kind in ("good", "dense", "tree")) > 50, accepted
    assert accepted["bad"] < accepted["good"]


def test_another_seed_says_something_else(sequence: Make) -> None:
    assert len({tuple(_text("none", {}, seed, sequence)[0]) for seed in range(20)}) == 20


def test_without_a_draft_the_mode_does_not_matter(sequence: Make) -> None:
    for own in MIX:
        plain, _ = _text("none", own, 3, sequence)
        for mode in ("rejection", "block"):
            assert _text("none", own, 3, sequence, mode)[0] == plain
            assert own.get("temperature") != 0 or _text("tree", own, 3, sequence, mode)[0] == plain


def _batch(
    sequence: Make, mode: str, vocab: int
) -> tuple[list[Sequence], list[Draft], torch.Tensor, SamplingInput, torch.Tensor]:
    kinds = itertools.cycle(KINDS)
    seqs = [sequence([i, 5, 8, 5, i + 1], 2, 1000 + i, **own) for i, own in enumerate(MIX)]
    drafts = [_draft(next(kinds), seq, vocab) for seq in seqs]
    logits, rows = _rows_of(seqs, drafts, vocab)
    masks = torch.full((num_logit_rows(rows.seqs), -(-vocab // 32)), -1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    masks[::7] = torch.randint(-(2**31), 2**31, masks[::7].shape, generator=generator).int() | 0b1000100010
    return seqs, drafts, logits, rows, masks.numpy()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("vocab", [VOCAB, 1003, 5000])
def test_a_sequence_is_judged_alike_alone_and_among_others(mode: str, vocab: int, sequence: Make) -> None:
    """Verdicts and log-probabilities are equal in every bit, in another order too."""
    seqs, drafts, logits, rows, masks = _batch(sequence, mode, vocab)
    judge = Sampler(vocab, mode, OPS).verdicts
    together = judge(logits, rows, masks)
    assert sum(len(v.path) for v in together if isinstance(v, Verdict)) >= 5
    own = [slice(each.logits_start, each.logits_start + len(each.draft) + 1) for each in rows.seqs]
    for i, seq in enumerate(seqs):
        assert judge(logits[own[i]], sampled([seq], [drafts[i]], [0]), masks[own[i]]) == [together[i]]
    order = np.random.default_rng(0).permutation(len(seqs)).tolist()
    at = torch.cat([torch.arange(own[i].start, own[i].stop) for i in order])
    starts = np.cumsum([0, *(len(drafts[i]) + 1 for i in order)])[:-1].tolist()
    shuffled = judge(logits[at], sampled([seqs[i] for i in order], [drafts[i] for i in order], starts), masks[at])
    assert shuffled == [together[i] for i in order]


def arrays_of(rows: SamplingInput) -> SamplingArrays:
    """How rows without drafts are sampled."""
    drafts = draft_arrays(rows.seqs)
    at = np.arange(len(rows.seqs))
    return SamplingArrays(at, *drafts.laws, drafts.seqs[1], 0 * at)


@pytest.mark.parametrize("vocab", [3, 8, VOCAB, 1003, 4099])
def test_every_number_of_a_row_is_its_own(vocab: int, sequence: Make) -> None:
    """Not only what comes out: laws are equal bit for bit, one row at a time and all at once."""
    generator = torch.Generator().manual_seed(vocab)
    fit = [own for own in MIX if not {"logit_bias", "allowed_token_ids"} & set(own) and own.get("temperature", 1) > 0]
    seqs = [sequence([0, 1, 2, 1], 2, i, **own | {"bad_ids": (), "stop_token_ids": []}) for i, own in enumerate(fit)]
    logits = torch.randn(len(seqs), vocab, generator=generator) * 4
    rows = sampled(seqs, [Draft.empty()] * len(seqs), [*range(len(seqs))])
    arrays = arrays_of(rows)
    scores = edited(logits, rows)
    together, laws = filtered(scores, arrays), probabilities(scores, arrays, None)
    keys = row_keys([seq.seed for seq in seqs], [4] * len(seqs), [0] * len(seqs))
    drawn = sample(together, keys, hash_tokens(torch.arange(vocab)))
    torch.set_num_threads(2)
    threaded = filtered(edited(logits, rows), arrays)
    torch.set_num_threads(1)
    assert torch.equal(threaded, together)
    for i, seq in enumerate(seqs):
        one = sampled([seq], [Draft.empty()], [0])
        own, only = edited(logits[i : i + 1], one), arrays_of(one)
        alone = filtered(own, only)
        assert torch.equal(alone[0], together[i])
        assert torch.equal(probabilities(own, only, None)[0], laws[i])
        assert sample(alone, keys[i : i + 1], hash_tokens(torch.arange(vocab))).item() == drawn[i]


BAD_VALUES = {"nan": math.nan, "plus infinity": math.inf, "minus infinity": -math.inf}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_bad_row_fails_its_own_sequence(mode: str, value: float, sequence: Make) -> None:
    seqs, _, logits, rows, masks = _batch(sequence, mode, VOCAB)
    judge = Sampler(VOCAB, mode, OPS).verdicts
    before = judge(logits, rows, masks)
    for victim in range(len(seqs)):
        broken = logits.clone()
        if value == -math.inf:
            broken[rows.seqs[victim].logits_start] = value
        else:
            broken[rows.seqs[victim].logits_start, 1 + victim] = value
        after = judge(broken, rows, masks)
        failed = after.pop(victim)
        assert isinstance(failed, Failure), MIX[victim]
        assert "dtype" in failed.message
        assert failed.code == "completion_failed", "the model is at fault, not the request"
        assert after == before[:victim] + before[victim + 1 :]


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_draft_row_shortens_and_does_not_fail(mode: str, sequence: Make) -> None:
    """Plain decoding would meet that row only once its token is committed; so does a draft. The token before it stands,
    unkept, and the text up to there is the same."""
    shortened = 0
    for seed, own, value in itertools.product(range(2), MIX, (math.nan, -math.inf)):
        seq = sequence([5, 8, 5], 2, seed, **own)
        draft = _draft("good", seq)
        logits, rows = _rows_of([seq], [draft])
        judge = Sampler(VOCAB, mode, OPS).verdicts
        whole = _one(judge(logits, rows, None))
        logits[2] = value
        cut = _one(judge(logits, rows, None))
        assert len(cut.tokens) == len(cut.path) + 1
        assert len(cut.path) <= 1
        assert cut.logprobs is None or all(math.isfinite(entry.logprob) for entry in cut.logprobs)
        if mode == "coupled" or own.get("temperature") == 0:
            assert cut.tokens == whole.tokens[:2]
            shortened += len(whole.path) >= 2
        shortened += mode != "coupled" and len(cut.tokens) == 2
    assert shortened > 10


@pytest.mark.parametrize("mode", MODES)
def test_what_forbids_everything_says_so(mode: str, sequence: Make) -> None:
    own = {"allowed_token_ids": [4], "bad_ids": ((4,),)}
    for temperature in (0.0, 1.0):
        seq = sequence([1, 2, 3], 2, 1, temperature=temperature, **own)
        logits, rows = _rows_of([seq], [Draft.chain([4, 4])])
        (failed,) = Sampler(VOCAB, mode, OPS).verdicts(logits, rows, None)
        assert isinstance(failed, Failure)
        assert "allowed_token_ids, bad_words" in failed.message
        masks = np.full((3, 2), -1, np.int32)
        masks[0] = 0
        (failed,) = Sampler(VOCAB, mode, OPS).verdicts(
            logits, sampled([sequence([1])], [rows.seqs[0].draft], [0]), masks
        )
        assert isinstance(failed, Failure)
        assert "grammar" in failed.message


def test_a_nan_behind_a_mask_is_still_the_models_fault(sequence: Make) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = math.nan
    for own in ({"temperature": 0.0}, {}):
        seq = sequence([1], 1, 1, allowed_token_ids=[1, 2], **own)
        (failed,) = Sampler(VOCAB, "coupled", OPS).verdicts(logits, sampled([seq], [Draft.empty()], [0]), None)
        assert isinstance(failed, Failure)


def _naive_logprobs(logits: torch.Tensor, token: int, k: int) -> TokenLogprobs:
    scores = logits.double().tolist()
    total = math.log(math.fsum(math.exp(score) for score in scores))
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    rank = 1 + sum(score > scores[token] for score in scores)
    return TokenLogprobs(token, scores[token] - total, rank, {t: scores[t] - total for t in order[:k]})


def _same(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    return (
        (one.token, one.rank, [*one.top]) == (other.token, other.rank, [*other.top])
        and one.logprob == pytest.approx(other.logprob, abs=1e-6)
        and [*one.top.values()] == pytest.approx([*other.top.values()], abs=1e-6)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_of_the_raw_row_that_judged_the_token(mode: str, kind: str, sequence: Make) -> None:
    emitted = 0
    for seed, k in zip(range(12), itertools.cycle((0, 1, 5))):
        own = {"temperature": 0.5, "top_k": 9, "logit_bias": {4: 9.0}, "repetition_penalty": 1.5}
        seq = sequence([5, 8, 5], 2, seed, logprobs=k, **own)
        draft = _draft(kind, seq)
        logits, rows = _rows_of([seq, seq], [draft, draft])
        both = Sampler(VOCAB, mode, OPS).verdicts(logits, rows, None)
        assert both[0] == both[1]
        verdict = both[1]
        assert isinstance(verdict, Verdict)
        assert verdict.logprobs is not None
        assert len(verdict.logprobs) == len(verdict.tokens)
        for i, (token, entry) in enumerate(zip(verdict.tokens, verdict.logprobs, strict=True)):
            assert _same(entry, _naive_logprobs(_logits((*seq.tokens, *verdict.tokens[:i])), token, k))
        emitted += len(verdict.tokens)
        plain = _one(
            Sampler(VOCAB, mode, OPS).verdicts(
                logits[: len(draft) + 1], sampled([sequence([5, 8, 5], 2, seed, **own)], [draft], [0]), None
            )
        )
        assert plain.tokens == verdict.tokens
        assert plain.logprobs is None
    assert emitted > 12 or kind in ("none", "bad")


def test_scores_equal_reported_logprobs_and_rank_equals_by_id() -> None:
    judge = Sampler(6, "coupled", OPS)
    logits = torch.tensor([[1.0, 3.0, -0.0, 3.0, 0.0, -2.0], [0.5, -1.0, -3.0, -1.0, -torch.inf, -1.0]])
    first, second = judge.score(logits, ScoredTokens([3, 4], 6))
    assert [*first.top] == [1, 3, 0, 2, 4, 5]
    assert first.rank == 1
    assert [*second.top] == [0, 1, 3, 5, 2, 4]
    assert second.rank == 6
    assert second.logprob == -math.inf
    assert first.logprob == first.top[3]
    assert sum(math.exp(value) for value in first.top.values()) == pytest.approx(1, abs=1e-6)
    assert judge.score(logits[:1], ScoredTokens([3], 2))[0].top == {1: first.top[1], 3: first.top[3]}


def test_a_broken_prompt_row_scores_as_impossible() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    good, broken, other = Sampler(4, "coupled", OPS).score(logits, ScoredTokens([1, 1, 2], 2))
    assert (broken.logprob, broken.rank, broken.top) == (-math.inf, 4, {})
    assert good.logprob == other.logprob == pytest.approx(math.log(0.25))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_judges_nothing_says_nothing(mode: str) -> None:
    """All of its rows were prefill."""
    assert Sampler(VOCAB, mode, OPS).verdicts(torch.zeros(4, VOCAB), sampled([], [], []), None) == []
