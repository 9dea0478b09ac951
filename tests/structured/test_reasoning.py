"""A grammar behind reasoning, against a plain account of what may come: for every text, after any walk forth and back,
in chains and trees. Guards against grammars that begin a draft late, or early, when reasoning ends inside of it (vLLM
#36138, #44297)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specserve.structured import masks
from specserve.structured.base import Guarded
from specserve.structured.constrain import constrain
from specserve.structured.reasoning import ReasoningGrammar, ReasoningState, wrapped
from specserve.testing import LanguageGrammar, path_to
from specserve.text.reasoning import Reasoning
from specserve.types import Draft, Ids, SamplingParams, ScheduledSeq, Sequence

VOCAB, EOS, OTHER_EOS, HEAD = 40, 39, 38, 37
WORDS = 2
ALPHABET = (0, 1, 2, 3)
EVERYTHING = set(range(WORDS * 32)) - {EOS, OTHER_EOS}

ids = st.sampled_from(ALPHABET)
markers = st.lists(ids, min_size=1, max_size=3)
sentences = st.lists(st.lists(ids, max_size=4), min_size=1, max_size=6)
said = st.lists(st.sampled_from([*ALPHABET, 30, EOS]), max_size=12)


def reasoning(opening: list[int], closing: list[int]) -> Reasoning:
    return Reasoning(tuple(opening), tuple(closing), (HEAD,), frozenset(), frozenset([EOS, OTHER_EOS]))


def grammar(language: list[list[int]]) -> LanguageGrammar:
    return LanguageGrammar([[*sentence, EOS] for sentence in language])


def begun(language: list[list[int]], opening: list[int], closing: list[int], is_open: bool) -> ReasoningState:
    return ReasoningGrammar(grammar(language), reasoning(opening, closing), is_open).start()


def in_language(language: list[list[int]], text: list[int]) -> set[int]:
    whole = [[*sentence, EOS] for sentence in language]
    return {s[len(text)] for s in whole if len(s) > len(text) and s[: len(text)] == text}


def thinking(language: list[list[int]], closing: list[int], text: list[int]) -> set[int]:
    """What may come after a text that began inside reasoning."""
    for end in range(len(closing), len(text) + 1):
        if text[end - len(closing) : end] == closing:
            return in_language(language, text[end:])
    return EVERYTHING


def bits_behind(seq: Sequence, draft: Draft) -> Ids | None:
    made = masks.Masks([ScheduledSeq(seq, 0, 1, True, draft)], WORDS)
    made.fill()
    return made.finish(torch.full((len(draft) + 1,), -1))


def may_come(
    language: list[list[int]], opening: list[int], closing: list[int], is_open: bool, text: list[int]
) -> set[int]:
    """The whole of what is promised, in a few lines."""
    if is_open:
        return thinking(language, closing, text)
    if text[: len(opening)] == opening:
        return thinking(language, closing, text[len(opening) :])
    opens = {opening[len(text)]} if text == opening[: len(text)] else set()
    return in_language(language, text) | opens


def bits(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def filled(state: ReasoningState) -> set[int]:
    row = np.full(WORDS, 5, np.int32)
    state.fill(row)
    return bits(row)


@settings(max_examples=300)
@given(sentences, markers, markers, st.booleans(), said, st.lists(st.integers(0, 12), max_size=12))
def test_after_any_walk_a_state_is_where_a_new_one_would_be(
    language: list[list[int]], opening: list[int], closing: list[int], is_open: bool, text: list[int], backs: list[int]
) -> None:
    """Each token that may not come leaves the state as it is; going back any number of tokens, over the ends of what
    opens and closes reasoning too, is the same as never having said them."""
    state = begun(language, opening, closing, is_open)
    path: list[int] = []
    for token, back in itertools.zip_longest(text, backs):
        if token is not None:
            allowed = may_come(language, opening, closing, is_open, path)
            assert filled(state) == allowed
            assert state.allows(token) == (token in allowed)
            assert state.advance(token) == (token in allowed)
            path += [token] * (token in allowed)
        if back is not None:
            state.rollback(min(back, len(path)))
            path = path[: len(path) - min(back, len(path))]
        assert filled(state) == may_come(language, opening, closing, is_open, path)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("opening", "closing"), [([3], [2]), ([1], [1]), ([0, 1], [0, 0, 1]), ([0, 0], [1, 0, 1, 1]), ([0], [0, 1, 0])]
)
def test_every_text_up_to_seven_tokens(opening: list[int], closing: list[int], is_open: bool) -> None:
    """The language begins as the marks do."""
    language = [[0, 1], [0, 0, 1], [1, 0], [2], []]
    state = begun(language, opening, closing, is_open)
    num_texts = 0

    def visit(path: list[int]) -> None:
        nonlocal num_texts
        num_texts += 1
        allowed = may_come(language, opening, closing, is_open, path)
        assert filled(state) == allowed
        for token in (0, 1, 2, EOS) if len(path) < 7 else ():
            assert state.allows(token) == (token in allowed)
            assert state.advance(token) == (token in allowed)
            if token in allowed:
                visit([*path, token])
                state.rollback(1)

    visit([])
    assert num_texts > 10


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, 10))):
        token, parent = draw(st.sampled_from([0, 1, 2, EOS])), draw(st.integers(-1, node - 1))
        parent = min(parent, len(tokens) - 1)
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


def constrained(state: ReasoningState) -> Sequence:
    seq = Sequence("r", 0, [HEAD], 1, SamplingParams(), 0, 99, eos_ids=frozenset([EOS]))
    seq.grammar = Guarded(state)
    return seq


@settings(max_examples=300)
@given(sentences, markers, markers, st.booleans(), trees(), st.lists(ids, max_size=3))
def test_reasoning_that_ends_in_the_midst_of_a_draft_vllm_36138_44297(
    language: list[list[int]],
    opening: list[int],
    closing: list[int],
    is_open: bool,
    draft: Draft,
    before: list[int],
) -> None:
    """The rows of a draft, chain or tree, one branch of which may have closed the reasoning while its sibling has not;
    and what is cut from it."""
    state = begun(language, opening, closing, is_open)
    path = list(itertools.takewhile(state.advance, before))
    seq = constrained(state)
    rows = bits_behind(seq, draft)
    assert rows is not None
    stands: dict[int, bool] = {-1: True}
    for node in range(-1, len(draft)):
        to_node = [*path, *(int(draft.tokens[n]) for n in path_to(draft, node))]
        if node >= 0:
            parent = int(draft.parents[node])
            allowed = may_come(language, opening, closing, is_open, to_node[:-1])
            after_end = parent >= 0 and int(draft.tokens[parent]) == EOS
            stands[node] = stands[parent] and to_node[-1] in allowed and not after_end
        ended = node >= 0 and to_node[-1] == EOS
        expected = may_come(language, opening, closing, is_open, to_node) if stands[node] and not ended else set()
        assert bits(rows[node + 1]) == expected
    assert filled(state) == may_come(language, opening, closing, is_open, path)
    if len(draft):
        behind = [stands[int(parent)] and (parent < 0 or int(draft.tokens[parent]) != EOS) for parent in draft.parents]
        assert len(constrain(seq, replace(draft, q=torch.ones(len(draft), VOCAB)), 20)) == sum(behind)
    led = constrain(seq, draft, 20)
    for node in range(len(led)):
        to_node = [*path, *(int(led.tokens[n]) for n in path_to(led, node))]
        assert to_node[-1] in may_come(language, opening, closing, is_open, to_node[:-1])
    assert filled(state) == may_come(language, opening, closing, is_open, path)


def test_a_chain_across_the_end_of_reasoning_is_led_behind_it() -> None:
    """What the grammar forces is added where the draft closes the reasoning, and not before."""
    state = begun([[0, 1, 2], [0, 1, 3]], [1], [2, 3], is_open=True)
    seq = constrained(state)
    assert constrain(seq, Draft.chain([1, 1, 2, 3]), 9).tokens.tolist() == [1, 1, 2, 3, 0, 1]
    assert constrain(seq, Draft.chain([1, 1, 2, 3, 0, 1, 3]), 9).tokens.tolist() == [1, 1, 2, 3, 0, 1, 3, EOS]
    assert constrain(seq, Draft.chain([1, 2, 3, 1]), 9).tokens.tolist() == [1, 2, 3, 0, 1], "not of the language"
    assert constrain(seq, Draft.chain([1, 2, EOS]), 9).tokens.tolist() == [1, 2], "no end while it reasons"
    assert constrain(seq, Draft.empty(), 9).tokens.tolist() == []


def test_nothing_is_forced_before_the_answer_but_the_rest_of_what_opens_reasoning() -> None:
    inside = begun([[0, 1]], [3], [2], is_open=True)
    assert inside.jump_forward() == []
    assert inside.advance(2)
    assert inside.jump_forward() == [0, 1, EOS]
    may_open = begun([[0, 1]], [3, 0, 2], [2], is_open=False)
    assert may_open.jump_forward() == []
    assert may_open.advance(3)
    assert may_open.jump_forward() == [0, 2]
    may_open.rollback(1)
    assert may_open.advance(0)
    assert may_open.jump_forward() == [1, EOS]


def test_what_a_prompt_ends_with_decides() -> None:
    inner = grammar([[0]])
    marks = reasoning([3], [2])

    def begins(prompt_ids: list[int]) -> Any:
        return wrapped(inner, marks.beginning(prompt_ids), marks)

    assert wrapped(inner, "before", None) is inner
    assert begins([HEAD, 3, 2]) is inner
    assert begins([1, 1]) is inner
    assert begins([1, HEAD, 3, 0]).is_open
    assert not begins([1, HEAD]).is_open
    assert begins([HEAD]).num_bytes == inner.num_bytes


def test_states_of_one_request_do_not_know_each_other() -> None:
    shared = ReasoningGrammar(grammar([[0, 1]]), reasoning([3], [2]), is_open=True)
    first, second = shared.start(), shared.start()
    assert first.advance(2)
    assert filled(first) == {0}
    assert filled(second) == EVERYTHING


def test_a_grammar_that_fails_behind_reasoning_says_so_then() -> None:
    failing = ReasoningGrammar(LanguageGrammar([[0, EOS]], fault_after=0), reasoning([3], [2]), is_open=True)
    seq = constrained(failing.start())
    assert masks.advance(seq, [1, 1]) is None
    rows = bits_behind(seq, Draft.chain([1, 2]))
    assert rows is not None
    assert [bits(row) for row in rows] == [set(), set(), set()], "nothing may come any more"
    assert seq.grammar is not None
    assert "planted" in str(seq.grammar.fault)
