"""The backend against the truth: jsonschema-rs for schemas, Python's own for expressions, and what is refused instead
of ignored. The vocabulary is a tiny model's, with ids that stand for nothing."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from specserve.structured.base import RefusedError, Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

from specserve.grammars._pattern import exact
from specserve.grammars.xgrammar import _FORMATS, XgrammarBackend, XgrammarState

PADDING = 9
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LINKED = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
    "$ref": "#/$defs/n",
}
SCHEMAS: list[Any] = [
    PERSON,
    LINKED,
    {"enum": ["red", "green", 3, None, [], "é\n"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^a+b$"}]},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "ab"}], "items": False},
    {"type": ["string", "null"], "minLength": 2},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1},
    {"title": "any", "description": "thing"},
]
NAMES = ["name", "age", "next"]


def place(item: tuple[str, Any]) -> int:
    """A schema's properties come in its own order."""
    return NAMES.index(item[0])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 130)
    | st.sampled_from(["red", "ab", "aab", "", "Bob", "é\n", "a\u2028"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2).map(
            lambda found: dict(sorted(found.items(), key=place))
        )
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def words(tiny: Path) -> Vocabulary:
    tokenizer = Tokenizer(tiny)
    return vocabulary(tokenizer, tokenizer.vocab_size + PADDING)


@pytest.fixture(scope="module")
def backend(words: Vocabulary) -> XgrammarBackend:
    return XgrammarBackend(words)


def allowed(state: XgrammarState, words: Vocabulary) -> set[int]:
    row = np.full(words.num_words, -1, np.int32)
    state.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(state: XgrammarState, words: Vocabulary, text: str) -> bool:
    """Whether the text may be said from here to its end. Mask and advance agree at every token."""
    taken = 0
    tokens = [*words.encode(text), words.eos_ids[0]]
    for token in tokens:
        in_mask = token in allowed(state, words)
        assert state.allows(token) == in_mask
        assert state.advance(token) == in_mask
        if not in_mask:
            break
        taken += 1
    state.rollback(taken)
    return taken == len(tokens)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:30])
@settings(max_examples=40)
@given(value=json_values)
def test_what_fits_a_schema_can_be_said_and_nothing_else(
    schema: Any, value: Any, backend: XgrammarBackend, words: Vocabulary
) -> None:
    """A string with a length has no escapes."""
    state = backend.compile(Structured.json(schema)).start()
    before = allowed(state, words)
    text = json.dumps(value, ensure_ascii=False)
    fits = jsonschema_rs.is_valid(schema, value) and ("\\" not in text or "Length" not in json.dumps(schema))
    assert takes(state, words, text) == fits
    assert allowed(state, words) == before


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (Structured.regex(r"^\d{4}-\d\d$"), ["2026-11"], ["2026-1", "x", "", "2026-111"]),
        (Structured.regex("a*.?"), ["", "aaaa", "b", "aé"], ["bb", "\n", "ab\n"]),
        (
            Structured.choice(["yes", "no", 'a "b"\n', "\U0001f600"]),
            ["yes", 'a "b"\n', "\U0001f600"],
            ["ye", "yesno", ""],
        ),
        (Structured.grammar('start: sum\nsum: NUM ("+" NUM)*\nNUM: /[0-9]+/'), ["1", "1+23"], ["1+", "+1", "1 + 2"]),
        (Structured.grammar('root ::= "a" root "b" | "-"', "ebnf"), ["-", "aa-bb"], ["a-", "a-bb", ""]),
        (Structured.json({"type": "object"}), ["{}", '{"a": [1, null]}'], ["[]", "1", "{", '{"a": 1} ', '{"a":1}']),
    ],
    ids=lambda value: value.kind if isinstance(value, Structured) else "",
)
def test_every_kind(
    asked: Structured, good: list[str], bad: list[str], backend: XgrammarBackend, words: Vocabulary
) -> None:
    state = backend.compile(asked).start()
    assert [text for text in good if not takes(state, words, text)] == []
    assert [text for text in bad if takes(state, words, text)] == []


