"""The backend against the truth: every token of every valid instance may come, no invalid instance can be finished, and
walking leaves no trace. The vocabulary is a tiny model's; the instances are judged by jsonschema-rs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, Field

from specserve.grammars import llguidance
from specserve.grammars.llguidance import LlguidanceBackend, LlguidanceState
from specserve.structured.base import RefusedError, Vocabulary
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: list[Any] = [
    PERSON,
    {"enum": ["red", "green", 3, None, [1, 2]]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^a+b$"}]},
    {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
     "$ref": "#/$defs/n"},
    True,
]  # fmt: skip
NAMES = ["name", "age", "next"]


def place(item: tuple[str, Any]) -> int:
    """A schema's properties come in its own order."""
    return NAMES.index(item[0])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 130) | st.sampled_from(["red", "ab", "aab", "", "Bob", "é\n"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2).map(
            lambda found: dict(sorted(found.items(), key=place))
        )
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")
    tokenizer = Tokenizer(folder)
    return vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module")
def backend(words: Vocabulary) -> LlguidanceBackend:
    return LlguidanceBackend(words)


def allowed(state: LlguidanceState, words: Vocabulary) -> set[int]:
    row = np.full(words.num_words, -1, np.int32)
    state.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(state: LlguidanceState, words: Vocabulary, text: str) -> bool:
    """Whether the text may be said from here to its end. Mask and advance must agree at every token, but where text is
    forced: the mask then has the one token that the tokenizer would take, and another way of spelling it may come."""
    taken = 0
    tokens = [*words.encode(text), words.eos_ids[0]]
    for token in tokens:
        in_mask, forced = token in allowed(state, words), state.jump_forward()
        assert state.allows(token) == in_mask
        may_come = state.advance(token)
        assert may_come >= in_mask, "the mask has what may not come"
        assert in_mask or not may_come or forced[0] != token, "the mask lacks what is forced"
        assert in_mask == may_come or forced, "mask and advance disagree"
        if not may_come:
            break
        taken += 1
    state.rollback(taken)
    return taken == len(tokens)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:30])
@settings(max_examples=40)
@given(value=json_values)
def test_what_fits_a_schema_can_be_said_and_nothing_else(
    schema: Any, value: Any, backend: LlguidanceBackend, words: Vocabulary
) -> None:
    state = backend.compile(Structured.json(schema)).start()
    before = allowed(state, words)
    fits = jsonschema_rs.is_valid(schema, value)
    assert takes(state, words, json.dumps(value, ensure_ascii=False)) == fits
    assert allowed(state, words) == before


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (Structured.regex(r"\d{4}-\d\d"), ["2026-11"], ["2026-1", "x", "", "2026-111"]),
        (Structured.regex("a*"), ["", "aaaa"], ["b", "ab"]),
        (Structured.choice(["yes", "no", 'a "b"\n']), ["yes", "no", 'a "b"\n'], ["ye", "yesno", ""]),
        (Structured.grammar('start: sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]+/'), ["1", "1+23"], ["1+", "+1", "1 + 2"]),
        (Structured.json_object(), ["{}", '{"a": [1, null]}'], ["[]", "1", "{", '{"a": 1} ']),
    ],
    ids=lambda value: value.kind if isinstance(value, Structured) else "",
)
def test_every_kind(
    asked: Structured, good: list[str], bad: list[str], backend: LlguidanceBackend, words: Vocabulary
) -> None:
    state = backend.compile(asked).start()
    assert [text for text in good if not takes(state, words, text)] == []
    assert [text for text in bad if takes(state, words, text)] == []


def test_a_choice_may_be_any_text(backend: LlguidanceBackend, words: Vocabulary) -> None:
    options = [
        "\n",
        "a\tb",
        "\r\n",
        '"q"',
        "back\\slash",
        "\\n",
        "😀",
        "é|è",
        "/x/",
        "a.b*",
        "\x01\x7f",
        " ",
        "\u2028",
        "\0",
    ]
    state = backend.compile(Structured.choice(options)).start()
    assert [option for option in options if not takes(state, words, option)] == []
    others = ["n", "a\\tb", "\r", "'q'", "backslash", "\\", "é", "x", "aab", "\x01", "  ", "u2028", "0", "\n\n"]
    assert [other for other in others if takes(state, words, other)] == []


def test_the_end_comes_once_and_can_be_taken_back(backend: LlguidanceBackend, words: Vocabulary) -> None:
    state = backend.compile(Structured.choice(["ab"])).start()
    ids = words.encode("ab")
    assert state.jump_forward() == ids
    assert not state.advance(words.eos_ids[0]), "nothing was said yet"
    for token in ids:
        assert state.advance(token)
    assert state.jump_forward() == [words.eos_ids[0]]
    assert allowed(state, words) == set(words.eos_ids)
    assert state.advance(words.eos_ids[0])
    assert allowed(state, words) == set()
    assert state.jump_forward() == []
    assert not state.advance(words.eos_ids[0])
    assert not state.advance(ids[0])
    state.rollback(1 + len(ids))
    assert state.jump_forward() == ids


def test_what_is_forced_may_come_and_is_how_the_tokenizer_splits_it(
    backend: LlguidanceBackend, words: Vocabulary
) -> None:
    state = backend.compile(Structured.json(PERSON)).start()
    forced = state.jump_forward()
    assert forced == words.encode('{"name": "')[: len(forced)]
    assert len(forced) >= 2
    for token in forced:
        assert token in allowed(state, words)
        assert state.advance(token)


def test_states_of_one_grammar_do_not_know_each_other(backend: LlguidanceBackend, words: Vocabulary) -> None:
    grammar = backend.compile(Structured.choice(["ab", "cd"]))
    first, second = grammar.start(), grammar.start()
    assert first.advance(words.encode("ab")[0])
    assert takes(second, words, "cd")
    assert takes(grammar.start(), words, "ab")


