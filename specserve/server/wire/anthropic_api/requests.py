"""The bodies of Anthropic's Messages API as they are sent, and its shape of errors.

request = read_translated(MessagesRequest, body, limits)
request.as_chat(limits)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from specserve.errors import InputError
from specserve.server.wire.errors import WireError
from specserve.server.wire.fields import Count, Limits, Name, Stops, Wire
from specserve.server.wire.openai.messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, names_beside, text_of
from specserve.server.wire.openai.sampling_fields import in_range
from specserve.server.wire.openai.structured import FlatFormat, as_chat_format
from specserve.server.wire.sentences import shown
from specserve.server.wire.translated import (
    ToolName,
    TranslatedRequest,
    Unsupported,
    combined,
    mapping,
    other_tools,
    refused,
    text_field,
    tool_call,
    well_formed_json,
)

# --- content blocks ---------------------------------------------------------------------------------------------------

_ROLES_OF = {  # who may send which block
    "text": ("user", "assistant", "system"),
    "tool_use": ("assistant",),
    "server_tool_use": ("assistant",),
    "mcp_tool_use": ("assistant",),
    "tool_result": ("user",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
}
_OTHERS_RESULT = "_tool_result"  # the end of the types of results that Anthropic's own tools have
_READ = {  # of a block, besides its type
    "text": ("text",),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "thinking": ("thinking",),
    "redacted_thinking": ("data",),
}
_READ_OF_CALLS = ("id", "name", "input")


def _blocks(value: Any, info: ValidationInfo) -> Any:
    """Text, or a list of content blocks: always chat messages afterwards, in the order of the blocks."""
    role = info.data.get("role", "user")
    if isinstance(value, str):
        return ({"role": role, "content": text_of(value)},)
    if not isinstance(value, list) or not (value or role == "assistant"):
        raise ValueError(f"is {shown(value)}; it must be text or a list of content blocks.")
    if len(value) > MAX_PARTS:
        raise ValueError(f"has {len(value)} blocks; it may have at most {MAX_PARTS}.")
    messages = [_block_message(mapping(block, "content blocks"), role) for block in value]
    return tuple(combined(messages or [{"role": role, "content": ""}], (role,)))


def _block_message(block: Mapping[str, Any], role: str) -> dict[str, Any]:
    """One block as a chat message. What of it nobody reads is named in it."""
    kind = block.get("type")
    is_others = isinstance(kind, str) and kind.endswith(_OTHERS_RESULT)
    allowed = ("assistant",) if is_others else _ROLES_OF.get(kind, ()) if isinstance(kind, str) else ()
    if role not in allowed:
        known = f"the blocks read here are {', '.join(_ROLES_OF)}"
        why = f"only {allowed[0]} messages have those" if allowed else known
        raise ValueError(f"holds a block of type {shown(kind)}; {why}.")
    read = _READ["tool_result"] if is_others else _READ.get(str(kind), _READ_OF_CALLS)
    return {**_message(block, str(kind), role), **names_beside(block, ("type", *read), "content")}


def _message(block: Mapping[str, Any], kind: str, role: str) -> dict[str, Any]:
    if kind == "text":
        return {"role": role, "content": text_of([block])}
    if kind == "thinking":
        reasoning = text_field(block, "thinking", "a thinking block")
        return {"role": role, "content": "", "reasoning_content": reasoning}
    if kind == "redacted_thinking":  # encrypted, for whoever wrote it
        return {"role": role, "content": "", "content.redacted_thinking": True}
    return _result(block) if kind.endswith("tool_result") else {"role": role, "tool_calls": [_call(block)]}


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise ValueError(f"holds a {block['type']} block whose input is {shown(arguments)}; it must be an object.")
    what = f"a {block['type']} block"
    return tool_call(text_field(block, "id", what), text_field(block, "name", what), well_formed_json(arguments))


def _text_if_any(content: Any) -> str:
    """Where Anthropic's clients may say nothing, as null or as no blocks."""
    return "" if content is None or content == [] else text_of(content)


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's message. `is_error` goes along for templates that read it. Results of Anthropic's own tools are JSON."""
    failed = {"is_error": True} if block.get("is_error") is True else {}
    name, content = text_field(block, "tool_use_id", f"a {block['type']} block"), block.get("content")
    if block["type"] != "tool_result" and not isinstance(content, str | None):
        content = json.dumps(well_formed_json(content), ensure_ascii=False)
    made = {"role": "tool", "tool_call_id": name, "content": _text_if_any(content), **failed}
    for part in content if isinstance(content, list) else ():
        made |= names_beside(part, ("type", "text"), "content.content")
    return made


_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK, "maxItems": MAX_PARTS}]}
_USE_BLOCK = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string"},
        "name": {"type": "string"},
        "input": {"type": "object"},
    },
    "required": ["type", "id", "name", "input"],
}
_RESULT_BLOCK = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": {"type": "string"},
        "content": {"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
    },
    "required": ["type", "tool_use_id"],
}
_THINKING_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}},
    "required": ["type", "thinking"],
}
_REDACTED_BLOCK = {"type": "object", "properties": {"type": {"const": "redacted_thinking"}}, "required": ["type"]}
_ANY_BLOCK = {"anyOf": [_TEXT_BLOCK, _USE_BLOCK, _RESULT_BLOCK, _THINKING_BLOCK, _REDACTED_BLOCK]}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _ANY_BLOCK, "maxItems": MAX_PARTS}]}


class AnthropicMessage(Wire):
    """One message; `content` is afterwards the chat messages it becomes, as each tool's result is one of its own."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_blocks), WithJsonSchema(_CONTENT)]


