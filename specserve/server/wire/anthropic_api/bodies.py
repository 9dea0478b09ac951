"""The JSON that the server sends to Anthropic's clients, as types like those of OpenAI's bodies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from specserve.server.wire.openai.bodies import Metrics

_described = with_config(ConfigDict(use_attribute_docstrings=True))


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


@_described
class ModelInfo(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    """As `id`."""
    created_at: str
    """When the server started."""
    lifecycle: Literal["active"]
    max_input_tokens: int
    """Tokens of the longest prompt that leaves room for one more."""
    max_tokens: int
    """Tokens of the longest answer to the shortest prompt."""


@_described
class ModelPage(TypedDict):
    """The models of /v1/models, where Anthropic's clients ask."""

    data: list[ModelInfo]
    has_more: bool
    """Whether there are more in the direction that was asked for."""
    first_id: str | None
    last_id: str | None


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
