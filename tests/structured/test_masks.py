"""Walking a draft says of every node what starting again and moving over its path would say, and leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from specserve.kernels import reference
from specserve.runtime.pack import num_logit_rows
from specserve.sampling.sampler import Sampler
from specserve.speculation.grammar import guide
from specserve.structured import masks
from specserve.structured.base import Guarded
from specserve.testing import LanguageGrammar, LanguageState, scheduled
from specserve.types import Draft, Ids, SamplingParams, ScheduledSeq, Sequence

VOCAB, EOS = 40, 39
WORDS = 2

sentences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7), min_size=1, max_size=8)


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    """Any tree whose siblings differ, ends and strangers among its tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 9))):
        parent = draw(st.integers(-1, node - 1))
        token = draw(st.sampled_from([0, 1, 2, 3, EOS, 30]))
        if token not in [t for t, p in zip(tokens, parents, strict=True) if p == parent]:
            tokens.append(token)
            parents.append(min(parent, len(tokens) - 2))
    pairs = list(zip(parents, tokens, strict=True))
    return (
        Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
        if len(set(pairs)) == len(pairs)
        else Draft.empty()
    )


def filled_rows(rows: list[ScheduledSeq], num_words: int, best: Tensor | None = None) -> Ids | None:
    """Without `best`, those of sequences that take others than their best tokens."""
    if best is None:
        rows = [replace(each, seq=_sampled(each.seq)) for each in rows]
        best = torch.full((num_logit_rows(rows),), -1)
    made = masks.Masks(rows, num_words)
    made.fill()
    return made.finish(best)


def _sampled(seq: Sequence) -> Sequence:
    return replace(seq, params=SamplingParams(temperature=1))


def guided(language: list[list[int]], said: int = 0, fault_after: int | None = None) -> tuple[Sequence, LanguageState]:
    """A sequence that has said the first tokens of the first sentence."""
    grammar = LanguageGrammar([[*sentence, EOS] for sentence in language], fault_after)
    seq = Sequence("r", 0, [7], 1, SamplingParams(), 0, 99, eos_ids=frozenset([EOS]))
    state = grammar.start()
    seq.grammar = Guarded(state)
    for token in grammar.sentences[0][: min(said, len(language[0]))]:
        assert seq.grammar.advance(token)
    return seq, state


def may_come(state: LanguageState, path: list[int]) -> set[int]:
    """What may follow a path, from scratch; nothing after what may not stand or ends."""
    again = LanguageState(state.grammar, list(state.said))
    for token in path:
        if not again.advance(token) or token == EOS:
            return set()
    return again.next()