def test_a_lexer_that_is_full_fails_nobody_who_comes_later(
    backend: LlguidanceBackend, words: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The automaton of this expression has more states than may be; those that a request has met stay in the lexer that
    all share."""
    monkeypatch.setitem(llguidance._LIMITS, "max_lexer_states", 400)
    grammar = backend.compile(Structured.regex("(a|b)*a(a|b){12}"))
    noise = np.random.default_rng(0)
    letters = [words.tokens.index(letter) for letter in (b"a", b"b")]
    num_failed = 0
    for _ in range(40):
        state = grammar.start()
        assert len(allowed(state, words)), "the first mask is always there"
        try:
            for _ in range(60):
                state.advance(int(noise.choice(letters)))
                allowed(state, words)
        except RefusedError as error:  # the request's own fault, not that of the engine
            num_failed += "too many states" in str(error)
    assert num_failed > 1


@pytest.mark.parametrize(
    "asked",
    [
        Structured.regex("(?=a)b"),
        Structured.regex("("),
        Structured.regex("((a{100}){100}){100}"),
        Structured.grammar("start: missing"),
        Structured.json({"not": {"pattern": "a"}}),
        Structured.json({"type": "array", "uniqueItems": True}),
        Structured.json({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
        Structured.json({"type": "strin"}),
        Structured("json_schema", '{"const": "\\ud800"}'),
        Structured("json_schema", "[" * 100_000),
        *(Structured("json_schema", text) for text in ("5", "null", '"a"', "[1]", "[[]]")),
        *(
            Structured("json_schema", text)
            for text in (
                '{"properties": 5}',
                '{"$ref": 5}',
                '{"type": "object", "required": [[1]]}',
                '{"allOf": [{"items": {"enum": 5}}]}',
            )
        ),
        Structured.json({"$ref": "http://example.com/schema"}),
        Structured.json({"type": "integer", "minimum": 3, "maximum": 2}),
    ],
    ids=lambda asked: ascii(asked.text[:20]),
)
def test_what_cannot_be_enforced_is_refused(asked: Structured, backend: LlguidanceBackend) -> None:
    with pytest.raises(RefusedError, match=r"structured: .") as caught:
        backend.compile(asked)
    assert caught.value.param == "structured"
    assert "\n" not in str(caught.value)


def test_control_tokens_are_no_text(backend: LlguidanceBackend, words: Vocabulary, tmp_path: Path) -> None:
    state = backend.compile(Structured.regex("(?s).*")).start()
    control = {i for i, text in enumerate(words.tokens) if not text}
    assert control
    assert allowed(state, words) & control == set(words.eos_ids)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1", "0.25"], ["0", "0.0", "1.1", "-1"]),
        ({"type": "number", "minimum": -1, "exclusiveMaximum": 0}, ["-0.5", "-1"], ["0", "-0", "-1.5"]),
        ({"anyOf": [{"exclusiveMaximum": 1}, {"exclusiveMinimum": 1}], "type": "number"}, ["0", "2"], ["1", "1.0"]),
        ({"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"minimum": 8}]}, ["0.5", "9"], ["0"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-02-30"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T23:59:59Z"'], ['"2024-02-29T23:59:60Z"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"10:00:60Z"', '"24:00:00Z"']),
        ({"type": "string", "format": "hostname"}, ['"a-b.example.com"'], ['"xn--zz"', '"a..b"', f'"{"a" * 64}"']),
        ({"type": "string", "format": "email"}, ['"a.b@example.com"'], ['"a@b..c"', f'"{"a" * 65}@b"']),
        ({"type": "object", "minProperties": 1}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}"]),
        ({"type": "array", "contains": {"const": 1}}, ["[1]", "[0, 0, 1, 0]", "[0, 2, 0, 0, 1]"], ["[]", "[0]"]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ["[]", '["b", "a"]'], ['["a", "a"]']),
        ({"type": "string", "not": {"enum": ["ab", "é\n"]}}, ['"a"', '"abc"', '"é"'], ['"ab"', '"é\\n"']),
        ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, ['{"a": 1}'], ['{"c": 1}', '{"aa": 1}']),
        ({"if": {"const": "x"}, "then": False, "type": "string"}, ['"y"', '"xx"'], ['"x"']),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
          "additionalProperties": False, "maxProperties": 1}, ["{}", '{"b": null}'], ['{"a": null, "b": null}']),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}, "b": True},
          "$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1}}},
         ["{}", '{"b": 1}'], ['{"a": []}', '{"a": [[]]}']),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_it_does_not_know_or_gets_wrong_is_put_in_other_words(
    schema: Any, good: list[str], bad: list[str], backend: LlguidanceBackend, words: Vocabulary
) -> None:
    state = backend.compile(Structured.json(schema)).start()
    assert [text for text in good if not takes(state, words, text)] == []
    assert [text for text in bad if takes(state, words, text)] == []


class Address(BaseModel):
    street: str
    number: int | None = None
    kind: Literal["home", "work"] = "home"


class Person(BaseModel):
    name: str = Field(max_length=20)
    addresses: list[Address]
    partner: Person | None = None
    scores: dict[str, float] = {}


@pytest.mark.parametrize("schema", [*SCHEMAS, Person, Address, list[Person]], ids=lambda schema: str(schema)[:30])
def test_ordinary_schemas_are_compiled_as_they_are(
    schema: Any, backend: LlguidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance, "rewritten", lambda schema: pytest.fail(f"{schema} was rewritten"))
    backend.compile(Structured.of(schema))
