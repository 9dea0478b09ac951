"""The bodies of Ollama's API as they are sent: options apart, the answer streamed unless `stream` is false.

request = read_translated(OllamaChatRequest, body, limits)
request.as_wire(limits), request.is_empty
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema

from specserve.errors import InputError
from specserve.server.wire.errors import WireError
from specserve.server.wire.fields import MAX_COUNT, Limits, Logprobs, Name, Stops, Wire, limits_of, well_formed
from specserve.server.wire.openai.messages import MAX_MESSAGES, MAX_TOOLS, Tools
from specserve.server.wire.openai.requests import ChatCompletionRequest, CompletionRequest
from specserve.server.wire.openai.sampling_fields import in_range
from specserve.server.wire.sentences import shown
from specserve.server.wire.translated import (
    TranslatedRequest,
    Unsupported,
    WellFormed,
    WithoutBeams,
    refused,
    tool_call,
    well_formed_json,
)

MAX_INPUTS = 128  # texts of one request for embeddings

# --- options ----------------------------------------------------------------------------------------------------------


def _window(value: int, info: ValidationInfo) -> int:
    limit = limits_of(info).max_model_len
    if value > limit:
        raise ValueError(
            f"is {value} and the context of this server has {limit} tokens, prompt and answer together. Leave it out, "
            f"or send at most {limit}; --max-model-len sets it when the server starts."
        )
    return value


class OllamaOptions(WithoutBeams):
    """What Ollama keeps of a model's parameters, as far as it means something here."""

    temperature: float | None = in_range("temperature")
    """0 is greedy: the most likely token, always."""
    top_p: float | None = in_range("top_p")
    """Draw from the fewest tokens that together have this probability."""
    top_k: int | None = in_range("top_k")
    """Draw from the k most likely tokens; 0 and -1 are all."""
    min_p: float | None = in_range("min_p")
    """Draw from tokens at least this likely, as a share of the most likely one's probability."""
    seed: int | None = in_range("seed")
    """The same seed gives the same text; null draws one."""
    num_predict: int | None = Field(default=None, ge=-2, le=MAX_COUNT)
    """The longest answer, in tokens; null, 0, -1 and -2 are what the context leaves."""
    stop: Stops = ()
    """Texts that end an answer, which does not have them."""
    repeat_penalty: float | None = in_range("repetition_penalty")
    """Above 1: what was in the prompt or the answer becomes less likely, however far back."""
    presence_penalty: float | None = in_range("presence_penalty")
    """Taken once from the logit of each token in the answer."""
    frequency_penalty: float | None = in_range("frequency_penalty")
    """Taken from a token's logit for each time it is in the answer."""
    num_ctx: Annotated[int, Field(ge=1), AfterValidator(_window)] | None = Field(
        default=None, json_schema_extra={"x-limits": {"maximum": "max_model_len"}}
    )
    """The context that is needed, in tokens; the server's is as long for all requests."""

    def as_chat(self) -> dict[str, Any]:
        limit = self.num_predict if self.num_predict is not None and self.num_predict > 0 else None
        same = {name: getattr(self, name) for name in _SAME_NAME}
        return {**same, "max_tokens": limit, "repetition_penalty": self.repeat_penalty, "stop": list(self.stop)}


_SAME_NAME = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
_OPTIONS_OF = {  # chat's name: Ollama's
    **{name: f"options.{name}" for name in (*_SAME_NAME, "stop")},
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "chat_template_kwargs.enable_thinking": "think",
    "reasoning_effort": "think",
}


def _format(value: Any) -> Any:
    if value in ("", "json") or isinstance(value, Mapping):
        return value
    raise ValueError(f'is {shown(value)}; it must be "json" or a JSON Schema as an object.')


_FORMATS = {"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object", "description": "A JSON Schema."}]}
Format: TypeAlias = Annotated[Any, BeforeValidator(_format), WithJsonSchema(_FORMATS)]
_NO_IMAGES = refused("holds images, and this server reads text alone. Leave it out.", [])


