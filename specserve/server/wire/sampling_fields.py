"""What both completion endpoints take besides their prompt, and how it becomes SamplingParams. Knows neither prompts
nor messages."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, model_validator

from specserve.errors import InputError, unknown
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
from specserve.server.wire.unsupported import REFUSED
from specserve.types import SamplingParams

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
)


class StreamOptions(Wire):
    include_usage: bool = False


class Speculative(ClosedWire):
    """How this request is drafted. The text does not depend on it. `drafter` must be one the server has loaded, or
    "none"; `num_tokens` caps its drafts."""

    drafter: Name | None = None
    num_tokens: int | None = Field(None, ge=0, le=1024)
    enabled: bool | None = None

    @property
    def cap(self) -> int | None:
        """SamplingParams.num_speculative_tokens."""
        return 0 if self.enabled is False or self.drafter == "none" else self.num_tokens

    def check(self, drafters: frozenset[str]) -> None:
        """Raise InputError for a drafter that is not loaded, and for drafts where there is none."""
        if self.drafter is not None and self.drafter not in drafters | {"none"}:
            hint = unknown("drafter", self.drafter, drafters | {"none"})
            raise InputError(f"speculative.drafter is not loaded. {hint}", "speculative.drafter")
        if self.enabled and self.cap == 0:
            raise InputError("speculative has enabled true and asks for no drafts. Send one of them.", "speculative")
        if not drafters and (self.enabled or self.cap):
            raise InputError(
                "speculative asks for drafts and this server runs without a drafter. Leave it out, or start the "
                "server with --drafter.",
                "speculative",
            )


class SamplingFields(Wire):
    """The fields that chat completions and completions share. One that was validated is right: its SamplingParams can
    be made and fit the limits it was validated with. `user`, `metadata` and `store` are accepted and not used."""

    misplaced: ClassVar[dict[str, str]] = {}  # fields of another endpoint: {name: what to do}

    model: Name | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float | None = None  # None, here and below: SamplingParams' own default
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: AnyIds | None = None
    bad_words: Words | None = None
    max_tokens: Count | None = None
    min_tokens: int = Field(0, ge=0, le=MAX_COUNT)
    ignore_eos: bool = False
    stop: Stops = ()
    stop_token_ids: FewIds | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative: Speculative | None = None
    priority: int = Field(0, ge=-MAX_COUNT, le=MAX_COUNT)
    cache_salt: Label | None = Field(None, min_length=1)
    request_id: Label | None = Field(None, min_length=1)
    return_token_ids: bool = False
    user: Any = None
    metadata: Any = None
    store: Any = None

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

    @abstractmethod
    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InputError."""

    def _params(self, **own: Any) -> SamplingParams:
        same = {name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None}
        cap = self.speculative.cap if self.speculative else None
        return SamplingParams(**same, num_speculative_tokens=cap, **own)

    @model_validator(mode="after")
    def _right(self, info: ValidationInfo) -> SamplingFields:
        limits = limits_of(info)
        for name, instead in self.misplaced.items():
            if name in (self.model_extra or {}):
                raise InputError(f"{name} does not belong here. {instead}", name)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options needs stream true.", "stream_options")
        if self.speculative is not None:
            self.speculative.check(limits.drafters)
        self._check_amounts(limits)
        self.sampling_params()
        return self

    def _check_amounts(self, limits: Limits) -> None:
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
