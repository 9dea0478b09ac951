"""The body of OpenAI's Responses API as it is sent to a server that keeps nothing.

request = read_translated(ResponsesRequest, body, limits)
request.as_chat(limits)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from specserve.errors import InputError
from specserve.server.wire.fields import Count, Limits, Logprobs, Name, Wire
from specserve.server.wire.openai.items import Input
from specserve.server.wire.openai.messages import MAX_TOOLS
from specserve.server.wire.openai.sampling_fields import in_range
from specserve.server.wire.openai.structured import FlatFormat, as_chat_format
from specserve.server.wire.sentences import shown
from specserve.server.wire.translated import (
    ToolName,
    TranslatedRequest,
    Unsupported,
    WellFormed,
    other_tools,
    refused,
    well_formed_json,
)
from specserve.types import SamplingParams

LOGPROBS = "message.output_text.logprobs"  # in `include`

_DEFAULTS = SamplingParams()


# --- tools ------------------------------------------------------------------------------------------------------------


class FunctionTool(Wire):
    """A tool the client runs."""

    type: Literal["function"]
    name: ToolName
    description: WellFormed | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(well_formed_json)] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        names = ("name", "description", "parameters", "strict")
        return {"type": "function", "function": {n: v for n in names if (v := getattr(self, n)) is not None}}

    def echo(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", **function, "strict": self.strict}


_KINDS_OF_TOOLS = ("function",)


def _functions(value: Any) -> Any:
    """What pydantic would say of a tool that OpenAI runs does not say what to do."""
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type") if isinstance(tool, Mapping) else "function"
        if kind not in _KINDS_OF_TOOLS:
            raise ValueError(
                f"holds one of type {shown(kind)}, which this server does not run. Send functions that you run "
                'yourself: {"type": "function", "name", "parameters"}.'
            )
    return value


class NamedFunction(Wire):
    type: Literal["function"]
    name: ToolName

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name}}

    def echo(self) -> dict[str, Any]:
        return {"type": "function", "name": self.name}


class AllowedFunctions(Wire):
    """Some of the tools; those that others run are no part of it."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[
        list[NamedFunction],
        Field(min_length=1, max_length=MAX_TOOLS),
        BeforeValidator(lambda value: other_tools(value, _KINDS_OF_TOOLS)[0]),
    ]

    def as_chat(self) -> dict[str, Any]:
        allowed = {"mode": self.mode, "tools": [tool.as_chat() for tool in self.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}

    def echo(self) -> dict[str, Any]:
        return {"type": "allowed_tools", "mode": self.mode, "tools": [tool.echo() for tool in self.tools]}


def _choice(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, Mapping) else value
    if value in ("none", "auto", "required") or (kind == "function" and isinstance(value.get("name"), str)):
        return value
    if kind == "allowed_tools" and isinstance(value.get("tools"), list) and value["tools"]:
        return value
    raise ValueError(
        f'is {shown(kind)}; it must be "none", "auto", "required", {{"type": "function", "name": ...}} or '
        '{"type": "allowed_tools", "mode", "tools"}.'
    )


Functions: TypeAlias = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), BeforeValidator(_functions)]
ToolChoice: TypeAlias = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions, BeforeValidator(_choice)
]

# --- the request ------------------------------------------------------------------------------------------------------


class TextConfig(Wire):
    format: Annotated[FlatFormat, AfterValidator(well_formed_json)] = None
    """Text, or JSON: any object, or what fits a schema."""

    def as_chat(self) -> Any:
        return as_chat_format(self.format)


class Reasoning(Wire):
    effort: Name | None = None
    """For chat templates that read reasoning_effort."""


Metadata: TypeAlias = Annotated[dict[str, str], Field(max_length=16), AfterValidator(well_formed_json)]
Include: TypeAlias = Annotated[list[Name], Field(max_length=64)]


