"""How calls that must be right are written: every style's tags, and that the reader of calls reads what they allow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.server.wire.answer import CallItem, items_of
from specserve.server.wire.tools.calls import ToolCalling
from specserve.structured import tags
from specserve.text.tool_tags import HERMES, LLAMA, MISTRAL_LIST, MISTRAL_NAMED, QWEN_TAGS, CallStyle, style_of
from specserve.text.tools import call_format

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
STYLES = {
    "hermes": (HERMES, "<tool_call>"),
    "tags": (QWEN_TAGS, "<tool_call><function="),
    "named": (MISTRAL_NAMED, "[TOOL_CALLS][ARGS]"),
    "list": (MISTRAL_LIST, "[TOOL_CALLS]"),
    "llama": (LLAMA, '<|start_header_id|>"parameters":'),
}


def said(format: Any) -> str:
    """The text of a format whose every stretch has one text; a schema says its example, text says Rome."""
    match format["type"]:
        case "const_string":
            return str(format["value"])
        case "json_schema":
            return json.dumps({"city": "Rome", "days": 2} if format["json_schema"].get("required") else {})
        case "any_text":
            return "Rome"
        case "tag":
            return f"{format['begin']}{said(format['content'])}{format['end']}"
        case "sequence":
            return "".join(map(said, format["elements"]))
        case "or":
            return said(format["elements"][0])
        case "tags_with_separator":
            return str(format["separator"]).join(map(said, format["tags"]))
    raise AssertionError(format)


@pytest.mark.parametrize(("style", "source"), STYLES.values(), ids=STYLES)
def test_what_is_written_is_read(style: CallStyle, source: str) -> None:
    found = call_format(None, source, ())
    assert found is not None and found.style is style
    tools = [WEATHER, NOW] if style.separator is not None else [WEATHER]
    text = said(style.calls(tools, parallel=True))
    parser = ToolCalling(found, [WEATHER, NOW]).parser()
    items = items_of(parser.push(text) + parser.finish())
    calls = [(item.name, json.loads(item.arguments)) for item in items if isinstance(item, CallItem)]
    expected = {"city": "Rome"} if style.has_tags else {"city": "Rome", "days": 2}
    if style.has_tags:
        expected = {"city": "Rome", "days": calls[0][1]["days"]}
    assert calls == [("weather", expected), ("now", {})][: len(tools)]


@pytest.mark.parametrize(("style", "source"), STYLES.values(), ids=STYLES)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_tag_is_one_that_is_taken(style: CallStyle, source: str, parallel: bool) -> None:
    for format in (style.calls([WEATHER, NOW], parallel), style.text_with_calls([STRICT, NOW], parallel)):
        tags.parse(json.dumps({"type": "structural_tag", "format": format}))


def test_calls() -> None:
    assert HERMES.calls([WEATHER, NOW], parallel=False) == {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": '<tool_call>\n{"name": "weather", "arguments": ',
                "content": {"type": "json_schema", "json_schema": CITY},
                "end": "}\n</tool_call>",
            },
            {
                "type": "tag",
                "begin": '<tool_call>\n{"name": "now", "arguments": ',
                "content": {"type": "json_schema", "json_schema": EMPTY},
                "end": "}\n</tool_call>",
            },
        ],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": True,
    }
    assert HERMES.calls([NOW], parallel=True)["stop_after_first"] is False
    assert LLAMA.calls([NOW], parallel=True)["stop_after_first"] is True, "it has no way to write two"


def test_only_strict_tools_are_held_to_their_schema_where_none_must_be_called() -> None:
    def schemas(format: Any) -> list[Any]:
        return [tag["content"]["json_schema"] for tag in format["tags"]]

    anything = {"type": "object"}
    assert schemas(HERMES.text_with_calls([STRICT, WEATHER, NOW], True)) == [CITY, anything, anything]
    assert schemas(HERMES.calls([STRICT, WEATHER], True, must=False)) == [CITY, anything]
    assert schemas(HERMES.calls([STRICT, WEATHER], True)) == [CITY, CITY]


def test_arguments_are_an_object() -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
    assert HERMES.call(tool)["content"]["json_schema"] == {"type": "object", "properties": {"a": {}}}
    with pytest.raises(ValueError, match="parameters of f are no JSON Schema"):
        HERMES.call({"function": {"name": "f", "parameters": True}})


def tagged(properties: dict[str, Any], **more: Any) -> Any:
    schema = {"type": "object", "properties": properties, **more}
    return QWEN_TAGS.call({"function": {"name": "f", "parameters": schema}})["content"]


def test_arguments_in_tags() -> None:
    made = tagged({"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"enum": ["x", "y"]}}, required=["a", "b"])
    first, second, third = made["elements"]
    assert first == {
        "type": "tag",
        "begin": "<parameter=a>\n",
        "content": {"type": "any_text", "excludes": ["</parameter>"]},
        "end": "\n</parameter>\n",
    }
    assert second["content"] == {"type": "json_schema", "json_schema": {"type": "integer"}}
    chosen, left_out = third["elements"]
    assert [option["value"] for option in chosen["content"]["elements"]] == ["x", "y"]
    assert left_out == {"type": "const_string", "value": ""}
    assert tagged({}) == {"type": "sequence", "elements": [{"type": "const_string", "value": ""}]}


@pytest.mark.parametrize(
    ("properties", "more", "message"),
    [
        ({"a": {"type": "string", "pattern": "x"}}, {}, "'pattern' has no exact form"),
        ({"a": {}}, {}, "each argument needs one type"),
        ({"a": {"type": ["string", "null"]}}, {}, "each argument needs one type"),
        ({"a>": {"type": "string"}}, {}, "'a>' cannot stand"),
        ({}, {"minProperties": 1}, "'minProperties' has no exact form"),
    ],
)
def test_what_has_no_exact_form_in_tags(properties: Any, more: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tagged(properties, **more)


def test_a_model_that_says_itself_how_it_writes() -> None:
    def style(**field: Any) -> CallStyle | None:
        return style_of({"fields": {"tool_calls": field}})

    made = style(open="<call>", close="</call>", content="json")
    assert made is not None
    begin = '<call>\n{"name": "now", "arguments": '
    assert made.call(NOW)["begin"] == begin and made.call(NOW)["end"] == "}\n</call>"
    assert made.trigger == "<call>"
    assert style(open="<call>", close="</call>", content="xml-inline") is None
    assert style(open_pattern="<call>", close="</call>", content="json") is None
    assert style(open="<call>", content="json") is None