CALL = {"type": "json_schema", "json_schema": PERSON}
TAG = {"type": "tag", "begin": "<call>", "content": CALL, "end": "</call>"}
SAID = '<call>{"name": "Bob", "age": 7}</call>'


def tagged(form: dict[str, Any]) -> Structured:
    return Structured.structural_tag({"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (tagged(TAG), [SAID], ["", SAID + " ", "<call>{}</call>", SAID.replace(": ", ":")]),
        (tagged({"type": "triggered_tags", "triggers": ["<call>"], "tags": [TAG]}),
         ["", "so " + SAID + " and " + SAID, "<cal"], ["<call>", "<call>{}</call>", SAID + "<call>"]),
        (Structured.structural_tag({"type": "structural_tag", "triggers": ["<call>"],
                                    "structures": [{"begin": "<call>", "schema": PERSON, "end": "</call>"}]}),
         ["", "so " + SAID], ["<call>", "<call>{}</call>"]),
        (tagged({"type": "triggered_tags", "triggers": ["<call>"], "tags": [TAG], "at_least_one": True,
                 "stop_after_first": True}), [SAID], ["", SAID + SAID, "<call>"]),
        (tagged({"type": "tags_with_separator", "tags": [TAG], "separator": ", "}), ["", SAID, SAID + ", " + SAID],
         [SAID + SAID]),
        (tagged({"type": "sequence", "elements": [
            {"type": "const_string", "value": "a"},
            {"type": "optional", "content": {"type": "regex", "pattern": "b.?"}},
            {"type": "or", "elements": [{"type": "const_string", "value": "c"},
                                        {"type": "grammar", "grammar": 'root ::= "d" [0-9]'}]},
            {"type": "repeat", "min": 0, "max": 2, "content": {"type": "const_string", "value": "!"}}]}),
         ["ac", "abc", "abed1!!"], ["a", "ad", "ac!!!", "ab\nc"]),
    ],
    ids=["tag", "triggered", "structures", "one", "separated", "others"],
)  # fmt: skip
def test_structural_tags(
    asked: Structured, good: list[str], bad: list[str], backend: XgrammarBackend, words: Vocabulary
) -> None:
    state = backend.compile(asked).start()
    assert [text for text in good if not takes(state, words, text)] == []
    assert [text for text in bad if takes(state, words, text)] == []
    assert allowed(state, words) & controls(words) <= set(words.eos_ids)


def controls(words: Vocabulary) -> set[int]:
    """What is no text, padding among it."""
    return {i for i, text in enumerate(words.tokens) if not text} | set(range(len(words.tokens), words.size))


def test_a_tag_may_name_a_control_token_and_no_other_comes(backend: XgrammarBackend, words: Vocabulary) -> None:
    trigger, *others = sorted(controls(words) - set(words.eos_ids))
    tag = {**TAG, "begin": {"type": "token", "token": trigger}, "end": {"type": "token", "token": trigger}}
    asked = tagged({"type": "token_triggered_tags", "trigger_tokens": [trigger], "tags": [tag]})
    state = backend.compile(asked).start()
    assert others
    assert allowed(state, words) & controls(words) == {trigger, *words.eos_ids}
    assert not state.advance(others[0])
    for token in [*words.encode("so "), trigger, *words.encode('{"name": "", "age": 1}'), trigger]:
        assert token in allowed(state, words)
        assert state.advance(token)
    rows = np.zeros((3, words.num_words), np.int32)
    state.fill_draft(np.array([trigger, others[0]], np.int32), np.array([-1, -1], np.int32), frozenset(), rows)
    assert rows[1].any() and not rows[2].any()


def test_control_tokens_are_no_text(backend: XgrammarBackend, words: Vocabulary) -> None:
    for asked in (Structured.regex(r"[^a]*"), Structured.grammar("root ::= .*", "ebnf")):
        state = backend.compile(asked).start()
        assert allowed(state, words) & controls(words) == set(words.eos_ids)
        assert not any(state.advance(token) for token in controls(words) - set(words.eos_ids))
        assert not state.advance(words.size + 5)
        assert not state.advance(-1)