# --- tools ------------------------------------------------------------------------------------------------------------


class AnthropicTool(Wire):
    """A tool the client runs. Anthropic's own, which it or a client runs without a schema, have another `type`."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]

    def as_chat(self) -> dict[str, Any]:
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": well_formed_json(function)}


def _own_tools(value: Any) -> Any:
    """What pydantic would say of a tool of Anthropic's own does not say what to do."""
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in _KINDS_OF_TOOLS:
            raise ValueError(
                f"holds one of type {shown(kind)}, which this server does not have. Send tools that you run yourself: "
                '{"name", "description", "input_schema"}.'
            )
    return value


_KINDS_OF_TOOLS = (None, "custom")


class AnthropicToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    """With the type tool."""
    disable_parallel_tool_use: bool = False
    """At most one call in an answer."""

    def as_chat(self) -> Any:
        if self.type != "tool":
            return "required" if self.type == "any" else self.type
        if self.name is None:
            raise InputError("tool_choice.name is missing; the type tool needs one.", "tool_choice.name")
        return {"type": "function", "function": {"name": self.name}}


AnthropicTools: TypeAlias = Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS), BeforeValidator(_own_tools)]


# --- requests ---------------------------------------------------------------------------------------------------------


class OutputConfig(Wire):
    effort: Name | None = None
    """For chat templates that read reasoning_effort."""
    format: FlatFormat = None
    """Text, or JSON: any object, or what fits a schema."""


