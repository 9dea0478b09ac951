"""Whether values fit schemas: what an independent validator says, in bounded time whatever a client's schema holds."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings, strategies as st

from specserve.structured.fits import fits

NAMES = st.sampled_from(["a", "b", "ab"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from([0.5, 1.0, 2.5, 0.3]) | st.text("ab1", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
COUNTS, NUMBERS = st.integers(0, 3), st.sampled_from([0, 1, 2.5, 7, 0.1])
PATTERNS = st.sampled_from(["^a", "b$", "[ab]+1", "^$", "."])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some, named = st.lists(inner, min_size=1, max_size=3), st.dictionaries(NAMES, inner, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": KINDS | st.lists(KINDS, min_size=1, max_size=2, unique=True),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=3, unique_by=json.dumps),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), some),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "propertyNames"), inner),
        "additionalProperties": inner,
        **dict.fromkeys(("properties", "dependentSchemas"), named),
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS),
        "multipleOf": st.sampled_from([1, 2, 0.1, 0.5]),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNTS),
        **dict.fromkeys(("minContains", "maxContains"), COUNTS),
        "uniqueItems": st.booleans(),
        "pattern": PATTERNS,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "$ref": st.sampled_from(["#/$defs/x~1y", "#/$defs/list/anyOf/1"]),
        "title": st.just("any"),
        "format": st.just("unheard"),
    }
    return st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen})
    )


SCHEMAS = st.recursive(st.booleans() | schemas(st.booleans()), schemas, max_leaves=8)
DEFINED = {"x/y": {"type": ["string", "integer"]}, "list": {"anyOf": [False, {"type": "array", "maxItems": 1}]}}


@settings(max_examples=600)
@given(schema=SCHEMAS, values=st.lists(VALUES, min_size=1, max_size=6))
def test_it_says_what_an_independent_validator_says(schema: Any, values: list[Any]) -> None:
    whole = {"allOf": [schema], "$defs": DEFINED}
    known = jsonschema_rs.Draft202012Validator(whole)
    assert [fits(value, whole) for value in values] == [known.is_valid(value) for value in values]


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"items": [{"type": "string"}], "additionalItems": False}, ["a"], True),  # as schemas were written once
        ({"items": [{"type": "string"}], "additionalItems": False}, ["a", 1], False),
        ({"minimum": 3, "exclusiveMinimum": True}, 3, False),
        ({"minimum": 3, "exclusiveMinimum": False}, 3, True),
        ({"dependencies": {"a": ["b"]}}, {"a": 1}, False),
        ({"const": 1}, True, False),
        ({"$ref": "http://example.com/"}, 1, None),
        ({"type": "string", "$ref": "http://example.com/"}, 1, False),
        ({"unevaluatedProperties": False}, {}, None),
        ({"anyOf": [{"$ref": "#elsewhere"}, {"type": "integer"}]}, 1, True),
        ({"oneOf": [True, {"type": "integer"}, {"$ref": "#elsewhere"}]}, 1, False),
        ({"oneOf": [False, {"type": "integer"}, {"$ref": "#elsewhere"}]}, 1, None),
        ({"not": {"$ref": "#elsewhere"}}, 1, None),
        ({"type": "strnig"}, 1, None),
        ({"required": 5, "type": "object"}, {}, None),
        ({"pattern": "("}, "a", None),
        ({"properties": {"a": 5}}, {"a": 1}, None),
        ({"properties": 5}, {"a": 1}, None),
        (5, 1, None),
        ({"multipleOf": 0}, 1, None),
    ],
)
def test_other_drafts_and_what_is_in_doubt(schema: Any, value: Any, expected: bool | None) -> None:
    assert fits(value, schema) is expected


def doubling(depth: int) -> dict[str, Any]:
    """Twice as much work for each level."""
    levels = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"$ref": "#/$defs/a0", "$defs": {**levels, f"a{depth}": True}}


HOSTILE: dict[str, tuple[Any, Any]] = {
    "circle": ({"$ref": "#"}, {}),
    "doubling": (doubling(60), {}),
    "backtracking": ({"pattern": "^(a|aa|a.)*(b|c)*$(?<=x)"}, "a" * 4000),
    "many patterns": ({"allOf": [{"pattern": f"^(a|aa|a.)*{i}$"} for i in range(500)]}, "a" * 4000),
    "all differ": ({"uniqueItems": True}, list(range(4000))),
    "long choice": ({"items": {"enum": list(range(4000))}}, [-1.5] * 4000),
    "huge number": ({"multipleOf": 1e-300}, 10**3000),
    "deep": ({"items": {"$ref": "#"}}, json.loads("[" * 900 + "]" * 900)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_takes_long(name: str) -> None:
    schema, value = HOSTILE[name]
    begin = time.perf_counter()
    assert fits(value, schema) is not True
    assert time.perf_counter() - begin < 5, "without limits it takes hours, or all there is"