def test_the_end_comes_once_and_can_be_taken_back(backend: XgrammarBackend, words: Vocabulary) -> None:
    state = backend.compile(Structured.choice(["ab"])).start()
    ids = words.encode("ab")
    for end in words.eos_ids:
        assert state.jump_forward() == [*ids, words.eos_ids[0]]
        assert not state.advance(end), "nothing was said yet"
        for token in ids:
            assert state.advance(token)
        assert state.jump_forward() == [words.eos_ids[0]]
        assert allowed(state, words) == set(words.eos_ids)
        assert state.advance(end)
        assert allowed(state, words) == set()
        assert state.jump_forward() == []
        assert not state.advance(words.eos_ids[0])
        assert not state.advance(ids[0])
        state.rollback(0)
        assert allowed(state, words) == set()
        state.rollback(1 + len(ids))


def test_what_is_forced_may_come_and_is_how_the_tokenizer_splits_it(
    backend: XgrammarBackend, words: Vocabulary
) -> None:
    state = backend.compile(Structured.json(PERSON)).start()
    forced = state.jump_forward()
    assert forced == words.encode('{"name": "')[: len(forced)]
    assert len(forced) >= 2
    for token in forced:
        assert token in allowed(state, words)
        assert state.advance(token)


def test_the_last_token_is_not_forced_where_a_longer_one_may_come(backend: XgrammarBackend, words: Vocabulary) -> None:
    """There are tokens " o" and " a"."""
    state = backend.compile(Structured.choice(["an ox", "an ax"])).start()
    assert state.jump_forward() == words.encode("an")
    assert backend.compile(Structured.choice(["an "])).start().jump_forward() == [
        *words.encode("an "),
        words.eos_ids[0],
    ]


