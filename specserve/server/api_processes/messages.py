"""What the coordinator and a process that answers HTTP say to each other, beside requests and events: msgpack, each
message typed, as between the server and an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from specserve.adapters import AdapterInfo
from specserve.engine.request import Request
from specserve.errors import EngineError, InputError, SpecserveError
from specserve.server.engine.client import UnknownAdapterError
from specserve.server.engine.messages import (
    Abort,
    Expire,
    Failed,
    LoadAdapter,
    Ready,
    Refused,
    UnloadAdapter,
    Wake,
)
from specserve.server.settings import Settings
from specserve.server.wire.errors import WireError, wire_error
from specserve.server.wire.openai.bodies import ErrorType
from specserve.structured.base import RefusedError as StructureRefusedError
from specserve.structured.spec import Structured
from specserve.types import Event

# --- from a process that answers HTTP ---------------------------------------------------------------------------------


class Up(msgspec.Struct, frozen=True, tag="up"):
    """It takes connections."""


class Known(msgspec.Struct, frozen=True, tag="known"):
    """It goes by the Now of this version."""

    version: int


class StopFound(msgspec.Struct, frozen=True, tag="stop_found"):
    """A stop string has ended this completion: the abort that follows counts as "stop"."""

    id: str
    index: int


class ErrorSent(msgspec.Struct, frozen=True, tag="error_sent"):
    """A response with this status."""

    status: int


class AskExposition(msgspec.Struct, frozen=True, tag="exposition"):
    """Told answers it, as everything that has a number."""

    number: int


class AskStats(msgspec.Struct, frozen=True, tag="stats"):
    number: int


class Try(msgspec.Struct, frozen=True, tag="try"):
    """Whether a constraint can be compiled, see GrammarValidator.check."""

    number: int
    structured: Structured
    vocab_size: int
    tenant: bytes


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Nobody waits for the answer of this number any more."""

    number: int


class Reset(msgspec.Struct, frozen=True, tag="reset_all"):
    """Forget all cached prefixes; answered once the engines will before anything that comes later."""

    number: int


Said: TypeAlias = (
    Request
    | Wake
    | Abort
    | Expire
    | LoadAdapter
    | UnloadAdapter
    | Failed
    | Up
    | Known
    | StopFound
    | ErrorSent
    | AskExposition
    | AskStats
    | Try
    | Reset
    | Withdraw
)

# --- from the coordinator ---------------------------------------------------------------------------------------------


class Given(msgspec.Struct, frozen=True, tag="given"):
    """The first message. `row` is the process's own in the table that has those of `num_processes`; `ids` begins the
    ids of its requests, as no other process's ever do. `stall_s`: see CoordinatedEngines."""

    settings: Settings
    row: int
    num_processes: int
    ids: str
    stall_s: float


class Now(msgspec.Struct, frozen=True, tag="now"):
    """What is so of the engines, told whenever it changes. `timeline` are the seconds of the server's start,
    `num_places` the places of engines that the start did not count."""

    version: int
    state: str
    ready: Ready | None
    adapters: list[AdapterInfo]
    timeline: dict[str, float]
    num_places: int = 0


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """Events of this process's requests."""

    events: list[Event]


class Fault(msgspec.Struct, frozen=True):
    """An error that another process raises. `kind` is how."""

    kind: Literal["wire", "engine", "input", "adapter", "structure"]
    message: str
    param: str | None = None
    code: str | None = None
    status: int = 500
    error_type: ErrorType = "server_error"
    retry_after: float | None = None

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """What nobody foresaw is told as the client is told of it."""
        if isinstance(error, StructureRefusedError):
            return cls("structure", error.reason)
        if isinstance(error, UnknownAdapterError):
            return cls("adapter", str(error), error.param)
        if isinstance(error, InputError):
            return cls("input", str(error), error.param, error.code)
        if isinstance(error, EngineError):
            return cls("engine", str(error))
        found = wire_error(error)
        return cls("wire", found.message, found.param, found.code, found.status, found.kind, found.retry_after)

    def error(self) -> SpecserveError:
        make = _MAKERS.get(self.kind)
        if make is not None:
            return make(self.message)
        if self.kind == "wire":
            more: dict[str, Any] = {"param": self.param, "code": self.code, "retry_after": self.retry_after}
            return WireError(self.status, self.error_type, self.message, **more)
        error = (UnknownAdapterError if self.kind == "adapter" else InputError)(self.message, self.param)
        error.code = self.code
        return error


_MAKERS: dict[str, Callable[[str], SpecserveError]] = {"structure": StructureRefusedError, "engine": EngineError}


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """A request has ended with an error that is none of the engine's refusals."""

    id: str
    fault: Fault


class Told(msgspec.Struct, frozen=True, tag="told"):
    """The answer of this number: a body, or why there is none."""

    number: int
    body: bytes = b""
    fault: Fault | None = None


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """End, once those who are being answered have heard of it."""


Order: TypeAlias = Given | Now | Happened | Refused | Lost | Told | Finish


def _path(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind} is in no message")


def _text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} is in no message")


encode = msgspec.msgpack.Encoder(enc_hook=_text).encode
decode_said = msgspec.msgpack.Decoder(Said).decode
decode_order = msgspec.msgpack.Decoder(Order, dec_hook=_path).decode
