"""The engine as the API process sees it: an EnginePort over the socket."""

from __future__ import annotations

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from specserve.adapters import AdapterDone, AdapterSource
from specserve.engine.port import Listener, Listeners, call_all
from specserve.engine.request import Request
from specserve.errors import EngineError, InputError
from specserve.server.engine.channel import Channel
from specserve.server.engine.messages import (
    Abort,
    AdapterChanged,
    Command,
    Configure,
    ExpectKV,
    Expire,
    ExportKV,
    Failed,
    Gauges,
    ImportKV,
    KVExported,
    KVImported,
    KVReport,
    KVWanted,
    LoadAdapter,
    Ready,
    Refused,
    ReleaseKV,
    Report,
    ResetPrefixCache,
    Stepped,
    Stop,
    UnloadAdapter,
    Wake,
)  # fmt: skip
from specserve.types import Event

KVListener: TypeAlias = Callable[[KVReport | EngineError], object]


class RefusedError(InputError):
    """What the engine itself found wrong with a request; `code` is that of the message."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, refused.param)
        self.code = refused.code


class UnknownAdapterError(InputError):
    """The engine has no adapter of that name."""


class Observer(Protocol):
    """Counts what engines report."""

    def begin(self, request_id: str, num_completions: int, num_prompt_tokens: int, adapter: str | None) -> None:
        """A request goes to the engine under this id."""

    def notify(self, event: Event) -> None: ...
    def forget(self, request_id: str) -> None:
        """This request was refused: it has no events."""

    def lost(self) -> None:
        """The engine is gone: no open request has any more events."""


class EngineClient(ABC):
    """One engine, an EnginePort for requests whose ids no other has had. How messages get there is the subclass's.

    `gauges` is the engine after its last step. `last_progress` is time.monotonic() of the last sign that it moves while
    requests are open: a beat of its pulse inside a step, a step that ran rows or had events, or a new request to none;
    `last_advanced` that of the last step that brought a sequence further than it had been. `observer` gets all events,
    also of requests that nobody waits for any more. `is_broken`: messages are not read any more, after a fault on this
    side, or one that is none.
    """

    most_message_bytes = 2**32 - 1

    def __init__(self, observer: Observer) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.gauges: Gauges | None = None
        self.last_progress = self.last_advanced = time.monotonic()
        self.failure: Failed | None = None
        self._observer = observer
        self._open = Listeners()
        self._hearing: dict[str, KVListener] = {}  # of KV, by request
        self._changes: dict[int, AdapterDone] = {}  # of adapters, that the engine has yet to answer
        self._num_changes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Report).decode
        self.is_broken = False
        self._loop = asyncio.get_running_loop()

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def num_completions(self) -> int:
        """Those of these requests that have not ended."""
        return self._open.num_completions

    def configure(self, options: dict[str, Any], num_engines: int = 1, kv_timeout_s: float = 0.0) -> None:
        """Tell the engine what to load, how many are to share its machine's memory, and whether cached prefixes go
        between engines, and how long that may take; the first thing that it is told."""
        self._send(Configure(options, num_engines, kv_timeout_s))

    def submit(self, request: Request, listener: Listener, counted: bool = True) -> None:
        """One that is not `counted` is no client's: observers learn nothing of it."""
        if not self._open:
            self.last_progress = self.last_advanced = time.monotonic()
        message = self._encode(request)  # one that cannot be sent has not begun
        if len(message) > self.most_message_bytes:
            raise InputError(
                f"The request takes {len(message)} bytes on its way to the engine; {self.most_message_bytes} are "
                "allowed."
            )
        self._open.add(request, listener)
        if counted:
            self._observer.begin(request.id, request.params.n, len(request.prompt_ids), request.adapter)
        self._write(message)

    def wake_engine(self) -> None:
        """Tell an engine that rests of a request that is about to come."""
        if not self._open:
            self._send(Wake())

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Of a request that is aborted whole the listener gets nothing more."""
        if request_id not in self._open:
            return
        if index is None:
            self._open.end(request_id)
        self._send(Abort(request_id, index))

    def expire(self, request_id: str) -> None:
        if request_id in self._open:
            self._send(Expire(request_id))

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    def load_adapter(self, source: AdapterSource, replaces: bool, done: AdapterDone) -> None:
        self._send(LoadAdapter(self._numbered(done), source, replaces))

    def unload_adapter(self, name: str, done: AdapterDone) -> None:
        self._send(UnloadAdapter(self._numbered(done), name))

    def hear_kv(self, request_id: str, listener: KVListener | None) -> None:
        """Let a listener have what the engine reports of that request's KV, and the error when the engine is gone;
        None: nobody any more."""
        if listener is not None:
            self._hearing[request_id] = listener
        else:
            self._hearing.pop(request_id, None)

    def export_kv(self, request_id: str, tokens: list[int], salt: bytes, adapter: str | None, first: int) -> None:
        self._send(ExportKV(request_id, tokens, salt, adapter, first))

    def release_kv(self, request_id: str) -> None:
        self._send(ReleaseKV(request_id))

    def import_kv(self, request_id: str, path: str, num_bytes: int, reason: str, address: str = "") -> None:
        self._send(ImportKV(request_id, path, num_bytes, reason, address))

    def expect_kv(self, request_id: str, within_s: float) -> None:
        self._send(ExpectKV(request_id, within_s))

    def _numbered(self, done: AdapterDone) -> int:
        self._num_changes += 1
        self._changes[self._num_changes] = done
        return self._num_changes

    def stop(self) -> None:
        """Ask the engine to end after its step."""
        self._send(Stop())

    def fail(self, error: EngineError) -> None:
        """Tell everybody who waits that the engine is gone."""
        hearing, self._hearing = self._hearing, {}
        call_all(lambda listener: listener(error), hearing.values())
        self._open.end_all(error)
        changes, self._changes = self._changes, {}
        call_all(lambda done: done(error), changes.values())
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # looked at, so that a start that nobody waits for any more is no warning

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection."""

    def _send(self, command: Command) -> None:
        self._write(self._encode(command))

    @abstractmethod
    def _write(self, message: bytes) -> None:
        """Send it, without waiting."""

    def _take(self, report: Report) -> None:
        match report:
            case Stepped(events=events, gauges=gauges):
                if events or self.gauges is None or gauges.num_rows != self.gauges.num_rows:
                    self.last_progress = time.monotonic()
                if events or self.gauges is None or gauges.num_advanced != self.gauges.num_advanced:
                    self.last_advanced = self.last_progress
                self.gauges = gauges
                call_all(self._open.notify, events)
                self._loop.call_soon(self._count, events)  # once whoever waits has been told
            case Refused():
                self._observer.forget(report.id)
                self._open.end(report.id, RefusedError(report))
            case AdapterChanged():
                kind = UnknownAdapterError if report.is_missing else InputError
                self._changes.pop(report.number)(report.info or kind(report.message))
            case KVWanted() | KVExported() | KVImported():
                if (listener := self._hearing.get(report.id)) is not None:
                    listener(report)
            case Ready():
                self.ready.set_result(report)
            case Failed():
                self.failure = report

    def _count(self, events: list[Event]) -> None:
        for event in events:
            self._observer.notify(event)


class LocalClient(EngineClient):
    """An engine in a process of this machine, at the other end of a pair of sockets."""

    def __init__(self, end: socket.socket, observer: Observer) -> None:
        super().__init__(observer)
        self._pipe = Channel(end, self._read, self._lost)

    def close(self) -> None:
        self._pipe.close()

    def _write(self, message: bytes) -> None:
        self._pipe.send(message)

    def _read(self, message: bytes) -> None:
        self._take(self._decode(message))

    def _lost(self) -> None:
        """That the engine has gone is for others to notice."""
        self.is_broken = self._pipe.is_broken
