"""The one configuration object of an engine: flat, frozen, checked once. Nobody below the engine receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specserve.errors import ConfigError, strict_fields, unknown

DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = ("auto", "none", "int8", "int4")
ISAS = ("auto", "avx512", "avx_vnni", "avx2", "portable")
VERIFICATIONS = ("coupled", "rejection", "block")
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_NUM_SPECULATIVE_TOKENS = 5
DEFAULT_MAX_NUMBER_DIGITS = 15  # any float has the value that so many say
DRAFT_MODEL = "draft_model"


@strict_fields("option", ConfigError)
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is told at start. Sizes are tokens, sequences or GiB as their names say.

    `drafter` is a file name in drafters/ or an entry point of the group `specserve.drafters`; "auto" is all files that
    state a PRIORITY, together; "none" is plain decoding, but for what grammars force, which is drafted unless a request
    itself names "none". With `adaptive` drafts are as long as pays by what steps take and drafts were worth, and there
    are none where nothing does; without it they are as long as they may be.
    `drafter_options` go to that drafter unread. `draft_model`, named as `model` is, is option "model" of the drafter
    "draft_model", which is the drafter then. A request may name another drafter for itself, which drafts
    `num_speculative_tokens` as well, or 5 where that is 0. `quantization="auto"` is int8 where native kernels serve the
    CPU and no dtype is asked for, else none. `isa` is the instruction set of the CPU kernels; "auto" is what the
    environment variable SPECSERVE_ISA names, or else the fastest. `threads=None` is what SPECSERVE_THREADS says, or as
    many as cores may be used. `kv_cache_gib=None` sizes the cache from free memory.
    `max_number_digits` is what a number in JSON gets at most, where its schema asks for no more.
    `max_step_ms` is what a step aims at that computes chunks of prompts while others decode; None: 2.5 times a step
    without them for each token that a sequence gets, and at most 6 ms more for each sequence.
    Raises ConfigError naming the field, what it was and what is allowed.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantization: str = "auto"
    device: str = "auto"
    isa: str = "auto"
    threads: int | None = None
    drafter: str = "auto"
    num_speculative_tokens: int = DEFAULT_NUM_SPECULATIVE_TOKENS
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    draft_model: str | None = None
    drafter_timeout_s: float = 2.0
    adaptive: bool = True
    verification: str = "coupled"
    grammar_backend: str = "auto"
    max_number_digits: int = DEFAULT_MAX_NUMBER_DIGITS
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_step_ms: float | None = None
    block_size: int = 16
    kv_cache_gib: float | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.draft_model is not None:
            if self.drafter not in ("auto", DRAFT_MODEL):
                raise ConfigError(f"--draft-model is for --drafter {DRAFT_MODEL}, not for {self.drafter!r}.")
            object.__setattr__(self, "drafter", DRAFT_MODEL)
            object.__setattr__(self, "drafter_options", {**self.drafter_options, "model": self.draft_model})
        named = {"dtype": DTYPES, "quantization": QUANTIZATIONS, "isa": ISAS, "verification": VERIFICATIONS}
        for name, allowed in named.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"--{name}: " + unknown("value", str(getattr(self, name)), allowed))
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        _at_least("max_number_digits", self.max_number_digits, DEFAULT_MAX_NUMBER_DIGITS)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("threads", "max_model_len"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < float("inf"):
            raise ConfigError(f"kv_cache_gib is {self.kv_cache_gib}; it must be a positive number of GiB.")
        if self.max_step_ms is not None and not 0 < self.max_step_ms < float("inf"):
            raise ConfigError(f"max_step_ms is {self.max_step_ms}; it must be a positive number of milliseconds.")
        if not 0 < self.drafter_timeout_s < float("inf"):
            raise ConfigError(
                f"drafter_timeout_s is {self.drafter_timeout_s}; it must be a positive number of seconds."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs is {self.max_num_seqs}: "
                "every running sequence needs at least one token a step. Raise the first or lower the second."
            )


def _at_least(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {low}.")
