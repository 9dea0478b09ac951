"""The JSON that the server sends to clients of OpenAI's Responses API, as types like those of bodies.py."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from specserve.server.wire.openai.bodies import ChatTokenLogprob, ErrorType, Metrics

_described = with_config(ConfigDict(use_attribute_docstrings=True))

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