class ResponsesRequest(TranslatedRequest):
    """POST /v1/responses. Nothing is kept: `store` is accepted and the response says false. `user` is accepted and not
    used; `metadata` comes back in the response."""

    unused = frozenset({"user", "store"})
    own_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "messages.item": "input",
        "messages.tool_calls.id": "input.call_id",
        "messages.tool_call_id": "input.call_id",
        "messages.reasoning_content": "input.reasoning",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: Input
    """Text, or a conversation as a list of items, oldest first."""
    instructions: WellFormed | None = None
    """What stands before the conversation."""
    max_output_tokens: Count | None = None
    """The longest answer, in tokens; null is what the context leaves."""
    temperature: float | None = in_range("temperature")
    """0 is greedy: the most likely token, always."""
    top_p: float | None = in_range("top_p")
    """Draw from the fewest tokens that together have this probability."""
    top_logprobs: Logprobs = 0
    """The k most likely tokens at each place; needs the log-probabilities to be included."""
    include: Include = Field(default_factory=list)
    """"message.output_text.logprobs" sends the log-probability of each token; other names are ignored."""
    tools: Functions = Field(default_factory=list)
    """Functions that the chat template tells the model of."""
    tool_choice: ToolChoice = "auto"
    """Whether the model may call tools."""
    parallel_tool_calls: bool = True
    """Whether the model may call several tools in one answer."""
    text: TextConfig | None = None
    """How the answer is written."""
    reasoning: Reasoning | None = None
    """How much the model thinks."""
    metadata: Metadata = Field(default_factory=dict)
    """Comes back in the response."""
    user: Any = None
    """Accepted and not used."""
    store: Any = None
    """Accepted and not used: nothing is kept."""
    previous_response_id: Annotated[
        Unsupported, refused("names a response, and this server keeps none. Send the whole conversation as input.")
    ] = None
    conversation: Annotated[
        Unsupported, refused("names a conversation, and this server keeps none. Send all of it as input.")
    ] = None
    prompt: Annotated[
        Unsupported, refused("names a template that OpenAI keeps. Send its text as instructions and input.")
    ] = None
    background: Annotated[
        Unsupported, refused("asks for an answer to be fetched later, and none are kept. Send false.", False)
    ] = None
    truncation: Annotated[
        Unsupported, refused('asks to drop what does not fit. Send "disabled" and shorten the input.', "disabled")
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _named_beside(cls, value: Any) -> Any:
        """Tools that a server would have to run are left out, and the client is told so."""
        if not isinstance(value, dict):
            return value
        tools, others = other_tools(value.get("tools"), _KINDS_OF_TOOLS)
        return {**value, "tools": tools, **{f"tools.{kind}": True for kind in others}} if others else value

    def ignored(self, limits: Limits) -> list[str]:
        """As TranslatedRequest; what should be included and is never there, too."""
        return [*super().ignored(limits), *(f"include.{name}" for name in self.include if name != LOGPROBS)]

    def echo(self) -> dict[str, Any]:
        """What the response says of its request, with the defaults that were used."""
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": _DEFAULTS.temperature if self.temperature is None else self.temperature,
            "top_p": _DEFAULTS.top_p if self.top_p is None else self.top_p,
            "top_logprobs": self.top_logprobs,
            "tools": [tool.echo() for tool in self.tools],
            "tool_choice": choice.echo() if isinstance(choice, NamedFunction | AllowedFunctions) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "metadata": self.metadata,
            "previous_response_id": None,
            "background": False,
            "truncation": "disabled",
            "store": False,
        }

    def _chat_fields(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return {
            "messages": [*system, *self.input],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            **self._chat_logprobs(),
            **self._chat_tools(),
            "response_format": self.text and self.text.as_chat(),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
        }

    def _chat_logprobs(self) -> dict[str, Any]:
        if LOGPROBS not in self.include:
            if self.top_logprobs:
                raise InputError(f'top_logprobs needs include ["{LOGPROBS}"].', "top_logprobs")
            return {}
        if self.tools and self.tool_choice != "none":
            raise InputError(
                f"include asks for {LOGPROBS}, which an answer that may call tools does not have. Leave it out, or "
                'send tool_choice "none".',
                "include",
            )
        return {"logprobs": True, "top_logprobs": self.top_logprobs}

    def _chat_tools(self) -> dict[str, Any]:
        if not self.tools and self.tool_choice == "auto":
            return {}
        choice = self.tool_choice
        return {
            "tools": [tool.as_chat() for tool in self.tools] or None,
            "tool_choice": choice.as_chat() if isinstance(choice, NamedFunction | AllowedFunctions) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
