"""What both completion endpoints take besides their prompt, and how it becomes SamplingParams."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from specserve.checkpoint.generation_config import missing
from specserve.errors import InputError, shown, unknown
from specserve.server.wire.fields import (
    MAX_COUNT,
    AnyIds,
    Biases,
    ClosedWire,
    Count,
    FewIds,
    Label,
    Limits,
    Name,
    Stops,
    Wire,
    Words,
    limits_of,
)
from specserve.server.wire.openai.structured import StructuredFields
from specserve.server.wire.openai.unsupported import REFUSED
from specserve.types import RANGES, SamplingParams

# Wire fields that SamplingParams has under the same name; null leaves its default.
_SAME_NAME = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "seed",
    "length_penalty",
    "early_stopping",
)


def in_range(name: str) -> Any:
    """A number that SamplingParams checks: null is the server's default, see `with_defaults`."""
    _, low, high = RANGES[name]
    return Field(None, json_schema_extra={"minimum": low, "maximum": high, "x-limits": {"default": f"default_{name}"}})


def defaults(limits: Limits) -> dict[str, Any]:
    """The values that the fields of `in_range` have by default, by their names in "x-limits"."""
    stated = {name: SamplingParams.__dataclass_fields__[name].default for name in RANGES} | dict(limits.sampling)
    return {f"default_{name}": value for name, value in stated.items()}


