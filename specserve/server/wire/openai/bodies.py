"""The JSON that the server sends, as types: every body and every event of a stream, field by field. A text below a
field is what /openapi.json says of that field."""

from __future__ import annotations

from typing import Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from specserve.server.wire.openai.explained import ExplainedStep

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
ErrorType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "server_error",
    "service_unavailable",
    "timeout_error",
]

_described = with_config(ConfigDict(use_attribute_docstrings=True))


# --- what every response has ------------------------------------------------------------------------------------------


@_described
class PromptTokensDetails(TypedDict):
    cached_tokens: int
    """Tokens whose KV the prefix cache had."""


@_described
class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int
    """Tokens of reasoning that was told apart, and those that mark it."""
    accepted_prediction_tokens: int
    """Tokens drafted from the request's `prediction` that the model agreed with."""
    rejected_prediction_tokens: int
    """Tokens drafted from the request's `prediction` that did not become output."""


@_described
class Usage(TypedDict):
    """Tokens of all prompts and completions of a call; a prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SourceDrafts(TypedDict):
    num_draft_tokens: int
    num_accepted_tokens: int


@_described
class SpeculativeDecoding(TypedDict):
    """How the drafts of a call fared. A step is a verify step, one without a draft too."""

    mean_acceptance_length: float
    """Tokens that a verify step emitted on average, the model's own one included: 1 without speculation."""
    draft_acceptance_rate: float
    """Accepted draft tokens, as a share of those drafted."""
    acceptance_histogram: list[int]
    """Entry j counts the steps that accepted j draft tokens, from 0 to num_spec_tokens."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """The longest draft that the engine makes."""
    by_source: dict[str, SourceDrafts]
    """Draft tokens by who proposed them: the name of a drafter, or jump_forward for what a grammar left no choice of.
    One that two drafters proposed counts for both."""


@_described
class Metrics(TypedDict):
    """Times over all completions of a call."""

    time_to_first_token_ms: float
    """From the request's arrival at the engine to its first token."""
    generation_time_ms: float
    """From the first token to the last."""
    queue_time_ms: float
    """From the request's arrival to its first step."""
    tokens_per_second: float | None
    """Over the tokens after each completion's first; null where there are none."""
    speculative_decoding: NotRequired[SpeculativeDecoding]
    """Left out by a server without a drafter."""


class Totals(TypedDict):
    """What a whole response ends with, and a stream's last chunk."""

    usage: Usage
    metrics: Metrics


# --- chat completions -------------------------------------------------------------------------------------------------


@_described
class TokenLogprob(TypedDict):
    token: str
    logprob: float
    """Natural log, under the model's own distribution; -9999 for what cannot be."""
    bytes: list[int]
    """The token's bytes, which may be a part of a character."""


@_described
class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]
    """The most likely tokens at this place, best first."""


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]
    refusal: None


@_described
class FunctionCall(TypedDict):
    name: str
    arguments: str
    """A JSON object as text."""


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


@_described
class FunctionCallDelta(TypedDict):
    name: NotRequired[str]
    """In a call's first delta alone."""
    arguments: str
    """The next part of a JSON object as text."""


@_described
class ToolCallDelta(TypedDict):
    """`id`, `type` and the function's name come with the first delta of an index."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


@_described
class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    """Null where the model called tools and said nothing else."""
    reasoning_content: NotRequired[str]
    """What a model that reasons thought before; left out where it thought nothing."""
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


@_described
class AnyChoice(TypedDict):
    token_ids: NotRequired[list[int]]
    """Sent with return_token_ids."""
    cumulative_logprob: NotRequired[float]
    """With use_beam_search, in a choice's last chunk: the sum of its tokens' log-probabilities."""
    score: NotRequired[float]
    """Beside it, what choices are sorted by: cumulative_logprob / length ** length_penalty."""


@_described
class ChatChoice(AnyChoice):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or the id in stop_token_ids that ended it; null for any other end."""


@_described
class ChatCompletion(TypedDict):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]
    """Sent with return_token_ids."""
    usage: Usage
    metrics: Metrics


@_described
class ChatDelta(TypedDict):
    """A choice's first delta has the role and an empty content; its last has nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    """The next part of what a model that reasons thinks before it answers."""
    tool_calls: NotRequired[list[ToolCallDelta]]


@_described
class ChatChunkChoice(AnyChoice):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    """Null until a choice's last chunk."""
    stop_reason: NotRequired[int | str | None]
    """In a choice's last chunk alone."""
    explained: NotRequired[ExplainedStep]
    """What the step did that these tokens came from, with speculative.explain."""


@_described
class ChatCompletionChunk(TypedDict):
    """One event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[ChatChunkChoice]
    """One, or none in the last chunk, which has the usage."""
    prompt_token_ids: NotRequired[list[int]]
    """In the first chunk, with return_token_ids."""
    usage: NotRequired[Usage | None]
    """With stream_options.include_usage: null until the last chunk."""
    metrics: NotRequired[Metrics]
    """Beside the usage."""


# --- completions ------------------------------------------------------------------------------------------------------


@_described
class TextLogprobs(TypedDict):
    """Four lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Natural log; null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens and the token itself, best first."""
    text_offset: list[int]
    """Where the token begins in the choice's text, in characters."""


@_described
class CompletionChoice(AnyChoice):
    index: int
    """Of several prompts: prompt p's completion i is choice p * n + i."""
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or the id in stop_token_ids that ended it; null for any other end."""
    prompt_token_ids: NotRequired[list[int]]
    """Sent with return_token_ids."""


@_described
class Completion(TypedDict):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: Metrics


@_described
class CompletionChunkChoice(AnyChoice):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    """Null until a choice's last chunk."""
    stop_reason: NotRequired[int | str | None]
    """In a choice's last chunk alone."""
    prompt_token_ids: NotRequired[list[int]]
    """In a choice's first chunk, with return_token_ids."""
    explained: NotRequired[ExplainedStep]
    """What the step did that these tokens came from, with speculative.explain."""


@_described
class CompletionChunk(TypedDict):
    """One event of a stream of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[CompletionChunkChoice]
    """One, or none in the last chunk, which has the usage."""
    usage: NotRequired[Usage | None]
    """With stream_options.include_usage: null until the last chunk."""
    metrics: NotRequired[Metrics]
    """Beside the usage."""


# --- models, tokens, the server ---------------------------------------------------------------------------------------


@_described
class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    """Seconds since 1970."""
    owned_by: str
    root: str
    parent: str | None
    """Of a LoRA adapter the model that it changes; its root is its folder."""
    max_model_len: int
    """Tokens of prompt and output together."""
    runs: str
    """How its steps are computed: natively, or through transformers; empty until it is loaded."""


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


@_described
class TokenizeReply(TypedDict):
    count: int
    max_model_len: int
    """Tokens of prompt and output together."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens' spelling; null without return_token_strs."""


@_described
class DetokenizeReply(TypedDict):
    prompt: str
    """The text that the tokens stand for."""


@_described
class TokenizerInfo(TypedDict):
    """What tokenizer_config.json states; null for what it does not."""

    tokenizer_class: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
    """Tokens of prompt and output together, on this server."""


class HealthReply(TypedDict):
    status: str


class VersionReply(TypedDict):
    version: str


@_described
class ErrorDetail(TypedDict):
    message: str
    """What was wrong, what is allowed and what to do."""
    type: ErrorType
    param: str | None
    """The field of the request that is wrong."""
    code: str | None


class ErrorBody(TypedDict):
    """Every failure. A stream that fails after its beginning ends with this as its last event."""

    error: ErrorDetail
