"""The input items of OpenAI's Responses API, and the chat messages they become. Knows items and their parts; knows no
other field of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, WithJsonSchema

from specserve.server.wire.fields import well_formed
from specserve.server.wire.messages import MAX_MESSAGES, MAX_PARTS
from specserve.server.wire.sentences import shown
from specserve.server.wire.translated import combined, mapping, text_field, tool_call

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # a part's type: where its text is


def _text(content: Any) -> str:
    """The text of a string, or of a list of text parts, joined by line ends as chat does."""
    if isinstance(content, str):
        return well_formed(content)
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise ValueError(f"holds content that is {shown(content)}; it must be text or at most {MAX_PARTS} text parts.")
    return "\n".join(_text_of_part(mapping(part, "text parts")) for part in content)


def _text_of_part(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise ValueError(
            f'holds a part of type {shown(kind)}; this model reads text alone: {{"type": "input_text", "text": ...}}.'
        )
    return text_field(part, _TEXTS[kind], f"a part of type {shown(kind)}")


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("role") not in _ROLES:
        raise ValueError(f"holds a message whose role is {shown(item.get('role'))}; it must be {', '.join(_ROLES)}.")
    return {"role": item["role"], "content": _text(item.get("content"))}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, arguments = (text_field(item, field, "a call") for field in ("call_id", "name", "arguments"))
    return {"role": "assistant", "tool_calls": [tool_call(call_id, name, arguments)]}


def _call_output(item: Mapping[str, Any]) -> dict[str, Any]:
    call_id = text_field(item, "call_id", "a function_call_output")
    return {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"))}


def _reasoning(item: Mapping[str, Any]) -> dict[str, Any]:
    """Reasoning that another server wrote; encrypted, it cannot be read here."""
    found = [said for name in ("content", "summary") if (said := item.get(name)) is not None]
    if not all(isinstance(said, list) for said in found):
        raise ValueError("holds a reasoning item whose content or summary is no list of texts.")
    parts = [part for said in found for part in said]
    texts = [text_field(mapping(part, "texts"), "text", "a part of a reasoning item") for part in parts]
    if not texts:
        raise ValueError("holds a reasoning item without text, which this server cannot read. Leave it out.")
    return {"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)}


_ITEMS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "reasoning": _reasoning,
}


def _input(value: Any) -> Any:
    """Text, or a list of items: always chat messages afterwards."""
    if isinstance(value, str):
        return ({"role": "user", "content": well_formed(value)},)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(f"is {shown(value)}; it must be text or a list of 1 to {MAX_MESSAGES} items.")
    return tuple(combined((_said(mapping(item, "items")) for item in value), ("assistant",)))


def _said(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = "message" if item.get("type") is None else item["type"]
    if kind == "item_reference":
        raise ValueError("holds an item_reference, and this server keeps no items. Send the item itself.")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise ValueError(f"holds an item of type {shown(kind)}; the items read here are {', '.join(_ITEMS)}.")
    return _ITEMS[kind](item)


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """JSON Schema of an object."""
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


_STRING = {"type": "string"}
_TEXT_PARTS = [_object({"type": {"const": kind}, name: _STRING}) for kind, name in _TEXTS.items()]
_CONTENT = {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": _TEXT_PARTS}, "maxItems": MAX_PARTS}]}
_SUMMARY = {"type": ["array", "null"], "items": _object({"text": _STRING})}
_ITEM = {
    "anyOf": [
        _object({"role": {"enum": list(_ROLES)}, "content": _CONTENT}, type={"enum": ["message", None]}),
        _object(
            {"type": {"const": "function_call"}, "call_id": _STRING, "name": _STRING, "arguments": _STRING},
        ),
        _object({"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _CONTENT}),
        _object({"type": {"const": "reasoning"}}, summary=_SUMMARY, content=_SUMMARY),
    ]
}
_INPUT = {"anyOf": [_STRING, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MAX_MESSAGES}]}

Input: TypeAlias = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_input), WithJsonSchema(_INPUT)]