class OllamaRequest(TranslatedRequest):
    """What /api/chat and /api/generate share. `keep_alive` means nothing here: the model stays loaded."""

    stream: bool = True
    """Send the answer as lines of JSON while it is generated."""
    options: OllamaOptions | None = None
    """Sampling and limits; others that Ollama has are ignored."""
    format: Format = None
    """What the answer must be: any JSON object, or what fits a JSON Schema."""
    think: bool | Name | None = None
    """Whether a model that reasons does so, or how much; for chat templates that read it."""
    keep_alive: float | Name | None = None
    """Accepted and ignored: the model stays loaded as long as the server runs."""
    logprobs: bool = False
    """Send the log-probability of each token."""
    top_logprobs: Logprobs | None = None
    """The k most likely tokens at each place as well; needs logprobs true."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is asked: such a request has Ollama load a model, or unload it."""

    @property
    def name(self) -> str | None:
        """The model's name as it is served: Ollama's clients put `:latest` behind a name without a tag."""
        return self.model and self.model.removesuffix(":latest")

    def ignored(self, limits: Limits) -> list[str]:
        """As TranslatedRequest; keep_alive too."""
        return [*super().ignored(limits), *(["keep_alive"] if self.keep_alive is not None else [])]

    def as_wire(self, limits: Limits) -> ChatCompletionRequest | CompletionRequest:
        """The same request as one of OpenAI's APIs has it, of an empty text where it is empty. Raises InputError naming
        this API's own field."""
        return self.as_chat(limits)

    def _chat_fields(self) -> dict[str, Any]:
        constraint: dict[str, Any] | None = None
        if self.format == "json":
            constraint = {"type": "json_object"}
        elif self.format not in (None, ""):
            constraint = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        scores = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return {**(self.options or OllamaOptions()).as_chat(), **scores, "response_format": constraint}

    def _thinking(self) -> dict[str, Any]:
        """For the chat template: a level where one is said, and whether to think at all."""
        if self.think is None or self.think == "":
            return {}
        level: dict[str, Any] = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {**level, "chat_template_kwargs": {"enable_thinking": self.think is not False}}


# --- chat -------------------------------------------------------------------------------------------------------------


class OllamaFunction(Wire):
    name: WellFormed
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Its place among the calls of one answer."""


class OllamaCall(Wire):
    """A call that an answer had. Ollama's older clients know no ids."""

    id: WellFormed | None = None
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaMessage(Wire):
    """One message; the results of calls are in the order of the calls, or name them."""

    role: Literal["system", "user", "assistant", "tool"]
    content: WellFormed = ""
    """Text."""
    thinking: WellFormed | None = None
    """What an assistant that reasons thought before."""
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    """What an assistant called."""
    tool_name: WellFormed | None = None
    """The function that this is the result of."""
    tool_call_id: WellFormed | None = None
    """The call that this is the result of."""
    images: Annotated[Unsupported, _NO_IMAGES] = None

    def names_beside(self) -> Iterator[str]:
        """What of its calls nobody reads."""
        for call in self.tool_calls:
            yield from (f"messages.tool_calls.{name}" for name in call.model_extra or {})
            yield from (f"messages.tool_calls.function.{name}" for name in call.function.model_extra or {})


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    own_names: ClassVar[Mapping[str, str]] = {
        **_OPTIONS_OF,
        "messages.reasoning_content": "messages.thinking",
        "messages.name": "messages.tool_name",
        "messages.tool_calls.id": "",  # most clients have sent none; they are made here, see `_with_ids`
        "messages.tool_call_id": "",
    }

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    """The conversation, oldest message first; without any nothing is generated."""
    tools: Tools = ()
    """Functions that the chat template tells the model of."""

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def ignored(self, limits: Limits) -> list[str]:
        beside = (name for message in self.messages for name in message.names_beside())
        return [*super().ignored(limits), *dict.fromkeys(beside)]

    def _chat_fields(self) -> dict[str, Any]:
        tools = [well_formed_json(tool) for tool in self.tools] or None
        messages = _with_ids(self.messages) or [{"role": "user", "content": ""}]
        return {**super()._chat_fields(), **self._thinking(), "messages": messages, "tools": tools}


