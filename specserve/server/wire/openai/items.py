"""The input items of OpenAI's Responses API, and the chat messages they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, WithJsonSchema

from specserve.server.wire.fields import well_formed
from specserve.server.wire.openai.messages import MAX_MESSAGES, MAX_PARTS, names_beside
from specserve.server.wire.sentences import shown
from specserve.server.wire.translated import combined, mapping, text_field, tool_call, well_formed_json

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


def _beside_texts(content: Any, where: str) -> dict[str, Any]:
    """What parts have besides their texts; see names_beside."""
    beside: dict[str, Any] = {}
    for part in content if isinstance(content, list) else ():
        beside |= names_beside(part, ("type", _TEXTS.get(part["type"], "text")), where)
    return beside


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if item.get("role") not in _ROLES:
        raise ValueError(f"holds a message whose role is {shown(item.get('role'))}; it must be {', '.join(_ROLES)}.")
    return {"role": item["role"], "content": _text(content), **_beside_texts(content, "item.content")}


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    call_id, name, arguments = (text_field(item, field, "a call") for field in ("call_id", "name", "arguments"))
    return {"role": "assistant", "tool_calls": [tool_call(call_id, name, arguments)]}


def _call_output(item: Mapping[str, Any]) -> dict[str, Any]:
    call_id = text_field(item, "call_id", "a function_call_output")
    made = {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"))}
    return {**made, **_beside_texts(item.get("output"), "item.output")}


def _reasoning(item: Mapping[str, Any]) -> dict[str, Any]:
    """Reasoning that was written down; what another server has encrypted cannot be read here."""
    found = [texts for name in ("content", "summary") if (texts := item.get(name)) is not None]
    if not all(isinstance(texts, list) for texts in found):
        raise ValueError("holds a reasoning item whose content or summary is no list of texts.")
    parts = [part for texts in found for part in texts]
    texts = [text_field(mapping(part, "texts"), "text", "a part of a reasoning item") for part in parts]
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        made |= names_beside(part, ("type", "text"), "item.reasoning")
    return {**made, "reasoning_content": "\n".join(texts)} if texts else made


def _others_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool that another server ran, or of one that takes any text; what is known of it are arguments."""
    kind, name = str(item["type"]), item.get("name")
    fields = {n: v for n, v in item.items() if n not in _NO_ARGUMENTS and v is not None}
    texts = [v for v in fields.values() if isinstance(v, str)]
    is_text = texts and fields.keys() <= {"input"}
    arguments = texts[0] if is_text else json.dumps(well_formed_json(fields), ensure_ascii=False)
    call_id = item.get("call_id") or ""
    if not isinstance(call_id, str):
        raise ValueError(f"holds a {kind} whose id is {shown(call_id)}; it must be text.")
    name = name if isinstance(name, str) else kind.removesuffix(_CALL)
    return {"role": "assistant", "tool_calls": [tool_call(well_formed(call_id), well_formed(name), arguments)]}


def _others_output(item: Mapping[str, Any]) -> dict[str, Any]:
    """What such a call gave, as text or as JSON."""
    call_id = text_field(item, "call_id", f"a {item['type']}")
    output = item.get("output")
    text = output if isinstance(output, str) else json.dumps(well_formed_json(output), ensure_ascii=False)
    return {"role": "tool", "tool_call_id": call_id, "content": well_formed(text)}


_CALL, _OUTPUT = "_call", "_call_output"  # the ends of the types of such items
_NO_ARGUMENTS = ("type", "id", "call_id", "status", "name")

_ITEMS: dict[str, tuple[Callable[[Mapping[str, Any]], dict[str, Any]], tuple[str, ...]]] = {  # and what is read
    "message": (_message, ("role", "content")),
    "function_call": (_call, ("call_id", "name", "arguments")),
    "function_call_output": (_call_output, ("call_id", "output")),
    "reasoning": (_reasoning, ("content", "summary")),
}


def _input(value: Any) -> Any:
    """Text, or a list of items: always chat messages afterwards."""
    if isinstance(value, str):
        return ({"role": "user", "content": well_formed(value)},)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(f"is {shown(value)}; it must be text or a list of 1 to {MAX_MESSAGES} items.")
    return tuple(combined((_item_message(mapping(item, "items")) for item in value), ("assistant",)))


def _item_message(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = "message" if item.get("type") is None else item["type"]
    if kind == "item_reference":
        raise ValueError("holds an item_reference, and this server keeps no items. Send the item itself.")
    as_chat, read = _ITEMS.get(kind, (None, ())) if isinstance(kind, str) else (None, ())
    if as_chat is None and isinstance(kind, str) and kind.endswith(_OUTPUT):
        as_chat, read = _others_output, ("call_id", "output")
    elif as_chat is None and isinstance(kind, str) and kind.endswith(_CALL):
        as_chat, read = _others_call, tuple(name for name in item if name not in ("status", "id"))
    if as_chat is None:
        raise ValueError(f"holds an item of type {shown(kind)}; the items read here are {', '.join(_ITEMS)}.")
    return as_chat(item) | names_beside(item, ("type", *read), "item")


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
