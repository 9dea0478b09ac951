"""Walking a draft says of every node what starting again and moving over its path would say, and leaves no trace."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from specserve.kernels import reference
from specserve.sampling.inputs import SamplingInput, num_logit_rows
from specserve.sampling.sampler import Sampler
from specserve.structured import masks
from specserve.structured.base import Guarded
from specserve.structured.constrain import constrain
from specserve.testing import LanguageGrammar, LanguageState, path_to, scheduled
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


def constrained(
    language: list[list[int]], said: int = 0, fault_after: int | None = None
) -> tuple[Sequence, LanguageState]:
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
    seq, state = constrained(language, said)
    free = Sequence("f", 0, [7], 1, SamplingParams(), 0, 99)
    before = list(state.said)
    filled = filled_rows(scheduled([free, seq], [Draft.chain([1, 2]), draft], [0, 3]), WORDS)
    assert filled is not None
    rows = filled
    assert (rows[:3] == -1).all(), "a free row may become anything"
    assert len(rows) == 4 + len(draft)
    for node in range(-1, len(draft)):
        path = [int(draft.tokens[n]) for n in path_to(draft, node)]
        assert bits(rows[3 + node + 1]) == may_come(state, path)
    assert state.said == before


class Spelling(LanguageState):
    """A state that says at most `most` forced tokens at a time, and prefers 0 where 0 and 1 spell the same."""

    most = 99
    num_calls: Counter[str]

    def forced(self) -> int | None:
        choice = self.next()
        return min(choice) if len(choice) == 1 or choice == {0, 1} else None

    def jump_forward(self) -> list[int]:
        self.num_calls["jump_forward"] += 1
        ahead = Spelling(self.grammar, list(self.said))
        while len(ahead.said) < len(self.said) + self.most and (token := ahead.forced()) is not None:
            ahead.said.append(token)
        return ahead.said[len(self.said) :]

    def advance(self, token: int) -> bool:
        self.num_calls["advance"] += 1
        return super().advance(token)

    def rollback(self, n: int) -> None:
        self.num_calls["rollback"] += 1
        super().rollback(n)


def spelled(language: list[list[int]], said: int = 0, most: int = 99) -> tuple[Sequence, Spelling]:
    seq, state = constrained(language, said)
    spelling = Spelling(state.grammar, list(state.said))
    spelling.most, spelling.num_calls = most, Counter()
    seq.grammar = Guarded(spelling)
    return seq, spelling


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    return [tuple(int(draft.tokens[n]) for n in path_to(draft, node)) for node in range(len(draft))]


def all_that_may_stand(state: Spelling, draft: Draft, ends: frozenset[int]) -> list[tuple[tuple[int, ...], bool]]:
    """Every path of the draft as the grammar leaves it, with whether its last token is forced: after each path only
    what is forced where something is, else what the draft has there. In the order of the draft's nodes, what is forced
    right behind the node, or the beginning, that it comes after."""
    drafted = paths_of(draft)
    found: list[tuple[tuple[int, int], tuple[int, ...], bool]] = []
    left: list[tuple[int, tuple[int, ...]]] = [(-1, ())]
    for rank, path in left:  # grows
        if path and path[-1] in ends:
            continue
        at = Spelling(state.grammar, [*state.said, *path])
        forced = at.forced()
        for token in range(VOCAB):
            longer = (*path, token)
            if token in at.next() and (token == forced if forced is not None else longer in drafted):
                above = rank if forced is not None else drafted.index(longer)
                found.append(((above, len(longer)), longer, forced is not None))
                left.append((above, longer))
    return [(path, is_forced) for _, path, is_forced in sorted(found)]


@settings(max_examples=500)
@example([[0], [2]], Draft(np.array([0, 2], np.int32), np.array([-1, -1], np.int32)), 0, 1, 1, ())  # room for one
@example(
    [[0], [1], [2]], Draft(np.array([1, 0], np.int32), np.array([-1, -1], np.int32)), 0, 2, 1, ()
)  # none for an end
@given(
    sentences,
    trees(),
    st.integers(0, 4),
    st.integers(1, 14),
    st.sampled_from([1, 2, 99]),
    st.sampled_from([(), (3,)]),
)
def test_a_guided_draft_is_all_that_may_stand_as_far_as_the_budget_goes(
    language: list[list[int]], draft: Draft, said: int, budget: int, most: int, stops: tuple[int, ...]
) -> None:
    """Chains, trees and nothing; whoever spells one text in several ways has it drafted in one."""
    seq, state = spelled(language, said, most)
    seq.stop_ids = frozenset([EOS, *stops])
    before = list(state.said)
    led = constrain(seq, draft, budget)
    assert state.said == before
    assert all(parent < node for node, parent in enumerate(led.parents.tolist()))
    found = [(path, node in led.jump_forward) for node, path in enumerate(paths_of(led))]
    assert found == all_that_may_stand(state, draft, seq.stop_ids)[:budget]
    assert (led is draft) == (found == [(path, False) for path in paths_of(draft)])


@given(sentences, trees(), st.integers(1, 9))
def test_a_node_is_looked_at_once(language: list[list[int]], draft: Draft, budget: int) -> None:
    """A chain is never taken back before its end, and no token moves the grammar twice."""
    seq, state = spelled(language)
    led = constrain(seq, draft, budget)
    assert state.num_calls["advance"] <= len(draft) + len(all_that_may_stand(state, draft, seq.stop_ids))
    assert state.num_calls["jump_forward"] <= 1 + len(draft) + len(led)
    assert state.num_calls["rollback"] <= (1 if draft.is_chain else len(draft) + 1)


@given(sentences, trees(), st.integers(0, 4))
def test_a_draft_with_distributions_keeps_what_it_has_drawn_up_to_what_may_not_stand(
    language: list[list[int]], draft: Draft, said: int
) -> None:
    seq, state = constrained(language, said)
    q = torch.rand(len(draft), VOCAB)
    confidence = np.linspace(0, 1, len(draft), dtype=np.float32)
    led = constrain(seq, replace(draft, q=q, confidence=confidence), max(1, len(draft)))
    paths = paths_of(draft)
    following = [all(p[i] in may_come(state, list(p[:i])) - {EOS} for i in range(len(p) - 1)) for p in paths]
    kept = [node for node, follows in enumerate(following) if follows]
    if len(draft):
        assert paths_of(led) == [paths[node] for node in kept]
        assert led.q is not None
        assert led.confidence is not None
        assert (led.q == q[kept]).all()
        assert (led.confidence == confidence[kept]).all()
        assert not led.jump_forward


def test_what_is_forced_grows_in_every_branch_of_a_tree() -> None:
    seq, _ = constrained([[1, 2, 0, 3, 3], [1, 2, 1, 3, 2], [1, 2, 3, 0], [1, 2, 3, 1, 2]])
    draft = Draft(
        np.array([1, 3, 2, 3, 0, 0, 1], np.int32),  # 1 2 3 1, 1 2 0, and what may not stand: 3, 1 2 3 0 is not drafted
        np.array([-1, -1, 0, 2, 1, 2, 3], np.int32),
        confidence=np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], np.float32),
    )
    led = constrain(seq, draft, 16)
    assert led.tokens.tolist() == [1, 2, 3, 0, 3, 3, EOS, 1, 2, EOS]
    assert led.parents.tolist() == [-1, 0, 1, 1, 3, 4, 5, 2, 7, 8]
    assert led.jump_forward == {0, 1, 4, 5, 6, 8, 9}
    assert led.confidence is not None
    assert led.confidence.tolist() == pytest.approx([1, 1, 0.4, 0.6, 1, 1, 1, 0.7, 1, 1])
    assert constrain(seq, draft, 5).tokens.tolist() == [1, 2, 3, 0, 3]


@given(sentences, trees(), st.integers(0, 3), st.integers(1, 9))
def test_a_fault_in_the_midst_of_a_draft_leaves_what_was_found_before_it(
    language: list[list[int]], draft: Draft, fault_after: int, budget: int
) -> None:
    seq, _ = constrained(language, fault_after=fault_after)
    whole, state = constrained(language)
    led = constrain(seq, draft, budget)
    for path in paths_of(led):
        assert path[-1] in may_come(state, list(path[:-1]))
        assert len(path) <= fault_after
    assert seq.grammar is not None
    if seq.grammar.fault is not None:
        assert "planted" in seq.grammar.fault.message
        assert len(constrain(seq, draft, budget)) == 0
    else:
        assert paths_of(led) == paths_of(constrain(whole, draft, budget))


def test_what_is_forced_stands_before_between_and_after_what_is_drafted() -> None:
    seq, _ = constrained([[1, 2, 0, 3, 3], [1, 2, 1, 3, 2]])
    assert constrain(seq, Draft.chain([1, 2, 0]), 9).tokens.tolist() == [1, 2, 0, 3, 3, EOS]
    assert constrain(seq, Draft.chain([2, 0]), 9).tokens.tolist() == [1, 2], "a draft that begins elsewhere is dropped"
    assert constrain(seq, Draft.chain([1, 2, 2]), 9).tokens.tolist() == [1, 2]
    assert constrain(seq, Draft.chain([1, 2, 1]), 4).tokens.tolist() == [1, 2, 1, 3]


def test_a_guided_draft_says_which_of_its_tokens_are_forced() -> None:
    seq, _ = constrained([[1, 2, 0, 3, 3], [1, 2, 1, 3, 2]])
    drafts = [constrain(seq, Draft.chain(said), 9) for said in ([1, 2, 0], [1, 2, 1], [1, 2, 2], [])]
    assert [(draft.tokens.tolist(), set(draft.jump_forward)) for draft in drafts] == [
        ([1, 2, 0, 3, 3, EOS], {0, 1, 3, 4, 5}),
        ([1, 2, 1, 3, 2, EOS], {0, 1, 3, 4, 5}),
        ([1, 2], {0, 1}),
        ([1, 2], {0, 1}),
    ]


def test_a_draft_that_may_stand_whole_is_not_touched() -> None:
    seq, _ = constrained([[1, 2], [1, 3], [0, 0]])
    draft = Draft.chain([1, 2])
    assert constrain(seq, draft, 2) is draft
    seq, _ = constrained([[1, 2, 0], [1, 2, 1], [1, 3, 0], [1, 3, 1], [0, 0]])
    tree = Draft(np.array([1, 2, 3], np.int32), np.array([-1, 0, 0], np.int32))
    assert constrain(seq, tree, 9) is tree


def test_nobody_with_a_grammar_means_no_masks() -> None:
    free = Sequence("f", 0, [7], 1, SamplingParams(), 0, 99)
    assert filled_rows(scheduled([free], [Draft.chain([1])], [0]), WORDS) is None


@given(sentences, trees(), st.integers(0, 4), st.integers(0, 2**32 - 1), st.booleans())
def test_whoever_takes_the_best_token_says_the_same_with_the_bits_that_it_needs(
    language: list[list[int]], tree: Draft, said: int, seed: int, likes_chain: bool
) -> None:
    """Beside a sampled sequence with a grammar, and one without."""
    noise = torch.Generator().manual_seed(seed)
    greedy, state = constrained(language, said)
    sampled, _ = constrained(language, said)
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
    verdicts = Sampler(VOCAB, "coupled", reference.Kernels(torch.device("cpu"), torch.float32)).verdicts
    asked = SamplingInput.of(rows)
    assert verdicts(logits, asked, few, best) == verdicts(logits, asked, filled_rows(rows, WORDS), best)


def test_bits_are_made_from_the_first_row_on_whose_best_token_may_not_come() -> None:
    seq, _ = constrained([[1, 2, 3, 3], [1, 2, 0, 3]])
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
    seq, _ = constrained([[1, 2]])
    seq.params = SamplingParams(**params)
    filled = filled_rows(scheduled([seq], [Draft.empty()], [0]), WORDS, torch.tensor([1]))
    assert filled is not None
    assert bits(filled[0]) == {1}


@pytest.mark.parametrize("fault_after", [0, 1, 2])
def test_a_grammar_that_fails_closes_its_own_rows_and_says_why(fault_after: int) -> None:
    failing, _ = constrained([[1, 2, 3]], fault_after=fault_after)
    whole, state = constrained([[1, 2, 3]])
    draft = Draft.chain([1, 2])
    filled = filled_rows(scheduled([failing, whole], [draft, draft], [0, 3]), WORDS)
    assert filled is not None
    rows = filled
    assert failing.grammar is not None
    assert "planted" in str(failing.grammar.fault)
    assert (rows[fault_after:3] == 0).all()
    assert [bits(row) for row in rows[3:]] == [{1}, {2}, {3}]
    assert constrain(failing, draft, 4).tokens.tolist() == []
    assert "planted" in str(masks.advance(failing, [1]))
    assert masks.advance(whole, [1, 2]) is None
    assert state.said == [1, 2]


def test_a_token_that_was_not_allowed_is_told() -> None:
    seq, _ = constrained([[1, 2]])
    assert "30" in str(masks.advance(seq, [1, 30]))