def test_what_is_forced_within_a_character_is_no_fault(backend: XgrammarBackend, words: Vocabulary) -> None:
    state = backend.compile(Structured.choice(["\U0001f600", "\U0001f601"])).start()
    for token in words.encode("\U0001f600"):
        assert all(each in allowed(state, words) for each in state.jump_forward()[:1])
        assert state.advance(token)
    assert state.jump_forward() == [words.eos_ids[0]]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "false"),
        ({"not": {"type": "null"}}, "not"),
        ({"minimum": 3}, "minimum without type"),
        ({"required": ["a"]}, "required without type"),
        ({"type": "object", "required": ["a"]}, "required: 'a'"),
        ({"type": "object", "properties": {"a": {"type": "null"}}}, "additionalProperties"),
        ({"type": "object", "properties": {"a": {"not": {}}}, "additionalProperties": False}, "not .*properties/a"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "prefixItems": [True]}, "prefixItems"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems is above"),
        ({"type": "array", "maxItems": 2.0}, "maxItems"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "integer", "minimum": 2**60}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "string", "pattern": "a"}, "pattern: 'a' is only enforced with \\^"),
        ({"type": "string", "pattern": "^(?!.*a.*b).$"}, "look-around"),
        ({"type": "string", "pattern": "^a|b$"}, "anchor"),
        ({"type": "string", "pattern": "^a$b$"}, "inside a pattern"),
        ({"type": "string", "pattern": r"^\S$"}, r"\\S"),
        ({"type": "string", "pattern": r"^\p{L}$"}, "{L}"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "pattern beside length"),
        ({"type": "string", "format": "email", "pattern": "^a$"}, "format beside pattern"),
        ({"type": "string", "format": "date"}, "format: 'date'"),
        ({"type": "string", "format": "json-pointer"}, "format: 'json-pointer'"),
        ({"type": "string", "pattern": '^["]$'}, "JSON escapes"),
        ({"type": "string", "pattern": r"^\\$"}, "JSON escapes"),
        ({"type": "string", "pattern": r"^[a\x22]$"}, "JSON escapes"),
        ({"type": "string", "pattern": r"^\n$"}, "JSON escapes"),
        ({"type": "string", "maxLength": 10**9}, "maxLength"),
        ({"type": ["string", "integer"], "minLength": 1}, "beside several types"),
        ({"type": "strin"}, "type"),
        ({"type": "null", "minLength": 1}, "minLength says nothing"),
        ({"contains": True}, "contains is not"),
        ({"type": "string", "unheardOf": 1}, "unheardOf"),
        ({"const": {"a": 1}}, "const"),
        ({"enum": [1, 2], "minimum": 2}, "minimum beside enum"),
        ({"enum": ["a"], "type": "integer"}, "enum"),
        ({"enum": [2**63]}, "2\\*\\*53"),
        ({"anyOf": [{"type": "null"}], "type": "integer"}, "type beside anyOf"),
        ({"allOf": [{"type": "null"}, {"type": "integer"}]}, "allOf"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"$ref": "#/$defs/a", "type": "null", "$defs": {"a": {"type": "null"}}}, "type beside \\$ref"),
        ({"$ref": "http://example.com/schema"}, "\\$ref"),
        ({"$ref": "#"}, "\\$ref"),
        ({"$ref": "#/$defs/missing"}, "leads to nothing"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "another \\$ref"),
        ({"$dynamicRef": "#a"}, "\\$dynamicRef"),
        ({"anyOf": [{"$id": "x", "type": "null"}]}, "\\$id"),
        ({"if": {"type": "null"}, "then": True}, "if"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_it_would_ignore_is_refused_by_its_name(schema: Any, said: str, backend: XgrammarBackend) -> None:
    with pytest.raises(RefusedError, match=f"^structured: .*{said}") as caught:
        backend.compile(Structured.json(schema))
    assert "\n" not in str(caught.value)
    if schema is not False:
        with pytest.raises(RefusedError, match=said):
            backend.compile(tagged({"type": "json_schema", "json_schema": copy.deepcopy(schema)}))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Structured.regex("a$b"), "inside a pattern"),
        (Structured.regex("(?=a)b"), "look-around"),
        (Structured.regex("(?i)a"), "groups"),
        (Structured.regex("("), "."),
        (Structured.regex(r"[^\d]"), "set"),
        (Structured.regex("[a&&b]"), "set"),
        (Structured.regex("(([a-z ]{1,100}){1,100}){1,100}"), "repeats"),
        (Structured.grammar("start: missing"), "missing"),
        (Structured.grammar('start: %json {"not": {}}'), "%json"),
        (Structured.grammar("start: /a$b/"), "inside a pattern"),
        (Structured.grammar("start: /a/i"), "flags"),
        (Structured.grammar("start: <[4]>"), "Lark"),
        (Structured.grammar("root ::= missing", "ebnf"), "'missing' is not defined"),
        (Structured.choice([str(i) for i in range(2000)]), "2000 choices"),
        (tagged({"type": "qwen_xml_parameter", "json_schema": {}}), "qwen_xml_parameter"),
        (tagged({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "style"),
        (tagged({"type": "any_text", "max_tokens": 3}), "max_tokens"),
        (tagged({"type": "token", "token": "<s>"}), "id of a token"),
        (tagged({"type": "tag", "begin": "a", "end": "b"}), "content"),
        (tagged({"type": "token", "token": -1}), "no token of the model"),
        (tagged({"type": "token", "token": 10**6}), "no token of the model"),
        (tagged({"type": "token", "token": 291}), "ends a text"),
        (
            tagged(
                {
                    "type": "repeat",
                    "min": 0,
                    "max": 99,
                    "content": {"type": "repeat", "min": 0, "max": 99, "content": {"type": "any_text"}},
                }
            ),
            "1000 repeats",
        ),
        (tagged({"type": "repeat", "min": 0, "max": "a", "content": {"type": "any_text"}}), "whole number"),
        (Structured.regex(".{200}.{200}.{200}"), "repeats"),
        (Structured.json({"enum": ["x" * 900 + str(i) for i in range(99)]}), "characters"),
        (Structured.choice(["x" * 900 + str(i) for i in range(99)]), "characters"),
        (Structured("json_schema", '{"const": "\\ud800"}'), "JSON"),
        (tagged({"type": "regex", "pattern": "a$b"}), "inside a pattern"),
        (Structured.structural_tag({"structures": [], "triggers": [], "more": 1}), "more"),
        (Structured.structural_tag({"type": "x"}), "structural tag"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_else_it_would_ignore_is_refused(asked: Structured, said: str, backend: XgrammarBackend) -> None:
    with pytest.raises(RefusedError, match=f"^structured: .*{said}") as caught:
        backend.compile(asked)
    assert "\n" not in str(caught.value)
    assert "/project" not in str(caught.value)


schemas = st.recursive(
    st.sampled_from([True, {"type": "integer"}, {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
                     {"type": "integer", "minimum": -1.5, "exclusiveMaximum": 2}, {"const": "a"}, {"const": -0.5},
                     {"type": "string", "maxLength": 1}, {"enum": [1, None, "a"]}, {"minimum": 3}, {"type": "null"},
                     {"type": "string", "pattern": "^[^a].?$"}, {"type": ["null", "array"], "maxItems": 1},
                     {"type": "object", "minProperties": 1}]),
    lambda inner: st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
    | st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)})
    | st.fixed_dictionaries({"type": st.just("array"), "items": inner, "minItems": st.integers(0, 2)})
    | st.fixed_dictionaries({"type": st.just("array"), "prefixItems": st.lists(inner, min_size=1, max_size=2),
                             "items": inner | st.just(False)})
    | st.fixed_dictionaries({"type": st.just("object"), "additionalProperties": inner})
    | st.fixed_dictionaries({"type": st.just("object"),
                             "properties": st.dictionaries(st.sampled_from(["a", "b", "é\"\n"]), inner, max_size=3),
                             "required": st.sampled_from([[], ["a"]]),
                             "additionalProperties": st.just(False)},
                            optional={"maxProperties": st.integers(0, 2), "minProperties": st.integers(0, 2)}),
    max_leaves=5,
)  # fmt: skip
instances = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 4) | st.sampled_from([0.5, -0.5, 2.5, 1e3, "a", "", "b", "é", "bé"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c", 'é"\n']), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(schema=schemas, values=st.lists(instances, min_size=1, max_size=6))
def test_no_random_schema_accepts_what_does_not_fit(
    schema: Any, values: list[Any], backend: XgrammarBackend, words: Vocabulary
) -> None:
    """jsonschema-rs is the truth; what is refused says nothing."""
    try:
        state = backend.compile(Structured.json(schema)).start()
    except RefusedError:
        return
    validator = jsonschema_rs.Draft202012Validator(schema)
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        assert validator.is_valid(value) or not takes(state, words, text), text


patterns = st.recursive(
    st.sampled_from(
        ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\n", "é", r"\x61", r"[\x61b]", r"\u0062", "[a-c1]", r"\."]
    ),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])).map(lambda two: f"({two[0]}){two[1]}")
    ),
    max_leaves=5,
)
TEXTS = ["".join(text) for n in range(4) for text in itertools.product("ab1\n", repeat=n)] + ["é", "aé", "a.", "."]


