"""Formats: those that the standard does not define say nothing, and those that it does are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from specserve.structured.schema.formats import STANDARD, annotated_formats, without_annotations
from specserve.structured.spec import Structured
from specserve.structured.tags import ignored_formats


def test_only_unknown_formats_are_taken_out() -> None:
    schema: dict[str, Any] = {
        "format": "topic",
        "properties": {"format": {"format": "date"}, "a": {"items": {"format": "url", "minLength": 1}}},
        "$defs": {"b": {"format": "topic"}},
        "components": {"c": {"format": "path"}},  # no keyword holds it, but a reference leads there
        "not": {"$ref": "#/components/c"},
        "const": {"format": "value"},
    }
    before = copy.deepcopy(schema)
    assert annotated_formats(schema) == ["path", "topic", "url"]
    made = without_annotations(schema)
    assert schema == before, "it is the caller's"
    assert annotated_formats(made) == []
    assert made["properties"] == {"format": {"format": "date"}, "a": {"items": {"minLength": 1}}}
    assert (made["$defs"], made["components"], made["const"]) == ({"b": {}}, {"c": {}}, {"format": "value"})


@pytest.mark.parametrize("schema", [True, False, {}, *({"format": name} for name in sorted(STANDARD))])
def test_documents_without_them_stay_the_same_object(schema: Any) -> None:
    assert without_annotations(schema) is schema


def test_they_are_found_in_all_kinds_of_constraints() -> None:
    schema = {"type": "string", "format": "topic"}
    inner = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<", "content": inner, "end": ">"}
    assert ignored_formats(Structured.json(schema)) == ["topic"]
    assert ignored_formats(Structured.structural_tag({"type": "structural_tag", "format": tag})) == ["topic"]
    assert ignored_formats(Structured.choice(["format"])) == []
    unread = {"type": "structural_tag", "format": {"type": "nothing that is known"}}
    assert ignored_formats(Structured.structural_tag(unread)) == []
