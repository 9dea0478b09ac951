"""The JSON that the server sends to Ollama's clients, as types like those of OpenAI's bodies."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from specserve.server.wire.openai.bodies import ChatTokenLogprob, Metrics

_described = with_config(ConfigDict(use_attribute_docstrings=True))


@_described
class OllamaFunctionCall(TypedDict):
    index: int
    """Its place among the calls of the answer."""
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(TypedDict):
    id: str
    function: OllamaFunctionCall


@_described
class OllamaAnswer(TypedDict):
    """In a stream, what is new of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    """What a model that reasons thought before."""
    tool_calls: NotRequired[list[OllamaToolCall]]
    """Each as a whole, once it has ended."""


@_described
class OllamaTimes(TypedDict):
    """What a whole answer has, and a stream's last line."""

    done_reason: NotRequired[Literal["stop", "length", "load"]]
    """`load`: nothing was asked."""
    total_duration: NotRequired[int]
    """Nanoseconds from the request's arrival at the engine to the last token."""
    load_duration: NotRequired[int]
    """Always 0: the model was loaded when the server started."""
    prompt_eval_count: NotRequired[int]
    """Tokens of the prompt."""
    prompt_eval_duration: NotRequired[int]
    """Nanoseconds from the request's first step to its first token."""
    eval_count: NotRequired[int]
    """Tokens of the answer."""
    eval_duration: NotRequired[int]
    """Nanoseconds from the first token to the last, at least 1."""
    metrics: NotRequired[Metrics]
    """As in chat completions."""


@_described
class OllamaChatReply(OllamaTimes):
    """The answer of /api/chat, and each line of its stream."""

    model: str
    created_at: str
    done: bool
    """False in every line of a stream but its last."""
    message: OllamaAnswer
    logprobs: NotRequired[list[ChatTokenLogprob]]


@_described
class GenerateReply(OllamaTimes):
    """The answer of /api/generate, and each line of its stream."""

    model: str
    created_at: str
    done: bool
    """False in every line of a stream but its last."""
    response: str
    thinking: NotRequired[str]
    """What a model that reasons thought before."""
    logprobs: NotRequired[list[ChatTokenLogprob]]


@_described
class ModelDetails(TypedDict):
    parent_model: str
    """Always empty."""
    format: str
    """Of the weights: safetensors or gguf."""
    family: str
    """model_type of config.json."""
    families: list[str]
    parameter_size: str
    """Such as 134.5M; empty where the files do not tell."""
    quantization_level: str
    """How the server holds the weights; empty while the engine loads."""


@_described
class TagModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of the model's files."""
    digest: str
    """Changes with the names, sizes and times of the files."""
    details: ModelDetails


class TagsReply(TypedDict):
    models: list[TagModel]


@_described
class RunningModel(TypedDict):
    name: str
    model: str
    size: int
    """Bytes of the model's files."""
    digest: str
    details: ModelDetails
    expires_at: str
    """The last moment that there is: the model stays loaded."""
    size_vram: int
    """As `size` where the model is on a GPU, else 0."""
    context_length: int


class PsReply(TypedDict):
    models: list[RunningModel]


@_described
class ShowReply(TypedDict):
    modelfile: str
    """A comment: models are not made of such files here."""
    parameters: str
    """Sampling values of requests that say none, a line each."""
    template: str
    """The chat template, in Jinja; empty where the model has none."""
    details: ModelDetails
    model_info: dict[str, Any]
    """general.architecture, general.parameter_count where it is known, and ARCHITECTURE.context_length."""
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str


@_described
class EmbedReply(TypedDict):
    model: str
    embeddings: list[list[float]]
    """One of each text."""
    prompt_eval_count: int
    """Tokens of all texts."""


class OldEmbedReply(TypedDict):
    embedding: list[float]


@_described
class OllamaVersion(TypedDict):
    version: str
    """The version of Ollama whose requests are understood: clients compare it with what they need."""
    specserve: str
    """The version of this server."""


@_described
class OllamaError(TypedDict):
    """Every failure of Ollama's endpoints. A stream that fails after its beginning ends with this."""

    error: str
    """What was wrong, what is allowed and what to do."""