def _with_ids(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Chat messages whose calls have ids, which some templates want. A result without one is that of the oldest call
    of its name, or of any name, that has none yet."""
    made: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # id and name of calls without a result
    num_calls = 0
    for message in messages:
        chat: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            chat["reasoning_content"] = message.thinking
        if message.tool_calls:
            chat["tool_calls"] = []
        for call in message.tool_calls:
            name, id = call.function.name, call.id or f"call{num_calls:05d}"  # Mistral's templates want 9 characters
            chat["tool_calls"].append(tool_call(id, name, well_formed_json(call.function.arguments)))
            waiting.append((id, name))
            num_calls += 1
        if message.role == "tool":
            chat |= _result(message, waiting)
        made.append(chat)
    return made


def _result(message: OllamaMessage, waiting: list[tuple[str, str]]) -> dict[str, Any]:
    """The fields that say whose result a message is; its call waits no more."""
    named = {} if message.tool_name is None else {"name": message.tool_name}
    fitting = [call for call in waiting if message.tool_call_id in (None, call[0])]
    fitting = [call for call in fitting if call[1] == message.tool_name] or fitting
    if fitting:
        waiting.remove(fitting[0])
    id = message.tool_call_id or (fitting[0][0] if fitting else None)
    return named if id is None else {**named, "tool_call_id": id}


# --- generate ---------------------------------------------------------------------------------------------------------


class GenerateRequest(OllamaRequest):
    """POST /api/generate: a question in the chat template, or with `raw` a text that is continued."""

    own_names: ClassVar[Mapping[str, str]] = {**_OPTIONS_OF, "messages": "prompt"}

    prompt: WellFormed = ""
    """The question; without one nothing is generated."""
    system: WellFormed = ""
    """What stands before the question."""
    raw: bool = False
    """Continue the prompt as it is, without a chat template."""
    suffix: Annotated[
        Unsupported,
        refused("is not supported: the model continues a prompt and does not fill a gap. Leave it out.", ""),
    ] = None
    template: Annotated[
        Unsupported,
        refused(
            "is not taken from requests: the server has one, its model's or that of --chat-template. Leave it out, or "
            "send the whole prompt with raw true.",
            "",
        ),
    ] = None
    context: Annotated[
        Unsupported,
        refused("is not taken: it is Ollama's old way to go on. Send the conversation to /api/chat.", []),
    ] = None
    images: Annotated[Unsupported, _NO_IMAGES] = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    def ignored(self, limits: Limits) -> list[str]:
        """As OllamaRequest; without a template nobody reads `think`."""
        unread = self.raw and self.think is not None
        return [*super().ignored(limits), *(["think"] if unread else [])]

    def without_template(self) -> GenerateRequest:
        """The same request to a model without a chat template, which continues texts alone."""
        if self.system:
            raise InputError("system has no place: this model has no chat template. Put it into the prompt.", "system")
        return self.model_copy(update={"raw": True})

    def as_wire(self, limits: Limits) -> ChatCompletionRequest | CompletionRequest:
        if self.raw and self.system:
            raise InputError("raw sends the prompt as it is, so there is no place for system. Send one of them.", "raw")
        if not self.raw or self.is_empty:
            return self.as_chat(limits)
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs true.", "top_logprobs")
        fields = {**super()._chat_fields(), "prompt": self.prompt}
        fields["max_tokens"] = fields["max_tokens"] or limits.max_model_len
        del fields["top_logprobs"]
        fields["logprobs"] = self.top_logprobs or 0 if self.logprobs else None
        return self._as(CompletionRequest, fields, limits)

    def _chat_fields(self) -> dict[str, Any]:
        said = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*said, {"role": "user", "content": self.prompt}]
        return {**super()._chat_fields(), **self._thinking(), "messages": messages}


def _inputs(value: Any) -> Any:
    """A text or a list of texts: always a tuple afterwards."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise ValueError(f"is {shown(value)}; it must be a text that is not empty, or a list of such.")
    if len(found) > MAX_INPUTS:
        raise ValueError(f"has {len(found)} texts; at most {MAX_INPUTS} fit in one request. Split it.")
    return tuple(map(well_formed, found))


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT}]}


class _Embedding(Wire):
    """What /api/embed and /api/embeddings share."""

    model: Name | None = None
    """The model's name in /api/tags; null is the one served."""
    options: dict[str, Any] | None = None
    """Accepted and not used."""
    keep_alive: float | Name | None = None
    """Accepted and not used: the model stays loaded as long as the server runs."""

    @property
    def name(self) -> str | None:
        """As OllamaRequest has it."""
        return self.model and self.model.removesuffix(":latest")


class EmbedRequest(_Embedding):
    """POST /api/embed. `input` is a tuple of texts."""

    input: Annotated[tuple[str, ...], PlainValidator(_inputs), WithJsonSchema(_TEXTS)]
    """A text, or a list of texts."""
    truncate: bool = True
    """Cut a text that is longer than the context; else it is an error."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Only so many of the first numbers, of length 1 again."""


class OldEmbedRequest(_Embedding):
    """POST /api/embeddings, the older way."""

    prompt: Annotated[WellFormed, Field(min_length=1)]
    """The text."""


class ShowRequest(Wire):
    """POST /api/show. Nothing of it is needed: there is one model."""

    model: Name | None = None
    """The model's name in /api/tags; null is the one served."""
    name: Name | None = None
    """Ollama's older name for `model`."""
    verbose: bool = False
    """Accepted and not used: all is told."""


def ollama_error(error: WireError) -> dict[str, str]:
    """A failure in Ollama's shape: the body, and the line when the stream has begun."""
    return {"error": error.message}
