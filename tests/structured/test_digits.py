"""Numbers in JSON end, with every backend, in tools as well; nothing that a schema asks for becomes impossible by it;
and rows of drafts are those of walking. The vocabulary has tokens of several digits."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from specserve.registry import GRAMMARS
from specserve.structured import walk
from specserve.structured.base import RefusedError, Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.schema.bounds import with_ends
from specserve.structured.spec import Structured
from specserve.types import GrammarState, Ids

CALL = "<call>"  # a control token
PIECES = [
    "11",
    "111",
    "1.",
    ".1",
    "0.0",
    "00",
    "e1",
    "e1111",
    "1e",
    "E+",
    "1234567890123456",
    '": 1',
    ", 1",
    "1}",
    "1]",
]
BYTES = [bytes((byte,)) for byte in range(128)]
TOKENS = [b"", b"", *BYTES, *(piece.encode() for piece in PIECES)]


def encode(text: str) -> list[int]:
    return [TOKENS.index(bytes((byte,))) for byte in text.encode()]


WORDS = Vocabulary(TOKENS, (0,), len(TOKENS) + 5, encode, {CALL: 1})
NUMBERS = re.compile(r"-?([0-9]+)(?:\.([0-9]+))?(?:[eE][+-]?([0-9]+))?")
LENGTH = 200  # tokens, in which any number of any schema here has ended

INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}
FREE: list[Any] = [  # schemas whose numbers have at most 15 digits
    INTEGER,
    NUMBER,
    {"type": ["number", "null"]},
    {"type": "integer", "minimum": 0},
    {"type": "integer", "maximum": -3},
    {"type": "number", "minimum": 0.55, "maximum": 1e6},
    {"type": "number", "minimum": 12.5},
    {"type": "number", "maximum": 7},
    {"type": "integer", "multipleOf": 7},
    {"type": "integer", "multipleOf": 1000},
    {"type": "number", "multipleOf": 0.25},
    {"type": "number", "multipleOf": 0.001, "minimum": 3},
    {"type": "array", "items": {"type": "array", "items": NUMBER, "maxItems": 2}, "minItems": 1, "maxItems": 2},
    {
        "type": "object",
        "properties": {"a": INTEGER, "b": NUMBER},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
]
LONGER: list[Any] = [  # those that ask for more, or for a digit after others that is not 0
    {"type": "integer", "minimum": 5 * 10**14},
    {"type": "integer", "minimum": 10**17},
    {"type": "number", "minimum": 1e-20},
    {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "exclusiveMaximum": 0},
    {"type": "number", "minimum": -3},
    {"type": "number", "maximum": -12345678901234567.5},
    {"enum": [1234567890123456, 123456789012345]},
    {"const": [0.12345678901234567, 4503599627370497.5]},
    {"type": "integer", "multipleOf": 40, "minimum": 10**15 + 1},
    {"allOf": [{"multipleOf": 4}, {"minimum": 10**15 + 1}], "type": "integer"},
]


def compiled(schema: Any, backend: str = "llguidance", digits: int = 15) -> GrammarState:
    return Compiler(lambda: WORDS, backend, max_digits=digits).compile(Structured.json(schema)).start()


def allowed(state: GrammarState) -> list[int]:
    row = np.zeros(WORDS.num_words, np.int32)
    state.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def said(state: GrammarState, preferred: list[bytes], dice: Random | None = None) -> str:
    """What a model says that likes some tokens most, and anything rather than to end."""
    text = b""
    for _ in range(LENGTH):
        may = allowed(state)
        assert may, f"a dead end behind {text!r}"
        liked = [token for piece in preferred for token in may if TOKENS[token : token + 1] == [piece]]
        others = [token for token in may if token not in WORDS.eos_ids]
        if not others:
            return text.decode()
        token = liked[0] if liked else others[0]
        if dice is not None and dice.random() < 0.3:
            token = dice.choice(others)
        assert state.allows(token)
        assert state.advance(token)
        text += TOKENS[token]
    raise AssertionError(f"it has no end: {text!r}")


def fits(text: str, schema: Any) -> bool:
    """What is beyond all floats counts as the largest of them."""
    value = json.loads(text, parse_float=lambda number: max(-1e308, min(1e308, float(number))))
    return jsonschema_rs.is_valid(schema, value)


def digits_of(text: str) -> int:
    return max(len(whole.removeprefix("0")) + len(part or "") for whole, part, _ in NUMBERS.findall(text))


def installed(*names: str) -> list[str]:
    return [name for name in names if GRAMMARS.missing(name) is None]


LIKES = st.lists(
    st.sampled_from([b"0", b"1", b"9", b".", b"-", b"e", b"E", b"+", *(p.encode() for p in PIECES)]), max_size=5
)


@pytest.mark.parametrize("backend", installed("llguidance", "xgrammar"))
@settings(deadline=None, max_examples=60)
@given(schema=st.sampled_from(FREE), preferred=LIKES, seed=st.none() | st.integers(0, 9))
@example(schema=NUMBER, preferred=[b"0", b"."], seed=None)
@example(schema=NUMBER, preferred=[b"e1111", b"e", b"1"], seed=None)
@example(schema=INTEGER, preferred=[b"111"], seed=None)
@example(schema={"type": "integer", "multipleOf": 1000}, preferred=[b"1"], seed=None)
def test_numbers_end(backend: str, schema: Any, preferred: list[bytes], seed: int | None) -> None:
    if "multipleOf" in schema and backend == "xgrammar":
        return  # refused by it
    text = said(compiled(schema, backend), preferred, None if seed is None else Random(seed))
    assert fits(text, schema)
    assert digits_of(text) <= 15 + ("." in text)  # one more, where 15 end on a zero that may not be last
    assert all(len(exponent) <= 3 for *_, exponent in NUMBERS.findall(text))


@settings(deadline=None, max_examples=60)
@given(schema=st.sampled_from(LONGER), preferred=LIKES, seed=st.none() | st.integers(0, 9))
@example(schema={"type": "number", "exclusiveMinimum": 0}, preferred=[b"0", b"."], seed=None)
@example(schema={"type": "number", "minimum": -3}, preferred=[b"-", b"0", b"."], seed=None)
def test_what_a_schema_asks_for_stays_possible(schema: Any, preferred: list[bytes], seed: int | None) -> None:
    text = said(compiled(schema), preferred, None if seed is None else Random(seed))
    assert fits(text, schema)


@pytest.mark.parametrize("name", ["const", "minimum", "maximum", "enum"])
def test_an_integer_that_would_become_another_one_is_refused(name: str) -> None:
    """With numbers that are floats, the constant 2**53 + 1 was 2**53."""
    values = {"enum": [[1, {"a": -(2**53) - 1}]]}
    for backend in installed("llguidance", "xgrammar"):
        with pytest.raises(RefusedError, match=f"{name}: .*exactly|lists and objects"):
            compiled({"type": "integer", name: 2**53 + 1} if name != "enum" else values, backend)
        compiled({"const": 2**53 - 1}, backend)


@pytest.mark.parametrize("text", ["1234567890123456", "123456789012345"])
def test_every_constant_may_be_said(text: str) -> None:
    state = compiled({"enum": [1234567890123456, 123456789012345]})
    assert all(state.advance(token) for token in [*encode(text), 0])


@pytest.mark.parametrize("backend", installed("llguidance", "xgrammar", "outlines"))
def test_backends_end_integers_alike(backend: str) -> None:
    assert said(compiled(INTEGER, backend), [b"9"]) == "9" * 15
    assert said(compiled(INTEGER, backend, digits=20), [b"9"]) == "9" * 20
    state = compiled(INTEGER, backend)
    assert all(state.advance(token) for token in encode("9" * 15))
    assert not state.advance(encode("9")[0])
    assert not state.allows(encode("9")[0])
    assert state.advance(0)
    state.rollback(2)
    assert state.allows(encode("9")[0])


def test_digits_in_texts_and_names_are_free() -> None:
    long = "1" * 40
    state = compiled({"type": "object"})
    text = json.dumps({long: [long, "\\" + long, {"a": 1, long: 2.5}], "b": long})
    assert all(state.advance(token) for token in [*encode(text), 0])
    for cut in ('{"a": %s', '{"a": [-%s', '{"a": {"b": 0.%s', '["1", %s'):
        state = compiled(True)
        assert not all(state.advance(token) for token in encode(cut % long))


def tag_of(content: Any, trigger: str = CALL, **more: Any) -> Structured:
    tag = {"type": "tag", "begin": f'{trigger}{{"args": ', "content": {"type": "json_schema", "json_schema": content},
           "end": "}"}  # fmt: skip
    return Structured.structural_tag(
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [trigger], "tags": [tag], **more}}
    )


def tokens_of(text: str) -> list[int]:
    return [token for i, part in enumerate(text.split(CALL)) for token in ([1] * (i > 0) + encode(part))]


@pytest.mark.parametrize(
    ("backend", "trigger"), [("llguidance", CALL), *((name, "<c>") for name in installed("llguidance", "xgrammar"))]
)
def test_in_a_tag_json_is_bounded_and_text_is_not(backend: str, trigger: str) -> None:
    long, call = "1" * 40, f'{trigger}{{"args": {{"n": [%s, "{"1" * 40}"]}}}}'
    grammar = Compiler(lambda: WORDS, backend).compile(tag_of({"type": "object"}, trigger))
    state = grammar.start()
    assert all(state.advance(token) for token in tokens_of(f"{long} {call % 5} {long} {call % 0.5} {long}"))
    for text in (call, f"{long} {call}", f"{call % 5} {call}"):
        state, cut = grammar.start(), text[: text.index("%s")]
        assert all(state.advance(token) for token in tokens_of(cut + "1" * 15))
        assert not state.allows(encode("1")[0])
        assert state.advance(encode(",")[0])


def test_a_number_alone_in_a_tag_is_bounded() -> None:
    state = Compiler(lambda: WORDS).compile(tag_of(NUMBER, at_least_one=True, stop_after_first=True)).start()
    assert all(state.advance(token) for token in tokens_of(f'{CALL}{{"args": 0.{"1" * 15}'))
    assert not state.allows(encode("1")[0])
    assert all(state.advance(token) for token in [*encode("}"), 0])


@pytest.mark.parametrize("backend", installed("llguidance", "xgrammar"))
@settings(deadline=None, max_examples=60)
@given(st.sampled_from([NUMBER, *FREE[-2:], *LONGER[3:6]]), LIKES, st.randoms(use_true_random=False), st.booleans())
def test_rows_of_drafts_are_those_of_walking(
    backend: str, schema: Any, preferred: list[bytes], dice: Random, is_tree: bool
) -> None:
    state = compiled(schema, backend)
    begun = tokens_of(said(compiled(schema, backend), preferred))
    for token in begun[: dice.randrange(len(begun) + 1)]:
        assert state.advance(token)
    before = allowed(state)
    may = [*before, *allowed(state), dice.randrange(len(TOKENS)), -1]
    tokens: Ids = np.array([dice.choice(may + encode("10.")) for _ in range(6)], np.int32)
    parents = [dice.randrange(-1, i) for i in range(6)] if is_tree else range(-1, 5)
    rows, walked = np.ones((2, 7, WORDS.num_words), np.int32)
    draft: Any = (tokens, np.array(parents, np.int32), frozenset({0}))
    state.fill_draft(*draft, rows)
    walk.fill_draft(state, *draft, walked)
    assert (rows == walked).all()
    assert allowed(state) == before


def test_multiples_get_bounds_that_leave_them_what_others_have() -> None:
    assert with_ends(NUMBER) is NUMBER
    assert with_ends({"multipleOf": 0.25, "maximum": 3}) == {"multipleOf": 0.25, "minimum": 1 - 10**13, "maximum": 3}
    low = {"properties": {"a": {"multipleOf": 5}, "b": {"minimum": 10**15}}}
    assert with_ends(low)["properties"]["a"]["maximum"] == 10**17, "as a float"
