"""The JSON that the server sends in other APIs' words, as types: Anthropic's messages and errors, OpenAI's responses.
Knows no values and no way to make them, as bodies.py."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from specserve.server.wire.bodies import ChatTokenLogprob, ErrorType, Metrics

_described = with_config(ConfigDict(use_attribute_docstrings=True))


# --- Anthropic --------------------------------------------------------------------------------------------------------


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str


@_described
class ThinkingBlock(TypedDict):
    """What a model that reasons thought before."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Nothing is made of it when the block comes back."""


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@_described
class ThinkingTokens(TypedDict):
    thinking_tokens: int
    """Tokens of thinking, and those that mark it."""


@_described
class MessageUsage(TypedDict):
    input_tokens: int
    """Of the prompt, those that the prefix cache did not have."""
    cache_creation_input_tokens: int
    """Always 0: nothing is counted apart for being put into the cache."""
    cache_read_input_tokens: int
    """Of the prompt, those that the prefix cache had."""
    output_tokens: int
    output_tokens_details: ThinkingTokens


@_described
class AnthropicReply(TypedDict):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ThinkingBlock | TextBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics


class CountTokensReply(TypedDict):
    input_tokens: int


class AnthropicErrorDetail(TypedDict):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "permission_error",
        "request_too_large",
        "rate_limit_error",
        "timeout_error",
        "overloaded_error",
        "api_error",
    ]
    message: str


@_described
class AnthropicError(TypedDict):
    """Every failure of Anthropic's endpoints. A stream that fails after its beginning ends with this."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
    """As in the header request-id."""


# --- OpenAI's responses -----------------------------------------------------------------------------------------------

Ended: TypeAlias = Literal["completed", "incomplete"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(TypedDict):
    type: Literal["message"]
    id: str
    status: Ended
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


@_described
class OutputReasoning(TypedDict):
    """What a model that reasons thought before."""

    type: Literal["reasoning"]
    id: str
    status: Ended
    summary: list[Any]
    """Always empty: nothing is summed up."""
    content: list[ReasoningText]
    encrypted_content: None


@_described
class OutputCall(TypedDict):
    type: Literal["function_call"]
    id: str
    status: Ended
    call_id: str
    name: str
    arguments: str
    """A JSON object as text."""


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


@_described
class OutputTokensDetails(TypedDict):
    reasoning_tokens: int
    """Tokens of reasoning, and those that mark it."""


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    code: Literal["invalid_prompt", "rate_limit_exceeded", "server_error"]
    message: str
    type: ErrorType
    param: str | None


@_described
class ResponseReply(TypedDict):
    """The answer of /v1/responses; the fields after metrics say the request's own, with the defaults that were used."""

    id: str
    object: Literal["response"]
    created_at: int
    """Seconds since 1970."""
    status: Ended
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    usage: ResponseUsage
    metrics: Metrics
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, str]
    previous_response_id: None
    background: Literal[False]
    truncation: Literal["disabled"]
    store: Literal[False]
