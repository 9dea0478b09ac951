"""A conversation as OpenAI's clients send it, and as a chat template reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from specserve.errors import InputError
from specserve.server.wire.fields import Wire, well_formed
from specserve.server.wire.json.text import json_object
from specserve.server.wire.sentences import shown

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000  # of one message
MAX_TOOLS = 128  # a request's tools, and a message's tool calls

_PARTS_OF_TEXT = ("text", "refusal")  # types, and the fields that have the text
_NAME_IN_JSON = re.compile(r'"(?:[^"\\]++|\\.)*+"\s*+:')
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
    if kind not in _PARTS_OF_TEXT:
        what = f"a part of type {shown(kind)}" if isinstance(part, Mapping) else shown(part)
        raise ValueError(f'holds {what}; this model reads text alone: {{"type": "text", "text": ...}}.')
    if not isinstance(part.get(kind), str):
        raise ValueError(f"holds a {kind} part whose {kind} is {shown(part.get(kind))}; it must be text.")
    return well_formed(part[kind])


def _content(value: Any, info: ValidationInfo) -> Any:
    """None, not sent, and no parts are no text of an assistant, who may have called tools or reasoned, and an error
    everywhere else."""
    is_answer = info.data.get("role") == "assistant"
    if value is not None and not (is_answer and value == []):
        return text_of(value)
    if is_answer:
        return ""
    raise ValueError("is missing or null; only an assistant's message may be without text.")


def _tool_calls(value: Any) -> Any:
    """Calls whose arguments are objects afterwards: templates print objects, and OpenAI sends JSON text."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise ValueError(f"is {shown(value)}; it must be a list of at most {MAX_TOOLS} calls.")
    return tuple(_tool_call(call) for call in value)


def _tool_call(call: Any) -> dict[str, Any]:
    """A custom tool's call is a function's whose arguments are any text."""
    kind = call.get("type") if isinstance(call, Mapping) else None
    function = call.get("custom" if kind == "custom" else "function") if isinstance(call, Mapping) else None
    if kind not in (None, "function", "custom") or not isinstance(function, Mapping):
        raise ValueError('holds a call without a function; send {"id", "type": "function", "function": {"name", ...}}.')
    if not isinstance(function.get("name"), str):
        raise ValueError(f"holds a call whose name is {shown(function.get('name'))}; it must be text.")
    text = "input" if kind == "custom" else "arguments"
    named = {name: v for name, v in function.items() if name != text}
    others = {name: v for name, v in call.items() if name != "custom"}
    return {**others, "type": "function", "function": {**named, "arguments": _arguments(function.get(text))}}


def _arguments(value: Any) -> Any:
    """An object where they are one; else text, whatever it is: models write what they like, and an answer may be cut
    off in the midst of it."""
    if value is None or value == "":
        return {}
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        read = json_object(value.encode("utf-8", "surrogatepass"), "Its text")
    except InputError:
        return well_formed(value)
    return read if _num_names(read) == sum(1 for _ in _NAME_IN_JSON.finditer(value)) else well_formed(value)


def _num_names(value: Any) -> int:
    """Names of a JSON value. A text that repeats one has more."""
    if isinstance(value, Mapping):
        return len(value) + sum(map(_num_names, value.values()))
    return sum(map(_num_names, value)) if isinstance(value, list) else 0


def names_beside(value: Mapping[str, Any], known: Collection[Any], where: str) -> dict[str, Any]:
    """Fields of an object that nobody reads, as fields of a message of which the client is told: `where` and a dot
    before a name keep it from the chat template. What is empty says nothing."""
    return {f"{where}.{name}": True for name, v in value.items() if name not in known and v not in (None, "", [], {})}


def _no_content() -> Any:
    """Stands for a content that was not sent until `_content` has judged it."""
    return None


_PART = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, kind: {"type": "string"}},
            "required": ["type", kind],
        }
        for kind in _PARTS_OF_TEXT
    ]
}
_PARTS: dict[str, Any] = {"type": "array", "items": _PART, "maxItems": MAX_PARTS}
_TEXT = {"anyOf": [{"type": "string"}, {**_PARTS, "minItems": 1}]}
TEXT = WithJsonSchema(_TEXT)
_SAID = WithJsonSchema({"anyOf": [{"type": "string"}, _PARTS]})  # of no parts only where no text is needed


_CUSTOM = {"type": "object", "properties": {"name": {"type": "string"}, "input": {}}, "required": ["name"]}
_CUSTOM_CALL = {
    "type": "object",
    "properties": {"type": {"const": "custom"}, "custom": _CUSTOM},
    "required": ["type", "custom"],
}


def _functions(function: dict[str, Any], kind: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a list of tools or of calls, each with a `type` of this kind and a function that has a name, or
    one of the others."""
    named = {"type": "object", "properties": {"name": {"type": "string"}, **function}, "required": ["name"]}
    properties = {"type": kind, "function": named}
    item = {"type": "object", "properties": properties, "required": ["function"]}
    return {"type": "array", "items": {"anyOf": [item, *others]} if others else item, "maxItems": MAX_TOOLS}


_ARGUMENTS = {"description": "A JSON object, as text or as it is. Any other text goes into the prompt as it is."}
_CALLS = WithJsonSchema(_functions({"arguments": _ARGUMENTS}, {"enum": ["function", None]}, _CUSTOM_CALL))
_SAYS = {"required": ["content"], "properties": {"content": _TEXT}}
_ANSWERS = {"properties": {"role": {"const": "assistant"}}}
_SAYS_OR_ANSWERS: dict[str, Any] = {"anyOf": [_SAYS, _ANSWERS]}
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


_NO_CONTENT = Field(default_factory=_no_content, validate_default=True)


class Message(Wire):
    """One message. Fields with other names, such as reasoning_content or name, are kept for the template. What an
    answer has is taken back: a refusal is text, and the old function_call is one of tool_calls."""

    model_config = ConfigDict(json_schema_extra=_SAYS_OR_ANSWERS)
    keeps_unknown = True

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    tool_calls: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_tool_calls), _CALLS] = ()
    """What an assistant called."""
    content: Annotated[str, BeforeValidator(_content), _SAID] = _NO_CONTENT
    """Text, or a list of text parts. Only an assistant's message may be without."""

    @model_validator(mode="before")
    @classmethod
    def _taken_back(cls, value: Any) -> Any:
        return _taken_back(value) if isinstance(value, dict) else value

    def for_template(self) -> dict[str, Any]:
        """What a chat template reads. It knows the older name of a role, and many leave out one they do not know."""
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        role = _OLDER_ROLES.get(self.role, self.role)
        return {**(self.model_extra or {}), "role": role, "content": self.content, **calls}


_OLDER_ROLES = {"developer": "system", "function": "tool"}


def _taken_back(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it was answered, in the fields of one that is sent."""
    made = dict(message)
    if made.get("role") == "assistant":
        refusal, content = made.get("refusal"), made.get("content")
        if isinstance(refusal, str) and refusal and isinstance(content, str | list | None):
            parts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
            made |= {"content": [*parts, {"type": "refusal", "refusal": refusal}], "refusal": None}
        if made.get("function_call") is not None and not made.get("tool_calls"):
            made |= {"tool_calls": [{"type": "function", "function": made["function_call"]}], "function_call": None}
    parts = made["content"] if isinstance(made.get("content"), list) else []
    for part in parts[:MAX_PARTS]:
        if isinstance(part, Mapping) and len(part) > 2:
            made |= names_beside(part, ("type", part.get("type")), "content")
    return made


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