def with_defaults(kind: type[Wire], fields: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    """The fields of a request with the server's own defaults for those that it leaves out."""
    stated = {name: value for name, value in limits.sampling if name in kind.model_fields}
    return {**fields, **missing(fields, stated)}


def _early_stopping(value: Any) -> Any:
    if not isinstance(value, bool) and value != "never":
        raise ValueError(f"is {shown(value)}; it must be true, false or 'never'.")
    return value


EarlyStop: TypeAlias = Annotated[Any, PlainValidator(_early_stopping), WithJsonSchema({"enum": [True, False, "never"]})]


class StreamOptions(Wire):
    """How a stream is sent."""

    include_usage: bool = False
    """End with a chunk that has no choices and the whole call's `usage` and `metrics`."""


class Speculative(ClosedWire):
    """How this request is drafted. The text does not depend on it. `drafter` must be one the server has loaded, or
    "none"; `num_tokens` caps its drafts."""

    drafter: Name | None = Field(None, json_schema_extra={"x-limits": {"enum": "drafters"}})
    """Who drafts; null leaves it to the server, "none" turns drafting off."""
    num_tokens: int | None = Field(None, ge=0, le=1024)
    """The longest draft; 0 turns drafting off, null leaves it to the server."""
    enabled: bool | None = None
    """False turns drafting off; true asks for it."""
    explain: bool = False
    """Tell in each chunk of a stream, as `explained`, who drafted its tokens, what was rejected, what the step took."""

    @property
    def cap(self) -> int | None:
        """SamplingParams.num_speculative_tokens."""
        return 0 if self.enabled is False or self.drafter == "none" else self.num_tokens

    def check(self, limits: Limits) -> None:
        """Raise InputError for a drafter that is not loaded, and for drafts where there is none."""
        drafters = limits.drafters
        if self.drafter is not None and self.drafter not in drafters | {"none"}:
            hint = dict(limits.refused_drafters).get(self.drafter)
            hint = hint or unknown("drafter", self.drafter, drafters | {"none"})
            raise InputError(f"speculative.drafter is not loaded. {hint}", "speculative.drafter")
        if self.enabled and self.cap == 0:
            raise InputError("speculative has enabled true and asks for no drafts. Send one of them.", "speculative")
        if not drafters and (self.enabled or self.cap):
            raise InputError(
                "speculative asks for drafts and this server runs without a drafter. Leave it out, or start the "
                "server with --drafter.",
                "speculative",
            )


class SamplingFields(StructuredFields):
    """The fields that chat completions and completions share. One that was validated is right: its SamplingParams can
    be made and fit the limits it was validated with. `user`, `metadata` and `store` are accepted and not used."""

    unused = frozenset({"user", "metadata", "store"})

    model: Name | None = None
    """The model's name in /v1/models; null is the one served."""
    n: int = Field(1, ge=1, le=128, json_schema_extra={"x-limits": {"maximum": "max_completions"}})
    """Completions of each prompt. Prompts times n is limited as n is."""
    temperature: float | None = in_range("temperature")
    """0 is greedy: the most likely token, always."""
    top_k: int | None = in_range("top_k")
    """Draw from the k most likely tokens; 0 and -1 are all."""
    top_p: float | None = in_range("top_p")
    """Draw from the fewest tokens that together have this probability."""
    min_p: float | None = in_range("min_p")
    """Draw from tokens at least this likely, as a share of the most likely one's probability."""
    repetition_penalty: float | None = in_range("repetition_penalty")
    """Above 1: what was in the prompt or the output becomes less likely."""
    presence_penalty: float | None = in_range("presence_penalty")
    """Taken once from the logit of each token in the output."""
    frequency_penalty: float | None = in_range("frequency_penalty")
    """Taken from a token's logit for each time it is in the output."""
    logit_bias: Biases | None = None
    """Added to the logits of these tokens; keys are token ids as text."""
    allowed_token_ids: AnyIds | None = None
    """The only tokens that may be generated."""
    bad_words: Words | None = None
    """Texts that may not be generated."""
    max_tokens: Count | None = None
    """The longest completion, in tokens. Null is 16 for a completion, and for chat what the context leaves."""
    min_tokens: int = Field(
        0, ge=0, le=MAX_COUNT, json_schema_extra={"x-limits": {"exclusiveMaximum": "max_model_len"}}
    )
    """No end of the text before this many tokens; at most max_tokens."""
    ignore_eos: bool = False
    """Go on when the model ends the text."""
    stop: Stops = ()
    """Texts that end a completion, which does not have them."""
    stop_token_ids: FewIds | None = None
    """Tokens that end a completion."""
    include_stop_str_in_output: bool = False
    """Leave the stop text at the end of the completion."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    seed: int | None = in_range("seed")
    """The same seed gives the same text; null draws one."""
    use_beam_search: bool = False
    """Search for the `n` likeliest texts, best first; nothing is drawn. A stream has each whole, when all are known."""
    beam_width: int | None = Field(None, ge=1, le=32)
    """With use_beam_search: how many beams; null is n, and 1 is greedy."""
    length_penalty: float | None = Field(None, ge=-100, le=100)
    """With use_beam_search: texts rank by the sum of their log-probabilities / length ** length_penalty; null is 1."""
    early_stopping: EarlyStop | None = None
    """With use_beam_search: true ends at beam_width texts, false (null) where the best beam is no better than these,
    "never" where it could not become better."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Only with stream true."""
    speculative: Speculative | None = None
    """How this request is drafted; null leaves it to the server."""
    priority: int = Field(
        0,
        ge=-MAX_COUNT,
        le=MAX_COUNT,
        json_schema_extra={"x-limits": {"minimum": "min_priority", "maximum": "max_priority"}},
    )
    """Lower runs first, from -64 to 64; what is beyond counts as these. One step lets a request pass 16 completions
    that came before it. Only a server started with --scheduling-policy priority takes other values than 0."""
    cache_salt: Label | None = Field(None, min_length=1)
    """The prefix cache is shared among requests with the same salt alone. Printable text."""
    request_id: Label | None = Field(None, min_length=1)
    """The response's id. Printable text."""
    return_token_ids: bool = False
    """Send the ids of the prompt and the completion as well."""
    user: Any = None
    """Accepted and not used."""
    metadata: Any = None
    """Accepted and not used."""
    store: Any = None
    """Accepted and not used."""

    @property
    @abstractmethod
    def num_choices(self) -> int:
        """Completions that the response has."""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def salt(self) -> bytes:
        """Request.salt."""
        return (self.cache_salt or "").encode()

    def ignored(self, limits: Limits) -> list[str]:
        """Names in the request that mean nothing here, as sent."""
        nested = (self.stream_options and self.stream_options.model_extra) or {}
        unknown_names = (name for name in self.model_extra or {} if name not in REFUSED)
        return [*unknown_names, *(f"stream_options.{name}" for name in nested)]

    @cached_property
    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for."""
        return self._checked_params()

    @abstractmethod
    def _checked_params(self) -> SamplingParams:
        """As `sampling_params`, when all fields have been read. Raises InputError."""

    def _params(self, **own: Any) -> SamplingParams:
        same = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        cap = self.speculative.cap if self.speculative else None
        if self.use_beam_search:
            own["beam_width"] = self.beam_width or self.n
        return SamplingParams(**same, num_speculative_tokens=cap, structured=self.structured, **own)

    @model_validator(mode="after")
    def _right(self, info: ValidationInfo) -> SamplingFields:
        limits = limits_of(info)
        for name, instead in self.misplaced.items():
            if name in (self.model_extra or {}):
                raise InputError(f"{name} does not belong here. {instead}", name)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options needs stream true.", "stream_options")
        if self.speculative is not None:
            self.speculative.check(limits)
            if self.speculative.explain and not self.stream:
                raise InputError(
                    "speculative.explain needs stream true: it is told step by step.", "speculative.explain"
                )
        self._check_amounts(limits)
        self._check_beams(limits)
        _ = self.sampling_params  # which is made now, so that what is wrong with it is found
        return self

    def _check_beams(self, limits: Limits) -> None:
        if not self.use_beam_search and self.beam_width is not None:
            raise InputError("beam_width needs use_beam_search true.", "beam_width")
        width = self.beam_width or self.n
        if self.use_beam_search and (num_beams := self.num_choices // self.n * width) > limits.max_completions:
            raise InputError(
                f"This asks for {num_beams} beams, prompts times beam_width; at most {limits.max_completions} fit in "
                "one request. Split it.",
                "beam_width",
            )

    def _check_amounts(self, limits: Limits) -> None:
        if self.priority and not limits.max_priority:
            raise InputError(
                f"priority is {self.priority} and this server runs requests in the order in which they come. Leave it "
                "out, or start the server with --scheduling-policy priority.",
                "priority",
            )
        if self.num_choices > limits.max_completions:
            raise InputError(
                f"This asks for {self.num_choices} completions, prompts times n; at most {limits.max_completions} fit "
                "in one request. Split it.",
                "n",
            )
        if self.min_tokens >= limits.max_model_len:
            raise InputError(
                f"min_tokens is {self.min_tokens} and the context has {limits.max_model_len} tokens, prompt included. "
                "Send a smaller one.",
                "min_tokens",
            )