@settings(max_examples=60)
@given(patterns, st.booleans())
def test_expressions_mean_what_they_mean_elsewhere(
    backend: XgrammarBackend, words: Vocabulary, pattern: str, anchored: bool
) -> None:
    asked = f"^{pattern}$" if anchored else pattern
    assert exact(asked) == exact(pattern)
    state = backend.compile(Structured.regex(asked)).start()
    for text in TEXTS:
        assert takes(state, words, text) == (re.fullmatch(pattern, text) is not None), text


WALKED: list[Any] = [
    PERSON,
    *({"type": "string", "format": name} for name in sorted(_FORMATS)),
    *({"type": "string", "pattern": f"^{pattern}$"} for pattern in (
        r"[ -~]{1,4}", r"[\x20-\x7f]*", r"[^a]{0,5}", r".{2,3}", r'[^"\\]+', r"(?:\d|\s|\w){2}", r"[!-z]+[#-~]",
        r"(?:é|[à-ü])")),
    {"type": "string", "minLength": 2}, {"type": ["null", "string"], "maxLength": 3},
    {"type": "array", "maxItems": 2,
     "items": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}}},
    {"type": "array", "prefixItems": [{"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
                                      {"enum": ["a\"", 0.1]}], "items": False, "minItems": 2},
    {"type": "object", "properties": {'k"\n': {"type": "string"}}, "required": ['k"\n'], "additionalProperties": False},
]  # fmt: skip


