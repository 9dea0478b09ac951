"""What one process that answers HTTP asks of the engines, from the coordinator's side."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from specserve.adapters import AdapterInfo
from specserve.engine.port import RequestPort
from specserve.engine.request import Request
from specserve.errors import EngineError, SpecserveError
from specserve.server.api_processes.messages import (
    AskExposition,
    AskStats,
    ErrorSent,
    Fault,
    Happened,
    Known,
    Lost,
    Now,
    Order,
    Reset,
    Said,
    StopFound,
    Told,
    Try,
    Up,
    Withdraw,
    decode_said,
    encode,
)  # fmt: skip
from specserve.server.engine.channel import Channel
from specserve.server.engine.client import RefusedError
from specserve.server.engine.group import ReplicaGroup
from specserve.server.engine.keeper import EngineKeeper, State
from specserve.server.engine.messages import Abort, Expire, Failed, LoadAdapter, Refused, UnloadAdapter, Wake
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.metrics import Metrics
from specserve.server.reports import OwnReports
from specserve.server.service import no_engine
from specserve.server.wire.errors import INTERNAL_ERROR
from specserve.types import Event

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What there is once for all processes. `spread` tells all of them how the engines are, and returns when all go by
    it."""

    engines: EngineKeeper | ReplicaGroup[Any]
    metrics: Metrics
    validator: GrammarValidator
    reports: OwnReports
    spread: Callable[[], Awaitable[None]]


class _Running:
    """A request of the process."""

    __slots__ = ("engine", "num_left")

    def __init__(self, engine: RequestPort, num_completions: int) -> None:
        self.engine, self.num_left = engine, num_completions


class Session:
    """One connection, until `close`, which ends whatever the process has left."""

    def __init__(self, end: socket.socket, shared: Shared) -> None:
        self.up = asyncio.Event()  # it takes connections
        self.failure: Failed | None = None  # why it ends
        self._shared = shared
        self._running: dict[str, _Running] = {}
        self._events: list[Event] = []  # not sent yet
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the number of what they answer
        self._changes: set[asyncio.Task[Any]] = set()  # of adapters, which nobody's leaving cancels
        self._awaited: list[tuple[int, asyncio.Future[None]]] = []
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self.lost = asyncio.Event()  # nothing can be heard from it any more
        self._channel = Channel(end, self._read, self.lost.set)

    def tell(self, order: Order) -> None:
        self._flush()
        self._channel.send(encode(order))

    async def goes_by(self, now: Now) -> None:
        """Tell it, and wait until it goes by that, or is gone."""
        self.tell(now)
        known: asyncio.Future[None] = self._loop.create_future()
        self._awaited.append((now.version, known))
        await known

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        running, self._running = self._running, {}
        for request_id, each in running.items():
            each.engine.abort(request_id)
        for task in self._tasks.values():
            task.cancel()
        self._knows(None)
        self._events.clear()
        self._channel.close()

    def _read(self, message: bytes) -> None:
        self._obey(decode_said(message))

    def _obey(self, said: Said) -> None:
        match said:
            case Request():
                self._submit(said)
            case Wake():
                with suppress(EngineError):  # the request itself will hear of it
                    self._shared.engines.wake_engine()
            case Abort():
                self._abort(said)
            case Expire():
                if (running := self._running.get(said.id)) is not None:
                    running.engine.expire(said.id)
            case StopFound():
                self._shared.metrics.stopped(said.id, said.index)
            case ErrorSent():
                self._shared.metrics.refused(said.status)
            case Known():
                self._knows(said.version)
            case Failed():
                self.failure = said
            case Up():
                self.up.set()
            case Withdraw():
                if (task := self._tasks.get(said.number)) is not None:
                    task.cancel()
            case _:
                self._answer(said)

    def _answer(self, said: Said) -> None:
        """What has a number."""
        shared = self._shared
        match said:
            case AskExposition():
                self.tell(Told(said.number, shared.reports.exposition_now()))
            case AskStats():
                self.tell(Told(said.number, msgspec.msgpack.encode(shared.reports.stats_now())))
            case Try():
                self._begin(said.number, self._tried(said))
            case Reset():
                self._begin(said.number, self._reset())
            case LoadAdapter():
                self._begin(said.number, self._changed(shared.engines.load_adapter(said.source, said.replaces)))
            case UnloadAdapter():
                self._begin(said.number, self._changed(shared.engines.unload_adapter(said.name)))

    # --- requests -----------------------------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        engines = self._shared.engines
        try:
            if engines.state is not State.READY:
                raise no_engine(engines.state)
            engine = engines.place(request)
            engine.submit(request, functools.partial(self._notify, request.id))
            self._running[request.id] = _Running(engine, request.params.n)
        except Exception as error:
            self._lose(request.id, error)

    def _abort(self, abort: Abort) -> None:
        running = self._running.get(abort.id)
        if running is None:
            return
        if abort.index is None:
            del self._running[abort.id]
        running.engine.abort(abort.id, abort.index)

    def _notify(self, request_id: str, event: Event | SpecserveError) -> None:
        """All events that come at once go on in one message."""
        if isinstance(event, SpecserveError):
            self._running.pop(request_id, None)
            self._lose(request_id, event)
            return
        if event.finish_reason is not None:
            running = self._running[request_id]
            running.num_left -= 1
            if not running.num_left:
                del self._running[request_id]
        if not self._events:
            self._loop.call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._channel.send(encode(Happened(events)))

    def _lose(self, request_id: str, error: Exception) -> None:
        if isinstance(error, RefusedError):
            self.tell(Refused(request_id, str(error), error.param, error.code))
        else:
            self.tell(Lost(request_id, _fault(error)))

    # --- answers ------------------------------------------------------------------------------------------------------

    def _begin(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        task = self._tasks[number] = asyncio.create_task(self._work(number, work))
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _work(self, number: int, work: Coroutine[Any, Any, bytes]) -> None:
        try:
            told = Told(number, await work)
        except Exception as error:
            told = Told(number, fault=_fault(error))
        self.tell(told)

    async def _tried(self, said: Try) -> bytes:
        is_slow = await self._shared.validator.check(said.structured, said.vocab_size, said.tenant)
        return b"slow" if is_slow else b""

    async def _reset(self) -> bytes:
        await self._shared.engines.reset_prefix_cache()
        return b""

    async def _changed(self, change: Coroutine[Any, Any, AdapterInfo]) -> bytes:
        task = asyncio.create_task(self._change(change))
        self._changes.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        """What it raises is for who waits for it, if anybody still does."""
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()

    async def _change(self, change: Coroutine[Any, Any, AdapterInfo]) -> bytes:
        info = await change
        await self._shared.spread()
        return msgspec.msgpack.encode(info)

    def _knows(self, version: int | None) -> None:
        """It goes by that version; None: by none any more."""
        waiting, self._awaited = self._awaited, []
        for wanted, known in waiting:
            if version is not None and wanted > version:
                self._awaited.append((wanted, known))
            elif not known.done():
                known.set_result(None)


def _fault(error: Exception) -> Fault:
    fault = Fault.of(error)
    if fault.code == INTERNAL_ERROR:
        _log.error("A request failed in a way that nobody foresaw.", exc_info=error)
    return fault