class CountTokensRequest(TranslatedRequest):
    """POST /v1/messages/count_tokens: a request without what only an answer needs."""

    own_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "messages.reasoning_content": "messages.content.thinking",
        "messages.tool_calls": "messages.content",
        "messages.tool_call_id": "messages.content.tool_use_id",
        "messages.is_error": "messages.content.is_error",
    }

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation, oldest message first. An assistant's message at the end is gone on with."""
    system: Annotated[str, BeforeValidator(_text_if_any), WithJsonSchema(_TEXTS)] = ""
    """What stands before the conversation."""
    tools: AnthropicTools = Field(default_factory=list)
    """Functions that the chat template tells the model of."""
    tool_choice: AnthropicToolChoice | None = None
    """Whether the model may call tools."""
    thinking: Unsupported = None
    output_config: OutputConfig | None = None
    """How the answer is written."""
    output_format: FlatFormat = None
    """The older name of output_config.format."""
    mcp_servers: Annotated[
        Unsupported,
        refused("names servers to be called from here. Leave it out, and send tools that you run yourself.", []),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _named_beside(cls, value: Any) -> Any:
        """Names are told of what is not read: of tools that Anthropic runs, and beside the texts of `system`."""
        if not isinstance(value, dict):
            return value
        tools, others = other_tools(value.get("tools"), _KINDS_OF_TOOLS)
        beside = {f"tools.{kind}": True for kind in others}
        blocks = value["system"] if isinstance(value.get("system"), list) else []
        for block in blocks[:MAX_PARTS]:
            beside |= names_beside(block, ("type", "text"), "system") if isinstance(block, Mapping) else {}
        return {**value, "tools": tools, **beside} if beside else value

    def ignored(self, limits: Limits) -> list[str]:
        """As TranslatedRequest; thinking too, which the model does as it likes."""
        thinks = self.thinking not in (None, {"type": "disabled"})
        return [*super().ignored(limits), *(["thinking"] if thinks else [])]

    def _chat_fields(self) -> dict[str, Any]:
        chosen = self.tool_choice
        return {
            **self._conversation(),
            "tools": [tool.as_chat() for tool in self.tools] or None,
            "tool_choice": chosen and chosen.as_chat(),
            "parallel_tool_calls": chosen and not chosen.disable_parallel_tool_use,
            "response_format": self._format(),
            "reasoning_effort": self.output_config and self.output_config.effort,
        }

    def _conversation(self) -> dict[str, Any]:
        """The messages. An answer goes on where the last of them, if it is an assistant's, has stopped; one that says
        nothing is none."""
        chat = combined(map(dict, self._turns()), ("user", "assistant"))
        if chat[-1]["role"] != "assistant":
            return {"messages": chat}
        if chat[-1].get("tool_calls"):
            raise InputError("messages ends with a tool_use block. Send its tool_result after it.", "messages")
        if not chat[-1].get("content"):
            beside = {"reasoning_content": "content.thinking"}
            unread = {beside.get(name, name): True for name in chat.pop() if "." in name or name in beside}
            return {"messages": [*chat[:-1], *({**message, **unread} for message in chat[-1:])]}
        return {"messages": chat, "add_generation_prompt": False, "continue_final_message": True}

    def _turns(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": self.system}
        for message in self.messages:
            yield from message.content

    def _format(self) -> Any:
        """The one that says more, where both names are used."""
        named = [self.output_format, self.output_config and self.output_config.format]
        formats = [found for found in map(as_chat_format, named) if found not in (None, _PLAIN)]
        if len(formats) > 1 and formats[0] != formats[1]:
            raise InputError(
                "output_format and output_config.format mean the same and differ. Send one.", "output_format"
            )
        return formats[0] if formats else None


_PLAIN = {"type": "text"}


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. `metadata` is accepted and not used."""

    unused = frozenset({"metadata"})

    max_tokens: Count
    """The longest answer, in tokens."""
    stop_sequences: Stops = ()
    """Texts that end an answer, which does not have them."""
    temperature: float | None = in_range("temperature")
    """0 is greedy: the most likely token, always."""
    top_p: float | None = in_range("top_p")
    """Draw from the fewest tokens that together have this probability."""
    top_k: int | None = in_range("top_k")
    """Draw from the k most likely tokens; 0 and -1 are all."""
    metadata: Any = None
    """Accepted and not used."""

    def _chat_fields(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        return {**super()._chat_fields(), **same, "stop": list(self.stop_sequences)}


# --- errors -----------------------------------------------------------------------------------------------------------

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: WireError, request_id: str) -> dict[str, Any]:
    """A failure in Anthropic's shape: the body, and the event when the stream has begun. `request_id` is what the
    header request-id says."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
