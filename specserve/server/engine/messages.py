"""What the API process and the engine process say to each other: msgpack over one private socket. Knows neither side.

Every message is typed, so bytes that are not one are refused by the decoder; nothing is ever unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from specserve.errors import FailureCode
from specserve.server.engine.packed import Block
from specserve.types import BadWords, FinishReason, SamplingParams, SequenceStats

QUEUE_TIMEOUT = "queue_timeout"  # a code of Refused; the others are InputError's


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """Load, the first of all commands. `options` are EngineConfig's fields."""

    options: dict[str, Any]


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Generate. `id` is the API process's own count: what a client calls its request never gets this far."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    bad_words: BadWords | None = None
    priority: int = 0
    salt: bytes = b""
    drafter: str | None = None  # None: the engine's own choice
    prediction: list[int] = []
    is_slow: bool = False  # whether params.structured takes long to compile


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """A request is about to come: its prompt is being tokenized."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    id: int
    index: int | None = None  # which completion; None: all


class Expire(msgspec.Struct, frozen=True, tag="expire"):
    """End a request if none of its completions has begun to run; it is then refused."""

    id: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    pass


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End after the step that is running."""


Command: TypeAlias = Configure | Submit | Expect | Abort | Expire | ResetPrefixCache | Stop


class Said(msgspec.Struct, frozen=True, array_like=True):
    """types.Event on the wire: what one step said for one completion. `stats` come with the last."""

    id: int
    index: int
    tokens: list[int]
    logprobs: list[Block] | None = None  # packed, as those of a whole prompt come in one message
    prompt_logprobs: list[Block] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: FailureCode | None = None
    stats: SequenceStats | None = None


@dataclass(frozen=True, slots=True)
class Gauges:
    """The engine after a step: totals since it started, and what is so now."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_rows: int
    num_advanced: int
    num_preemptions: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    num_drafts_dropped: int
    seconds: dict[str, float]


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """One message a step, however many sequences it had."""

    said: list[Said]
    gauges: Gauges


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that the engine's own checks did not let in, or that waited too long (QUEUE_TIMEOUT)."""

    id: int
    message: str
    param: str | None = None
    code: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests. `drafters` are the names that a request may ask for, `drafter` the engine's own;
    `num_spec_tokens` the longest draft it makes, `num_forced_tokens` that of tokens that a grammar forces. `phases` are
    the seconds that its start took, in order."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    drafter: str
    drafters: list[str]
    num_spec_tokens: int
    num_forced_tokens: int
    summary: str
    about: dict[str, str]
    phases: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends, and why; `is_final`: another start would fail the same way."""

    message: str
    is_final: bool = False


Report: TypeAlias = Stepped | Refused | Ready | Failed
