"""Structural tags are read as xgrammar's documentation has them; what is not supported is refused with its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.structured.base import RefusedError
from specserve.structured.tags import (
    AnyText,
    ConstString,
    EbnfGrammar,
    Either,
    Format,
    JsonSchema,
    Regex,
    SeparatedTags,
    Series,
    Tag,
    TriggeredTags,
    parse,
)

ANY = {"type": "any_text"}
SURROGATE = r'{"type":"structural_tag","format":{"type":"const_string","value":"\ud800"}}'
TAG = {"type": "tag", "begin": "<t>", "content": ANY, "end": "</t>"}


def parsed(value: Any) -> Format:
    return parse(json.dumps({"type": "structural_tag", "format": value}))


def refusal(value: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        parsed(value)
    return str(caught.value)


def test_every_format_becomes_its_node() -> None:
    found = parsed(
        {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "json_schema", "json_schema": {"type": "integer"}, "style": "json", "any_order": False},
                {"type": "regex", "pattern": "b+"},
                {"type": "grammar", "grammar": 'root ::= "c"'},
                {"type": "or", "elements": [{**ANY, "excludes": ["d"], "max_tokens": None}, TAG]},
                {"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "stop_after_first": True},
                {"type": "tags_with_separator", "tags": [{**TAG, "end": ["e", "f"]}], "separator": ","},
            ],
        }
    )
    tag = Tag(begin="<t>", content=AnyText(type="any_text"), end=("</t>",))
    assert found == Series(
        type="sequence",
        elements=(
            ConstString(type="const_string", value="a"),
            JsonSchema(type="json_schema", json_schema={"type": "integer"}),
            Regex(type="regex", pattern="b+"),
            EbnfGrammar(type="grammar", grammar='root ::= "c"'),
            Either(type="or", elements=(AnyText(type="any_text", excludes=("d",)), tag)),
            TriggeredTags(type="triggered_tags", triggers=("<",), tags=(tag,), stop_after_first=True),
            SeparatedTags(
                type="tags_with_separator", tags=(tag.model_copy(update={"end": ("e", "f")}),), separator=","
            ),
        ),
    )


@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type": "object"}'])
def test_the_older_form_of_vllm_is_triggered_tags(schema: Any) -> None:
    found = parse(
        json.dumps(
            {
                "type": "structural_tag",
                "structures": [{"begin": "<f=a>", "schema": schema, "end": "</f>"}],
                "triggers": ["<f="],
            }
        )
    )
    content = JsonSchema(type="json_schema", json_schema={"type": "object"})
    tag = Tag(begin="<f=a>", content=content, end=("</f>",))
    assert found == TriggeredTags(type="triggered_tags", triggers=("<f=",), tags=(tag,))


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({"type": "qwen_xml_parameter", "json_schema": {}}, ["qwen_xml_parameter", "json_schema"]),
        ({"type": "sequence", "elements": [ANY, {"type": "token", "token": 3}]}, ["elements.1", "token"]),
        ({**TAG, "begin": {"type": "token", "token": 3}}, ["begin", "'token'"]),
        ({**TAG, "end": ["x", {"type": "token", "token": 3}]}, ["end", "'token'"]),
        ({**TAG, "end": []}, ["end"]),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, ["style", "json"]),
        ({"type": "json_schema", "json_schema": {}, "any_order": True}, ["any_order"]),
        ({"type": "json_schema", "json_schema": {}, "max_whitespace_cnt": 2}, ["max_whitespace_cnt"]),
        ({"type": "json_schema", "json_schema": {}, "excludes": ["a"]}, ["excludes"]),
        ({"type": "json_schema", "json_schema": 3}, ["json_schema"]),
        ({**ANY, "max_chars": 5}, ["max_chars"]),
        ({**ANY, "excludes": [""]}, ["excludes"]),
        ({**ANY, "surprise": 1}, ["surprise"]),
        ({"type": "or", "elements": []}, ["elements"]),
        ({"type": "triggered_tags", "triggers": ["<x"], "tags": [TAG]}, ["'<t>'", "0 of the triggers"]),
        ({"type": "triggered_tags", "triggers": ["<", "<t"], "tags": [TAG]}, ["'<t>'", "2 of the triggers"]),
        ({"type": "triggered_tags", "triggers": ["<", "x"], "tags": [TAG]}, ["'x'", "none of the tags"]),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [TAG], "at_least_one": 1}, ["at_least_one"]),
        ({"type": "tags_with_separator", "tags": [TAG] * 501, "separator": ""}, ["501 tags", "500"]),
        ({"type": "or", "elements": [ANY] * 1024}, ["1025 formats", "1024"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else json.dumps(value)[:40],
)
def test_what_is_not_supported_is_refused_by_its_name(value: Any, parts: list[str]) -> None:
    message = refusal(value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize("depth", [24, 200, 5000])
def test_nesting_has_an_end(depth: int) -> None:
    inner = json.dumps(ANY)
    text = '{"type":"sequence","elements":[' * depth + inner + "]}" * depth
    with pytest.raises(RefusedError, match=r"nested more than 24 deep|JSON"):
        parse(f'{{"type":"structural_tag","format":{text}}}')


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"type":"structural_tag"}', "[" * 100_000, "NaN", SURROGATE])
def test_what_is_no_structural_tag_is_refused(text: str) -> None:
    with pytest.raises(RefusedError, match="structural tag"):
        parse(text)
