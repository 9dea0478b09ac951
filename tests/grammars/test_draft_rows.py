"""Rows of a whole draft, filled in one call: each is what starting again and moving over its path would say, after any
part of a text was said and taken back, and the state is where it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from specserve.structured import walk
from specserve.structured.base import Grammar, Guarded, Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import path_to, write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import Draft, GrammarState, Ids

NOTHING: frozenset[int] = frozenset()
PADDING = 9  # ids that stand for nothing
OBJECT = {
    "type": "object",
    "properties": {"the": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["an", "and", True]}}},
    "required": ["the", "tags"],
    "additionalProperties": False,
}
ASKED = [
    Structured.json(OBJECT),
    Structured.regex("(a|the)+(n|nd)*"),
    Structured.choice(["a", "an", "and", "the other"]),
    Structured.grammar('start: "(" start ")" | "the"'),
]
BACKENDS = {"llguidance": "llguidance", "xgrammar": "xgrammar"}  # and the package that each needs


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    tokenizer = Tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"))
    return vocabulary(tokenizer, tokenizer.vocab_size + PADDING)


@pytest.fixture(scope="module", params=BACKENDS)
def grammars(request: pytest.FixtureRequest, words: Vocabulary) -> list[Grammar]:
    pytest.importorskip(BACKENDS[request.param])
    compiler = Compiler(lambda: words, request.param)
    return [compiler.compile(asked) for asked in ASKED]


def bits(row: Ids) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def row_of(
    grammar: Grammar, words: Vocabulary, said: list[int], path: list[int] | None = None, ends: frozenset[int] = NOTHING
) -> Ids:
    """From scratch: nothing after what may not stand, nor after one of `ends` in the path."""
    row = np.zeros(words.num_words, np.int32)
    state = Guarded(grammar.start())
    if all(state.advance(token) for token in said + (path or [])) and not ends & set(path or []):
        state.fill(row)
    assert state.fault is None
    return row


def next_token(draw: Any, grammar: Grammar, said: list[int], words: Vocabulary) -> int:
    """Mostly one that may come."""
    may_come = bits(row_of(grammar, words, said))
    kind = draw(st.integers(0, 9))
    if may_come and kind < 8:
        return int(draw(st.sampled_from(may_come)))
    if kind == 8:
        return int(words.eos_ids[0])
    return int(draw(st.integers(0, words.size + 3)))


def draft(draw: Any, grammar: Grammar, said: list[int], words: Vocabulary, is_chain: bool) -> Draft:
    """Siblings differ."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 7))):
        last = len(tokens) - 1
        parent = last if is_chain else draw(st.integers(-1, last))
        path = path_to(Draft(np.array(tokens, np.int32), np.array(parents, np.int32)), parent)
        token = next_token(draw, grammar, [*said, *(tokens[node] for node in path)], words)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))


@pytest.mark.parametrize("is_chain", [True, False])
@settings(max_examples=120)
@given(data=st.data())
def test_rows_are_what_replay_from_scratch_says(
    grammars: list[Grammar], words: Vocabulary, is_chain: bool, data: st.DataObject
) -> None:
    grammar = data.draw(st.sampled_from(grammars))
    state = grammar.start()
    said: list[int] = []
    for _ in range(data.draw(st.integers(0, 6))):
        token = next_token(data.draw, grammar, said, words)
        if state.advance(token):
            said.append(token)
    taken_back = data.draw(st.integers(0, len(said)))
    state.rollback(taken_back)
    del said[len(said) - taken_back :]
    own = bits(row_of(grammar, words, said))
    assert [token for token in range(-1, words.size + 40) if state.allows(token)] == own
    guess = draft(data.draw, grammar, said, words, is_chain)
    ends = frozenset(words.eos_ids) | data.draw(st.frozensets(st.integers(0, words.size), max_size=3))
    rows = np.full((len(guess) + 3, words.num_words), 77, np.int32)
    state.fill_draft(guess.tokens, guess.parents, ends, rows[1:-1])
    assert (rows[[0, -1]] == 77).all(), "written beside the rows"
    for node in range(-1, len(guess)):
        path = [int(guess.tokens[n]) for n in path_to(guess, node)]
        assert bits(rows[node + 2]) == bits(row_of(grammar, words, said, path, ends))
    assert walked(state, guess, ends, words).tolist() == rows[1:-1].tolist()


@pytest.mark.parametrize("as_tree", [False, True])
def test_masks_of_a_draft_that_was_left_are_nobody_elses(words: Vocabulary, as_tree: bool) -> None:
    """A guess goes on with the next key's text, the answer with the next object's key. Both are inside a string, behind
    as many words of the grammar: llguidance takes them for the same place."""
    grammar = Compiler(lambda: words, "llguidance").compile(Structured.json_object())
    state = grammar.start()
    said = words.encode('{"a": [{"b": "')
    guess = words.encode('", "c": "')
    assert all(map(state.advance, said))
    tokens = np.array(words.encode("{")[:1] * as_tree + guess, np.int32)  # as a tree, it has a sibling before it
    parents = np.array([-1] * as_tree + [-1, *range(as_tree, len(tokens) - 1)], np.int32)
    rows = np.zeros((len(tokens) + 1, words.num_words), np.int32)
    state.fill_draft(tokens, parents, NOTHING, rows)
    answer = words.encode('"}, {"')
    assert all(map(state.advance, answer))
    state.fill(rows[0])
    assert bits(rows[0]) == bits(row_of(grammar, words, said + answer))


def walked(state: GrammarState, guess: Draft, ends: frozenset[int], words: Vocabulary) -> Ids:
    """The plain reference."""
    rows = np.full((len(guess) + 1, words.num_words), -1, np.int32)
    walk.fill_draft(state, guess.tokens, guess.parents, ends, rows)
    return rows


def test_a_fault_in_a_draft_empties_all_its_rows() -> None:
    class Failing:
        def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
            rows[0] = 1
            raise RuntimeError("a planted fault")

    state: Any = Failing()
    guarded = Guarded(state)
    rows = np.full((3, 2), 7, np.int32)
    guarded.fill_draft(np.array([1, 2], np.int32), np.array([-1, 0], np.int32), frozenset(), rows)
    assert not rows.any()
    assert "planted" in str(guarded.fault)
