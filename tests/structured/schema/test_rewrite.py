"""Schemas in other words: each keyword that a grammar is not made of, with values that fit and values that do not. The
rewritten schema is judged by jsonschema-rs, so no backend is asked; that it only has keywords of grammars is looked at.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings, strategies as st

from specserve.structured.schema.document import MAX_DEPTH, reachable, walk
from specserve.structured.schema.formats import exact
from specserve.structured.schema.rewrite import is_endless, rewritten
from specserve.structured.spec import RefusedError

OF_GRAMMARS = {
    "$defs", "$ref", "type", "const", "enum", "anyOf", "allOf", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "prefixItems", "items", "minItems",
    "maxItems", "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
}  # fmt: skip
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
          "additionalProperties": False}  # fmt: skip
CASES: list[Any] = [
    {"not": {"type": "string"}},
    {"not": {"enum": [1, "a", None, [1], {"a": 1}]}},
    {"type": "string", "not": {"enum": ["ab", "a", ""]}},
    {"type": "integer", "not": {"const": 2}},
    {"not": {"required": ["a"]}, "type": "object"},
    {"not": {"anyOf": [{"minimum": 2}, {"type": "string", "minLength": 2}]}},
    {"not": {"properties": {"a": {"type": "string"}}, "required": ["a"]}},
    {"not": {"maxItems": 1}},
    {"not": {"contains": {"type": "string"}}},
    {"not": {"items": {"type": "string"}}, "maxItems": 2},
    {"not": {"oneOf": [{"minimum": 2}, {"maximum": 3}]}},
    {"not": {"if": {"type": "number"}, "then": {"minimum": 2}, "else": {"type": "string"}}},
    {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}, **OBJECT},
    {"if": {"type": "integer"}, "else": {"type": "string"}},
    {**OBJECT, "dependentRequired": {"a": ["b"]}},
    {**OBJECT, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 3}}}}},
    {**OBJECT, "minProperties": 1},
    {**OBJECT, "maxProperties": 1},
    {"type": "object", "properties": {"a": True, "b": True}, "maxProperties": 2, "minProperties": 1},
    {"type": "array", "contains": {"type": "string"}, "maxItems": 3},
    {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}], "contains": {"type": "string"}},
    {"type": "array", "maxContains": 1, "contains": {"type": "number"}},
    {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 1},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"propertyNames": {"pattern": "^[ab]$"}},
    {"propertyNames": {"enum": ["a", "c"]}, **OBJECT},
    {"propertyNames": {"maxLength": 1}, "type": "object"},
    {"propertyNames": {"maxLength": 1}, **OBJECT, "maxProperties": 1},
    {"propertyNames": False},
    {"patternProperties": {"b": {"minimum": 2}}, "anyOf": [OBJECT, {"type": "array"}], "not": {"required": ["z"]}},
    {"oneOf": [{"type": "boolean"}, {"enum": [1, "a"]}]},
    {"patternProperties": {"^a": {"type": "integer"}, ".*": True, "": {"type": ["integer", "string"]}}},
    {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "boolean"}]},
    {"oneOf": [{"minimum": 2}, {"maximum": 3}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], **OBJECT},
    {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]},
               {"properties": {"a": {"const": 2}}, "required": ["a"]}], **OBJECT},
    {"allOf": [{"properties": {"a": {"minimum": 2}}}, {"properties": {"b": True}}], "unevaluatedProperties": False},
    {"anyOf": [{"properties": {"a": True}}, {"properties": {"b": {"type": "integer"}}}],
     "unevaluatedProperties": False},
    {"$ref": "#/$defs/x", "unevaluatedProperties": {"type": "string"}, "$defs": {"x": OBJECT | {"minProperties": 1}}},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"contains": {"type": "string"}, "unevaluatedItems": {"type": "integer"}, "maxItems": 2},
    {"anyOf": [{"prefixItems": [True]}, {"prefixItems": [True, {"type": "integer"}]}], "unevaluatedItems": False},
    {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}], "not": {"const": 6}, "type": "integer"},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 3, "type": "integer", "uniqueItems": False},
    {"minItems": 1.0, "maxItems": 2.0, "minLength": 1.0},
    {"type": ["integer", "null"], "not": {"const": 1}},
    {"$id": "https://x.test/root", "$ref": "b#c", "$defs": {"b": {"$id": "b", "$anchor": "z",
     "$defs": {"c": {"$anchor": "c", "not": {"type": "string"}}}}}},
    {"$defs": {"a/b~%": {"not": {"type": "null"}}}, "$ref": "#/$defs/a~1b~0%25"},
    {"$ref": "#/components/schemas/X", "components": {"schemas": {"X": {"not": {"type": "null"}}}}},
    {"$dynamicRef": "#d", "$defs": {"e": {"$dynamicAnchor": "d", "not": {"type": "null"}}}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "not": {"required": ["b"]}},
    {"not": {"not": {"type": "string"}}, "title": "a", "default": 1, "examples": [{"$ref": "nowhere"}]},
    {"enum": [{"$ref": "nowhere"}, {"not": {}}, {"multipleOf": 5000}], "not": {"maxProperties": 0}},
]  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 7) | st.sampled_from(["", "a", "ab", "b", 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=5,
)


def simple(schema: Any) -> bool:
    return all(found.keys() <= OF_GRAMMARS for found in walk(schema))


@pytest.mark.parametrize("schema", CASES, ids=lambda schema: json.dumps(schema)[:50])
@settings(max_examples=30)
@given(value=values)
def test_the_same_values_fit_in_other_words(schema: Any, value: Any) -> None:
    words = rewritten(schema)
    assert simple(words)
    assert jsonschema_rs.is_valid(words, value) == jsonschema_rs.is_valid(schema, value)


def test_a_wrong_rewriting_would_be_noticed() -> None:
    """Each case has values that fit and values that do not, so that words for anything or nothing would fail."""
    found = [None, True, 2, 0.5, "ab", "x", [], [1], ["a"], [1, "a", "b", 3], {}, {"a": 1}, {"a": 2, "b": 5}, {"b": 1},
             {"c": 1}, [True], 6, 12, {"a": "s"}, {"x": 1, "y": 2}, [1, 1], 3, {"multipleOf": 5000}]  # fmt: skip
    for schema in CASES:
        judged = {jsonschema_rs.is_valid(schema, value) for value in found}
        assert judged == {True, False}, schema


def test_what_older_drafts_said_is_understood() -> None:
    words = rewritten({**OBJECT, "dependencies": {"a": ["b"]}})
    assert [jsonschema_rs.is_valid(words, value) for value in ({"a": 1}, {"a": 1, "b": 1}, {})] == [False, True, True]
    words = rewritten({"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "string"}})
    assert [jsonschema_rs.is_valid(words, value) for value in ([1], [1, "a"], [1, 2], ["a"])] == [
        True, True, False, False
    ]  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x"}}, "required": ["a"]},
        {"anyOf": [{"type": "null"}, {"enum": [1, 2]}], "minimum": 1},
        {"type": "array", "items": {"type": "number", "minimum": 0.5, "multipleOf": 0.5}, "minItems": 1},
    ],
)
def test_what_grammars_are_made_of_stays_as_it_is(schema: Any) -> None:
    assert rewritten(schema) == schema


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"pattern": "a"}}, "pattern"),
        ({"not": {"multipleOf": 2}}, "multipleOf"),
        ({"not": {"type": "integer"}}, "integer"),
        ({"not": {"additionalProperties": False}}, "additionalProperties"),
        ({"not": {"patternProperties": {"a": False}}}, "patternProperties"),
        ({"not": {"propertyNames": False}}, "propertyNames"),
        ({"not": {"unevaluatedItems": False}}, "unevaluatedItems"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": True, "minContains": 9}, "minContains"),
        ({"minLength": -1}, "minLength"),
        ({"not": {"required": "a"}}, "required"),
        ({"type": "dict"}, "type"),
        ({"properties": [1]}, "properties"),
        ({"$ref": "https://example.com/x"}, "nothing is fetched"),
        ({"$ref": "#/$defs/x"}, "leads to nothing"),
        ({"$ref": "#x"}, "not in this schema"),
        ({"$ref": "#/title", "title": "a"}, "no schema"),
        ({"not": {"$ref": "#"}}, "asks for itself"),
        ({"allOf": [{"$ref": "#"}], "not": {}}, "asks for itself"),
        ({"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}, "asks for itself"),
        ({"$recursiveRef": "#"}, "recursiveRef"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({**OBJECT, "additionalProperties": {"type": "string"}, "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({"allOf": [OBJECT | {"additionalProperties": {"type": "string"}}, {"patternProperties": {"^a": {}, "b": {}}}],
          "unevaluatedProperties": False}, "patternProperties"),
        ({"type": "object", "properties": {f"k{i}": True for i in range(30)}, "maxProperties": 9}, "maxProperties"),
        ({"dependentRequired": {f"k{i}": ["z"] for i in range(40)}}, "cases"),
        ({"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)],
          "not": {"const": 1}}, "cases"),
        ({"anyOf": [{"properties": {f"k{i}": True}} for i in range(9)], "unevaluatedProperties": False}, "anyOf"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else value,
)  # fmt: skip
def test_what_cannot_be_said_is_refused_by_name(schema: Any, named: str) -> None:
    with pytest.raises(RefusedError, match=named.replace("$", r"\$")):
        rewritten(schema)


def test_older_drafts_name_schemas_otherwise() -> None:
    words = rewritten({"$ref": "#z", "definitions": {"b": {"$id": "#z", "not": {"type": "null"}}}})
    assert words == {"type": ["array", "boolean", "number", "object", "string"]}
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://x.test/a", "$ref": "a#/definitions/b",
              "definitions": {"b": {"not": {"type": "null"}}}}  # fmt: skip
    assert rewritten(schema) == {"type": ["array", "boolean", "number", "object", "string"]}


def test_what_has_no_end_fits_nothing() -> None:
    assert rewritten({"type": "array", "contains": {"$ref": "#"}, "items": {"type": "array"}}) is False


def nested(depth: int, wrap: str) -> Any:
    schema: Any = {"not": {"type": "null"}}
    for _ in range(depth):
        schema = {wrap: [schema]} if wrap in ("allOf", "oneOf") else {wrap: schema}
    return schema


@pytest.mark.parametrize("wrap", ["allOf", "oneOf", "not", "items", "contains", "if"])
@pytest.mark.parametrize("depth", [10, 60, 126, 1000, 100_000])
def test_depth_is_bounded(wrap: str, depth: int) -> None:
    schema = nested(depth, wrap)
    try:
        words = rewritten(schema)
    except RefusedError:
        return
    assert depth < MAX_DEPTH
    assert simple(words)


def test_a_schema_that_doubles_stays_small() -> None:
    """Each definition asks twice for the next; written out it would be 2**30 schemas."""
    defs = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}},
                      "not": {"const": i}} for i in range(30)}  # fmt: skip
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d30": {"type": "integer"}}}
    assert len(json.dumps(rewritten(schema))) < 50_000


schemas = st.recursive(
    st.sampled_from([True, False, {"type": "integer"}, {"const": "a"}, {"minimum": 2}, {"maxLength": 1},
                     {"required": ["a"]}, {"enum": [1, None, "b"]}, {"$ref": "#"}, {"type": ["array", "string"]},
                     {"minItems": 1}, {"maxProperties": 1}, {"exclusiveMaximum": 3}]),
    lambda inner: st.dictionaries(st.sampled_from(["not", "if", "then", "else", "contains", "items",
                                                   "additionalProperties", "unevaluatedProperties", "propertyNames",
                                                   "unevaluatedItems"]), inner, min_size=1, max_size=3)
    | st.dictionaries(st.sampled_from(["allOf", "anyOf", "oneOf", "prefixItems"]), st.lists(inner, min_size=1,
                                                                                       max_size=3), min_size=1)
    | st.fixed_dictionaries({"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)}),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150)
@given(schemas, st.lists(values, min_size=1, max_size=8))
def test_no_random_schema_is_widened(schema: Any, data: list[Any]) -> None:
    """What fits the new words fits the old ones, or the schema is refused; nothing else is ever raised."""
    try:
        words = rewritten(schema)
    except RefusedError:
        return
    assert simple(words)
    for value in data:
        assert jsonschema_rs.is_valid(schema, value) or not jsonschema_rs.is_valid(words, value), value


@pytest.mark.parametrize(
    ("schema", "endless"),
    [
        ({"properties": {"a": {"$ref": "#"}}}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}, False),
        ({"properties": {"x": {"$ref": "#/$defs/d"}},
          "$defs": {"d": {"type": "array", "contains": {"$ref": "#/$defs/d"}}}}, True),
        ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "null"}}}, False),
    ],
)  # fmt: skip
def test_values_without_end_are_found(schema: Any, endless: bool) -> None:
    assert is_endless(schema) == endless


def test_all_schemas_are_walked_and_nothing_else() -> None:
    schema = {
        "enum": [{"type": "x"}], "const": {"type": "x"}, "default": {"type": "x"},
        "properties": {"enum": {"title": "1"}}, "items": [{"title": "2"}],
        "x": {"y": {"title": "3"}}, "not": {"$ref": "#/x/y"}, "dependencies": {"a": ["b"], "c": {"title": "4"}},
    }  # fmt: skip
    assert {found.get("title") for found in walk(schema)} == {None, "1", "2", "4"}
    assert {found.get("title") for found in reachable(schema)} == {None, "1", "2", "3", "4"}


def test_formats_get_patterns_and_other_schemas_stay() -> None:
    plain = {"properties": {"format": {"type": "string", "format": "uuid"}}}
    assert exact(plain) is plain
    dated = {"type": "string", "format": "date", "pattern": "^2"}
    told = exact(dated)
    assert dated.keys() == {"type", "format", "pattern"}, "what was asked is left as it is"
    good, bad = ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "2100-02-29", "1999-01-01"]
    assert [text for text in good + bad if jsonschema_rs.is_valid(told, text)] == good