@pytest.mark.parametrize("schema", WALKED, ids=lambda schema: json.dumps(schema)[:50])
def test_whatever_is_said_under_the_masks_fits(schema: Any, backend: XgrammarBackend, words: Vocabulary) -> None:
    """Random texts, those that end."""
    grammar = backend.compile(Structured.json(copy.deepcopy(schema)))
    validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    ended = 0
    for seed in range(150):
        text = walk(grammar.start(), words, np.random.default_rng(seed))
        if text is not None:
            ended += 1
            assert validator.is_valid(json.loads(text)), text
    assert ended > 20


def walk(state: XgrammarState, words: Vocabulary, chance: np.random.Generator) -> str | None:
    """Ends where it may; None where it has not, or where bytes are no characters: sets that name what may not come let
    some of these come."""
    said: list[bytes] = []
    for _ in range(120):
        may_come = sorted(allowed(state, words))
        quotes = [token for token in may_come if b'"' in words.tokens[token]]
        if words.eos_ids[0] in may_come:
            text = b"".join(said)
            return text.decode() if text == text.decode(errors="ignore").encode() else None
        token = int(chance.choice(quotes if quotes and chance.random() < 0.3 else may_come))
        assert state.advance(token)
        said.append(words.tokens[token])
    return None


def test_states_of_one_grammar_do_not_know_each_other(backend: XgrammarBackend, words: Vocabulary) -> None:
    grammar = backend.compile(Structured.choice(["ab", "cd"]))
    first, second = grammar.start(), grammar.start()
    assert first.advance(words.encode("ab")[0])
    assert takes(second, words, "cd")
    assert takes(grammar.start(), words, "ab")
    assert grammar.num_bytes > 500


def test_auto_asks_it_for_what_llguidance_does_not_know(words: Vocabulary) -> None:
    asked = Structured.json({"type": "string", "format": "uri-template"})
    with pytest.raises(RefusedError, match="uri-template"):
        Compiler(lambda: words, "llguidance").compile(asked)
    state = Compiler(lambda: words).compile(asked).start()
    assert takes(state, words, '"http://a.b/{c}"')
    assert not takes(state, words, '"http://a.b/{c"')
    with pytest.raises(RefusedError, match=r"llguidance: .*uniqueItems.* xgrammar: uniqueItems "):
        Compiler(lambda: words).compile(Structured.json({"type": "array", "uniqueItems": True}))


IMPORTS = """
import sys
from specserve.grammars import _lean
if {broken}:
    class Fewer(_lean._Absent):
        def __getattr__(self, name):
            raise AttributeError(name)
    _lean._Absent = Fewer
found = _lean.xgrammar_module()
assert found.GrammarCompiler is sys.modules["xgrammar"].GrammarCompiler
print(*sorted(name for name in ("torch", "transformers") if name in sys.modules))
import numpy, xgrammar
info = xgrammar.TokenizerInfo([b"a", b"b", b"c"], xgrammar.VocabType.RAW, stop_token_ids=[2])
state = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_regex("a"))
row = numpy.zeros(1, numpy.int32)
state.fill_next_token_bitmask(row)
print(row[0] & 7)
"""


@pytest.mark.parametrize(("broken", "loaded"), [(False, ""), (True, "torch transformers")])
def test_a_process_without_torch_gets_it_without_torch(broken: bool, loaded: str) -> None:
    """And with it where a release needs more of torch than its name."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(broken=broken)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [loaded, "1"]
