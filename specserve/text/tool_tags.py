"""How calls of tools are written that must be right: as a structural tag, from which a grammar is made.

A tag says where a call begins and ends and which schema its arguments fit:
    {"type": "tag", "begin": '<tool_call>\\n{"name": "add", "arguments": ', "content": {...}, "end": "}\\n</tool_call>"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

_NOTHING: Json = {"type": "object", "properties": {}, "additionalProperties": False}  # a tool without parameters
_CLOSE = "</parameter>"


@dataclass(frozen=True, slots=True)
class CallStyle:
    """`before` a call's name, `between` the name and the arguments, and `after` the arguments. What stands `around` all
    calls of an answer, and the `separator` of two; None where an answer has one call at most. Text that goes on from
    `trigger` is a call. `has_tags`: arguments are no JSON but a text in tags for each."""

    before: str
    between: str
    after: str
    trigger: str
    separator: str | None = None
    around: tuple[str, str] = ("", "")
    has_tags: bool = False

    def call(self, tool: Mapping[str, Any], strict: bool = True) -> Json:
        """One call of a tool. Without `strict` its arguments are any object. Raises ValueError for parameters that this
        way of writing has no exact form for."""
        function = tool["function"]
        schema = _parameters(function) if strict else {"type": "object"}
        content = _tagged(schema) if self.has_tags else {"type": "json_schema", "json_schema": schema}
        begin = f"{self.before}{function['name']}{self.between}"
        return {"type": "tag", "begin": begin, "content": content, "end": self.after}

    def written(self, name: str, arguments: Any) -> str:
        """A call that was made, whatever its arguments are."""
        if self.has_tags and isinstance(arguments, Mapping):
            texts = {key: v if isinstance(v, str) else _json(v) for key, v in arguments.items()}
            text = "".join(f"<parameter={key}>\n{v}\n{_CLOSE}\n" for key, v in texts.items())
        else:
            text = arguments if isinstance(arguments, str) else _json(arguments)
        return f"{self.before}{name}{self.between}{text}{self.after}"

    def calls(self, tools: Sequence[Mapping[str, Any]], parallel: bool, must: bool = True) -> Json:
        """An answer that is one call or, with `parallel`, several. They are exact where they `must` be made, and where
        a tool says `strict`."""
        tags = [self.call(tool, must or is_strict(tool)) for tool in tools]
        made: Json = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator or "",
            "at_least_one": True,
            "stop_after_first": self.separator is None or not parallel,
        }
        return _sequence(*self.around, made)

    def text_with_calls(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> Json:
        """An answer that is free text, and calls that are exact for the tools that say `strict`."""
        before, after = self.around
        calls = [self.call(tool, is_strict(tool)) for tool in tools]
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": [{**call, "begin": before + call["begin"], "end": call["end"] + after} for call in calls],
            "at_least_one": False,
            "stop_after_first": bool(before) or self.separator is None or not parallel,
        }


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether a client asks for calls of this tool that fit its schema, though it may be called or not."""
    return tool["function"].get("strict") is True


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _sequence(before: str, after: str, made: Json) -> Json:
    ends = [{"type": "const_string", "value": text} for text in (before, after) if text]
    return {"type": "sequence", "elements": [ends[0], made, ends[1]]} if ends else made


def _parameters(function: Mapping[str, Any]) -> Json:
    """Arguments are an object, whether the schema says so or not."""
    stated = function.get("parameters")
    if stated is None:
        return _NOTHING
    if not isinstance(stated, Mapping):
        raise ValueError(f"the parameters of {function['name']} are no JSON Schema of an object")
    return {"type": "object", **stated}


# --- arguments in tags ------------------------------------------------------------------------------------------------


def _tagged(schema: Json) -> Json:
    """Arguments in the order of the schema, each in a tag of its own, those not required perhaps."""
    required = set(schema.get("required", ()))
    plain = {"type", "properties", "required", "additionalProperties", "description", "title", "$defs", "definitions"}
    if unknown := sorted(set(schema) - plain):
        raise ValueError(f"this model writes arguments in tags, for which {unknown[0]!r} has no exact form")
    definitions: Json = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    elements = []
    for name, value in schema.get("properties", {}).items():
        tag = _parameter(name, value, definitions)
        elements.append(tag if name in required else {"type": "or", "elements": [tag, _const("")]})
    return {"type": "sequence", "elements": elements or [_const("")]}


def _parameter(name: str, schema: Any, definitions: Json) -> Json:
    if any(character in name for character in "<>\n"):
        raise ValueError(f"this model writes arguments in tags, in which {name!r} cannot stand")
    return {
        "type": "tag",
        "begin": f"<parameter={name}>\n",
        "content": _value(schema, definitions),
        "end": f"\n{_CLOSE}\n",
    }


def _value(schema: Any, definitions: Json) -> Json:
    """Texts stand as they are, everything else as JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return {"type": "or", "elements": [_const(choice) for choice in choices]}
    if kind == "string":
        if extra := sorted(set(schema) - {"type", "description", "title", "default", "examples"}):
            raise ValueError(f"this model writes texts as they are, for which {extra[0]!r} has no exact form")
        return {"type": "any_text", "excludes": [_CLOSE]}
    if not isinstance(kind, str):
        raise ValueError("this model writes texts as they are and all else as JSON, so each argument needs one type")
    return {"type": "json_schema", "json_schema": {**schema, **definitions}}


def _const(text: str) -> Json:
    return {"type": "const_string", "value": text}


# --- ways of writing --------------------------------------------------------------------------------------------------

# JSON between tags: Hermes and its kin, and whoever has no way of its own
HERMES = CallStyle('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>", "\n")
QWEN_TAGS = CallStyle("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "<tool_call>", "\n", has_tags=True)
LLAMA = CallStyle('{"name": "', '", "parameters": ', "}", '{"name": "')
MISTRAL_NAMED = CallStyle("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", "")
MISTRAL_LIST = CallStyle('{"name": "', '", "arguments": ', "}", "[TOOL_CALLS]", ", ", ("[TOOL_CALLS][", "]"))


def style_of(template: Mapping[str, Any]) -> CallStyle | None:
    """Of a response_template that a model brings along; None for one that writes no JSON between two texts."""
    field = template["fields"]["tool_calls"]
    begin, end = field.get("open"), field.get("close")
    if field.get("content") != "json" or not isinstance(begin, str) or not isinstance(end, str):
        return None
    return replace(HERMES, before=f'{begin}\n{{"name": "', after=f"}}\n{end}", trigger=begin)
