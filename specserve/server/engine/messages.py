"""The messages between the API process and the engine process, beside requests and events, which are sent as they are:
msgpack over one private socket.

Every message is typed, so bytes that are not one are refused by the decoder; nothing is ever unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from specserve.adapters import AdapterInfo, AdapterSource
from specserve.engine.request import Request
from specserve.errors import CapacityError, ConfigError, ModelError, SpecserveError
from specserve.types import Event

Role: TypeAlias = Literal["both", "prefill", "decode"]  # whether it answers, and whose prompts it computes


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """Load, the first of all commands. `options` are EngineConfig's fields; `num_engines`, this one included, are to
    share the memory that is free now. With `kv_timeout_s` cached prefixes go to and come from other engines, which have
    that time to say so, or to send them."""

    options: dict[str, Any]
    num_engines: int = 1
    kv_timeout_s: float = 0.0


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """A request is about to come: its prompt is being tokenized."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    id: str
    index: int | None = None  # which completion; None: all


class Expire(msgspec.Struct, frozen=True, tag="expire"):
    """End a request if none of its completions has begun to run; it is then refused."""

    id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset"):
    pass


class LoadAdapter(msgspec.Struct, frozen=True, tag="load"):
    """AdapterChanged says with `number` what came of it."""

    number: int
    source: AdapterSource
    replaces: bool


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload"):
    """As LoadAdapter."""

    number: int
    name: str


class ExportKV(msgspec.Struct, frozen=True, tag="export_kv"):
    """Hold a frame of what is cached of a prompt, from that block on, until it is released. `id` is the request's in
    the engine that wants it."""

    id: str
    tokens: list[int]
    salt: bytes
    adapter: str | None
    first_block: int


class ReleaseKV(msgspec.Struct, frozen=True, tag="release_kv"):
    """Let go of the frame that is held for that request, if there is one."""

    id: str


class ImportKV(msgspec.Struct, frozen=True, tag="import_kv"):
    """The frame that this request awaits lies at that path, or is to be fetched under the request's id from the engine
    at `address`; or, with a `reason`, there will be none."""

    id: str
    path: str
    num_bytes: int
    reason: str
    address: str = ""


class ExpectKV(msgspec.Struct, frozen=True, tag="expect_kv"):
    """The frame that this request awaits is on its way, and may take so long from now on."""

    id: str
    within_s: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End after the step that is running."""


KVCommand: TypeAlias = ExportKV | ReleaseKV | ImportKV
RemoteCommand: TypeAlias = Request | Wake | Abort | Expire | ResetPrefixCache | LoadAdapter | UnloadAdapter | KVCommand
Command: TypeAlias = Configure | RemoteCommand | ExpectKV | Stop


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
    draft_seconds: dict[str, float]
    num_adapter_loads: int = 0  # into slots
    num_adapter_evictions: int = 0  # from slots that other adapters needed
    num_prompts_received: int = 0  # of which KV came from another engine
    num_prompt_tokens_received: int = 0
    num_transfer_failures: int = 0  # of KV that was to come, and was computed
    transfer_s: float = 0.0  # that KV which came was awaited
    step_s: float = 0.0  # of a step for those that run now, without drafts, as measured; 0: not yet
    prompt_token_s: float = 0.0  # that a token of a prompt adds to a step; 0: not yet
    context_token_s: float = 0.0  # that it adds for each token that it reads
    backlog_s: float = 0.0  # that the prompts take which are not computed yet
    num_empty_steps: int = 0  # without rows, for those of other replicas


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """One message a step, however many sequences it had."""

    events: list[Event]
    gauges: Gauges


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that the engine's own checks did not let in, or that waited too long: an InputError."""

    id: str
    message: str
    param: str | None = None
    code: str | None = None


class AdapterChanged(msgspec.Struct, frozen=True, tag="adapter"):
    """What came of loading or unloading an adapter: what is known of it, or why it cannot be done."""

    number: int
    info: AdapterInfo | None
    message: str = ""
    is_missing: bool = False  # there is none of that name


class KVWanted(msgspec.Struct, frozen=True, tag="kv_wanted"):
    """A request awaits KV of its prompt from that block on."""

    id: str
    first_block: int


class KVExported(msgspec.Struct, frozen=True, tag="kv_exported"):
    """What ExportKV asked for, as ImportKV has it; without a path it is to be fetched."""

    id: str
    path: str
    num_bytes: int
    reason: str


class KVImported(msgspec.Struct, frozen=True, tag="kv_imported"):
    """A request awaits KV no more: of so many tokens it came, or none, and why."""

    id: str
    num_tokens: int
    reason: str


KVReport: TypeAlias = KVWanted | KVExported | KVImported


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests. `drafters` are the names that a request may ask for, `refused_drafters` why others
    may not be; `drafter` is the engine's own. `phases` are the seconds that its start took, in order. An engine
    elsewhere has a `role`, and others fetch KV from it at `kv_address`, "": where its server connects to it. `numerics`
    is what the bits of its KV depend on, as in a frame's header, where it exchanges KV."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    drafter: str
    drafters: list[str]
    refused_drafters: dict[str, str]
    summary: str
    about: dict[str, str]
    phases: dict[str, float]
    adapters: list[AdapterInfo] = []
    max_loras: int = 0
    kv_cache_gib: float = 0.0
    num_prefix_blocks: int = 0  # that its prefix cache can have; 0 without one
    block_size: int = 16
    role: Role = "both"
    kv_address: str = ""
    numerics: str = ""


FINAL: tuple[type[SpecserveError], ...] = (ConfigError, ModelError, CapacityError)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine ends, and why; `final` names the kind of error, one of FINAL, where another start would fail the same
    way."""

    message: str
    final: str = ""

    @classmethod
    def of(cls, error: SpecserveError) -> Failed:
        return cls(str(error), next((kind.__name__ for kind in FINAL if isinstance(error, kind)), ""))

    def error(self) -> SpecserveError | None:
        """The error that ends all starts; None where another may succeed."""
        return next((kind(self.message) for kind in FINAL if kind.__name__ == self.final), None)


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """An engine elsewhere is about to end: it is to get no new requests."""


Report: TypeAlias = Stepped | Refused | AdapterChanged | KVReport | Ready | Failed | Leaving
