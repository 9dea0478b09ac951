"""A conversation as OpenAI's clients send it, and as a chat template reads it. Knows roles, content parts and tool
calls; renders nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema

from specserve.errors import InputError
from specserve.server.wire.fields import Wire, well_formed
from specserve.server.wire.json_text import json_object
from specserve.server.wire.sentences import shown

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # of one message
MAX_TOOLS = 128  # a request's tools, and a message's tool calls

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def text_of(value: Any) -> str:
    """The text of a string, or of a list of text parts, joined by line ends as vLLM does.

    Raises ValueError for anything else, images and audio among them.
    """
    if isinstance(value, str):
        return well_formed(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"is {shown(value)}; it must be text or a list of text parts.")
    if len(value) > MAX_PARTS:
        raise ValueError(f"has {len(value)} parts; it may have at most {MAX_PARTS}.")
    return "\n".join(_text_of_part(part) for part in value)


def _text_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        what = f"a part of type {shown(kind)}" if isinstance(part, Mapping) else shown(part)
        raise ValueError(f'holds {what}; this model reads text alone: {{"type": "text", "text": ...}}.')
    if not isinstance(part.get("text"), str):
        raise ValueError(f"holds a text part whose text is {shown(part.get('text'))}; it must be text.")
    return well_formed(part["text"])


def _content(value: Any, info: ValidationInfo) -> Any:
    """None, not sent, stands for no text where an assistant called tools, and is an error everywhere else."""
    if value is not None:
        return text_of(value)
    if info.data.get("role") == "assistant" and info.data.get("tool_calls"):
        return ""
    raise ValueError("is missing or null; only an assistant's message with tool_calls may be without text.")


def _tool_calls(value: Any) -> Any:
    """Calls whose arguments are objects afterwards: templates print objects, and OpenAI sends JSON text."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"is {shown(value)}; it must be a list of at most {MAX_TOOLS} calls.")
    return tuple(_tool_call(call) for call in value)


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('holds a call without a function; send {"id", "type": "function", "function": {"name", ...}}.')
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"holds a call whose arguments are {shown(arguments)}; they must be a JSON object as text.")
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> dict[str, Any]:
    try:
        return json_object(arguments.encode("utf-8", "surrogatepass"), "Its text")
    except InputError as error:
        raise ValueError(f"holds a call whose arguments cannot be read. {error}") from error


def _no_content() -> Any:
    """Stands for a content that was not sent until `_content` has judged it."""
    return None


_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_PARTS = {"type": "array", "items": _PART, "minItems": 1, "maxItems": MAX_PARTS}
_TEXT = {"anyOf": [{"type": "string"}, _PARTS]}
TEXT = WithJsonSchema(_TEXT)


def _functions(function: dict[str, Any], kind: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a list of tools or of calls, each with a `type` of this kind and a function that has a name."""
    named = {"type": "object", "properties": {"name": {"type": "string"}, **function}, "required": ["name"]}
    properties = {"type": kind, "function": named}
    item = {"type": "object", "properties": properties, "required": ["function"]}
    return {"type": "array", "items": item, "maxItems": MAX_TOOLS}


_ARGUMENTS = {
    "anyOf": [{"type": "string", "contentMediaType": "application/json"}, {"type": "object"}, {"type": "null"}],
    "description": "A JSON object, as text or as it is.",
}
_CALLS = WithJsonSchema(_functions({"arguments": _ARGUMENTS}, {"examples": ["function"]}))
_SAYS = {"required": ["content"], "properties": {"content": _TEXT}}
_CALLING = {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}}
_SAYS_OR_CALLS: dict[str, Any] = {"anyOf": [_SAYS, {"required": ["tool_calls"], "properties": _CALLING}]}
_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "object"},
        "properties": {"type": "object", "additionalProperties": {"anyOf": [{"type": "object"}, {"type": "boolean"}]}},
        "required": {"type": "array", "items": {"type": "string"}},
    },
}
_PARAMETERS = {"anyOf": [_SCHEMA, {"type": "null"}], "examples": [{"type": "object", "properties": {}}]}
_TOOL = {"name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}, "parameters": _PARAMETERS}
_TOOLS = WithJsonSchema(_functions(_TOOL, {"const": "function"}))


class Message(Wire):
    """One message. Fields with other names, such as reasoning_content or name, are kept for the template."""

    model_config = ConfigDict(json_schema_extra=_SAYS_OR_CALLS)
    keeps_unknown = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_tool_calls), _CALLS] = ()
    """What an assistant called."""
    content: Annotated[str, BeforeValidator(_content), TEXT] = Field(default_factory=_no_content, validate_default=True)
    """Text, or a list of text parts. Only an assistant's message with tool_calls may be without."""

    def for_template(self) -> dict[str, Any]:
        """What a chat template reads. developer is OpenAI's newer name for system; templates know the older one, and
        many leave out a role they do not know."""
        role = "system" if self.role == "developer" else self.role
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {**(self.model_extra or {}), "role": role, "content": self.content, **calls}


def _bounded(value: Any) -> Any:
    if isinstance(value, list) and not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(f"has {len(value)} messages; a conversation has 1 to {MAX_MESSAGES}.")
    return value


def _tools(value: Any) -> Any:
    """Functions of different names, whose parameters are the schema of an object; always a tuple afterwards."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"is {shown(value)}; it must be a list of at most {MAX_TOOLS} tools.")
    names = [_tool_name(tool) for tool in value]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"holds {shown(repeated[0])} more than once; each tool needs a name of its own.")
    return tuple(value)


def _tool_name(tool: Any) -> str:
    is_function = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
    function = tool.get("function") if is_function else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ValueError('holds a tool without a name; send {"type": "function", "function": {"name", ...}}.')
    if not TOOL_NAME.fullmatch(name):
        raise ValueError(f"holds the name {shown(name)}; names are 1 to 128 letters, digits and any of _ - . : /")
    if problem := _wrong_parameters(function.get("parameters")):
        raise ValueError(f"holds {name}, whose parameters {problem}; they must be the JSON schema of an object.")
    return name


def _wrong_parameters(schema: Any) -> str | None:
    """What keeps `schema` from being that of an object; what is deeper the model alone reads."""
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        return f"are {shown(schema)}"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        return f"have the type {shown(schema['type'])}"
    if not isinstance(properties, Mapping) or not all(isinstance(each, Mapping | bool) for each in properties.values()):
        return "have properties that are no schemas"
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        return "have a required that is no list of names"
    return None


_LENGTH = Field(json_schema_extra={"minItems": 1, "maxItems": MAX_MESSAGES})
Messages: TypeAlias = Annotated[list[Message], BeforeValidator(_bounded), _LENGTH]
Tools: TypeAlias = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_tools), _TOOLS]


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """All messages as a chat template reads them."""
    return [message.for_template() for message in messages]