def bits(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@given(sentences, trees(), st.integers(0, 4))
def test_each_row_is_what_a_walk_from_scratch_says(language: list[list[int]], draft: Draft, said: int) -> None:
    seq, state = guided(language, said)
    free = Sequence("f", 0, [7], 1, SamplingParams(), 0, 99)
    before = list(state.said)
    filled = filled_rows(scheduled([free, seq], [Draft.chain([1, 2]), draft], [0, 3]), WORDS)
    assert filled is not None
    rows = filled
    assert (rows[:3] == -1).all(), "a free row may become anything"
    assert len(rows) == 4 + len(draft)
    for node in range(-1, len(draft)):
        path = [int(draft.tokens[n]) for n in draft.path_to(node)]
        assert bits(rows[3 + node + 1]) == may_come(state, path)
    assert state.said == before


@given(sentences, trees(), st.integers(0, 4), st.integers(1, 9))
def test_a_guided_draft_holds_what_may_stand_and_nothing_else(
    language: list[list[int]], draft: Draft, said: int, budget: int
) -> None:
    seq, state = guided(language, said)
    if len(draft) > budget:
        draft = Draft.empty()
    before = list(state.said)
    led = guide(seq, draft, budget)
    assert state.said == before
    assert len(led) <= budget
    paths = {tuple(int(led.tokens[n]) for n in led.path_to(node)) for node in range(len(led))}
    asked = {tuple(int(draft.tokens[n]) for n in draft.path_to(node)) for node in range(len(draft))}
    for path in paths:
        assert path[-1] in may_come(state, list(path[:-1])), "a token that may not stand"
    if not draft.is_chain:
        assert paths == {p for p in asked if all(p[i] in may_come(state, list(p[:i])) for i in range(len(p)))}
    if not len(draft):
        assert [p[-1] for p in sorted(paths, key=len)] == state.jump_forward()[:budget]


def test_what_is_forced_stands_before_between_and_after_what_is_drafted() -> None:
    seq, _ = guided([[1, 2, 0, 3, 3], [1, 2, 1, 3, 2]])
    assert guide(seq, Draft.chain([1, 2, 0]), 9).tokens.tolist() == [1, 2, 0, 3, 3, EOS]
    assert guide(seq, Draft.chain([2, 0]), 9).tokens.tolist() == [1, 2], "a draft that begins elsewhere is dropped"
    assert guide(seq, Draft.chain([1, 2, 2]), 9).tokens.tolist() == [1, 2]
    assert guide(seq, Draft.chain([1, 2, 1]), 4).tokens.tolist() == [1, 2, 1, 3]


def test_a_guided_draft_says_which_of_its_tokens_are_forced() -> None:
    seq, _ = guided([[1, 2, 0, 3, 3], [1, 2, 1, 3, 2]])
    drafts = [guide(seq, Draft.chain(said), 9) for said in ([1, 2, 0], [1, 2, 1], [1, 2, 2], [])]
    assert [(draft.tokens.tolist(), set(draft.jump_forward)) for draft in drafts] == [
        ([1, 2, 0, 3, 3, EOS], {0, 1, 3, 4, 5}),
        ([1, 2, 1, 3, 2, EOS], {0, 1, 3, 4, 5}),
        ([1, 2], {0, 1}),
        ([1, 2], {0, 1}),
    ]


def test_a_draft_that_may_stand_whole_is_not_touched() -> None:
    seq, _ = guided([[1, 2], [1, 3], [0, 0]])
    draft = Draft.chain([1, 2])
    assert guide(seq, draft, 2) is draft
    tree = Draft(np.array([1, 0, 2, 3], np.int32), np.array([-1, -1, 0, 0], np.int32))
    assert guide(seq, tree, 4) is tree


def test_nobody_with_a_grammar_means_no_masks() -> None:
    free = Sequence("f", 0, [7], 1, SamplingParams(), 0, 99)
    assert filled_rows(scheduled([free], [Draft.chain([1])], [0]), WORDS) is None


@given(sentences, trees(), st.integers(0, 4), st.integers(0, 2**32 - 1), st.booleans())
def test_whoever_takes_the_best_token_says_the_same_with_the_bits_that_it_needs(
    language: list[list[int]], tree: Draft, said: int, seed: int, likes_chain: bool
) -> None:
    """Beside a sampled sequence with a grammar, and one without."""
    noise = torch.Generator().manual_seed(seed)
    greedy, state = guided(language, said)
    sampled, _ = guided(language, said)
    greedy.params = SamplingParams(temperature=0.0)
    free = Sequence("f", 0, [7], 1, SamplingParams(temperature=0.0), 0, 99)
    draft = Draft.chain(tree.tokens.tolist()) if likes_chain else tree
    rows = scheduled([free, greedy, sampled], [Draft.chain([1]), draft, tree], [0, 2, 3 + len(draft)])
    logits = torch.randn(num_logit_rows(rows), VOCAB, generator=noise)
    logits[:, :4] += 3  # so that some best tokens may come
    for row, token in enumerate(draft.tokens.tolist(), 2):
        logits[row, token] += 3
    best = logits.argmax(-1)
    before = list(state.said)
    few = filled_rows(rows, WORDS, best)
    assert state.said == before
    sampler = Sampler(VOCAB, "coupled", reference.Kernels(torch.device("cpu"), torch.float32))
    assert sampler(logits, rows, few, best) == sampler(logits, rows, filled_rows(rows, WORDS), best)


def test_bits_are_made_from_the_first_row_on_whose_best_token_may_not_come() -> None:
    seq, _ = guided([[1, 2, 3, 3], [1, 2, 0, 3]])
    seq.params = SamplingParams(temperature=0.0)
    rows = scheduled([seq], [Draft.chain([1, 2, 3])], [0])
    assert filled_rows(rows, WORDS, torch.tensor([1, 2, 0, 9])) is None, "none is needed behind what departs"
    assert filled_rows(rows, WORDS, torch.tensor([1, 2, 3, 3, 77])) is None
    filled = filled_rows(rows, WORDS, torch.tensor([1, 9, 3, 3]))
    assert filled is not None
    assert [bits(row) if row.min() != -1 else None for row in filled] == [None, {2}, {0, 3}, {3}]
    ending = scheduled([seq], [Draft.chain([1, 2, 3, 3, EOS, 1])], [0])
    filled = filled_rows(ending, WORDS, torch.tensor([1, 2, 3, 3, EOS, 1, 1]))
    assert filled is not None
    assert [row.any() for row in filled] == [True] * 5 + [False] * 2, "nothing comes behind the end"
    broken = filled_rows(rows, WORDS, torch.tensor([-1, 2, 3, 3]))
    assert broken is not None
    assert bits(broken[0]) == {1}


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.0, "logit_bias": {1: 1.0}}], ids=str)
def test_whoever_takes_another_token_than_the_best_gets_all_bits(params: dict[str, Any]) -> None:
    seq, _ = guided([[1, 2]])
    seq.params = SamplingParams(**params)
    filled = filled_rows(scheduled([seq], [Draft.empty()], [0]), WORDS, torch.tensor([1]))
    assert filled is not None
    assert bits(filled[0]) == {1}


@pytest.mark.parametrize("fault_after", [0, 1, 2])
def test_a_grammar_that_fails_closes_its_own_rows_and_says_why(fault_after: int) -> None:
    failing, _ = guided([[1, 2, 3]], fault_after=fault_after)
    whole, state = guided([[1, 2, 3]])
    draft = Draft.chain([1, 2])
    filled = filled_rows(scheduled([failing, whole], [draft, draft], [0, 3]), WORDS)
    assert filled is not None
    rows = filled
    assert failing.grammar is not None
    assert "planted" in str(failing.grammar.fault)
    assert (rows[fault_after:3] == 0).all()
    assert [bits(row) for row in rows[3:]] == [{1}, {2}, {3}]
    assert guide(failing, draft, 4).tokens.tolist() == []
    assert "planted" in str(masks.advance(failing, [1]))
    assert masks.advance(whole, [1, 2]) is None
    assert state.said == [1, 2]


def test_a_token_that_was_not_allowed_is_told() -> None:
    seq, _ = guided([[1, 2]])
    assert "30" in str(masks.advance(seq, [1, 30]))
