"""The engines, and what is counted and tried beside them, as a process sees them that answers HTTP and has none: all of
it is the coordinator's."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from specserve.adapters import AdapterInfo, AdapterSource
from specserve.engine.port import call_all
from specserve.engine.request import Request
from specserve.errors import EngineError
from specserve.server.api_processes.messages import (
    AskExposition,
    AskStats,
    ErrorSent,
    Finish,
    Given,
    Happened,
    Known,
    Lost,
    Now,
    Reset,
    Said,
    StopFound,
    Told,
    Try,
    Withdraw,
    decode_order,
    encode,
)  # fmt: skip
from specserve.server.api_processes.table import COORDINATOR, Table
from specserve.server.engine.client import EngineClient, LocalClient
from specserve.server.engine.keeper import State
from specserve.server.engine.messages import LoadAdapter, Ready, Refused, UnloadAdapter
from specserve.server.wire.errors import unavailable
from specserve.structured.spec import Structured
from specserve.types import Event

_adapter = msgspec.msgpack.Decoder(AdapterInfo).decode


class Unobserved:
    """Events are counted by the coordinator."""

    def begin(self, request_id: str, num_completions: int, num_prompt_tokens: int, adapter: str | None) -> None: ...
    def notify(self, event: Event) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def lost(self) -> None: ...


class Coordinator(LocalClient):
    """The other end of the connection, an EnginePort as an engine's is. `given` is the first that it says, `now` the
    last of the engines; `finished` is done when this process is to end."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, Unobserved())
        loop = asyncio.get_running_loop()
        self.given: asyncio.Future[Given] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.now = Now(0, State.LOADING.value, None, [], {})
        self.changed: Callable[[Now], object] = lambda now: None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}

    def say(self, message: Said) -> None:
        self._pipe.send(encode(message))

    async def ask(self, question: Callable[[int], Said]) -> bytes:
        """The answer to a message with a number. Raises the error that came in its place. The coordinator hears of it
        when nobody waits any more."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.say(question(number))
        try:
            return await answer
        except asyncio.CancelledError:
            self.say(Withdraw(number))
            raise
        finally:
            del self._answers[number]

    def _read(self, message: bytes) -> None:
        match order := decode_order(message):
            case Happened(events=events):
                call_all(self._open.notify, events)
            case Refused():
                self._take(order)
            case Lost():
                self._open.end(order.id, order.fault.error())
            case Told():
                self._told(order)
            case Now():
                self.now = order
                self.changed(order)
                self.say(Known(order.version))
            case Given():
                self.given.set_result(order)
            case Finish():
                self.finished.set_result(None)

    def _told(self, told: Told) -> None:
        answer = self._answers.get(told.number)
        if answer is None or answer.done():
            return
        if told.fault is None:
            answer.set_result(told.body)
        else:
            answer.set_exception(told.fault.error())


class CoordinatedEngines:
    """As a Supervisor. A coordinator that has not moved for `stall_s` seconds, by its row in the table, cannot be
    reached."""

    def __init__(self, coordinator: Coordinator, table: Table, stall_s: float) -> None:
        self._coordinator, self._table, self._stall_s = coordinator, table, stall_s
        self.adapters: dict[str, AdapterInfo] = {}
        self.timeline: dict[str, float] = {}  # of the server's start
        self._state = State.LOADING
        coordinator.changed = self._changed
        self._changed(coordinator.now)

    @property
    def state(self) -> State:
        late = time.monotonic() - self._table.last_beat(COORDINATOR) > self._stall_s
        return State.STALLED if late else self._state

    @property
    def ready(self) -> Ready | None:
        return self._coordinator.now.ready

    @property
    def num_places(self) -> int:
        return self._coordinator.now.num_places

    def place(self, request: Request) -> EngineClient:
        """Where the request is placed. Raises EngineError where there is no engine."""
        return self._reached()

    def wake_engine(self) -> None:
        """Raises EngineError where there is no engine."""
        self._reached().wake_engine()

    async def reset_prefix_cache(self) -> None:
        """Raises EngineError where there is no engine."""
        await self._coordinator.ask(Reset)

    async def load_adapter(self, source: AdapterSource, replaces: bool) -> AdapterInfo:
        """All processes know of it then. Raises InputError for one that is refused, EngineError where there is no
        engine."""
        return _adapter(await self._coordinator.ask(lambda number: LoadAdapter(number, source, replaces)))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """As load_adapter; no process lets it be named then. Raises UnknownAdapterError."""
        return _adapter(await self._coordinator.ask(lambda number: UnloadAdapter(number, name)))

    def _reached(self) -> Coordinator:
        if self.state is not State.READY:
            raise EngineError(f"The engine is {self.state.value}; try again in a moment.")
        return self._coordinator

    def _changed(self, now: Now) -> None:
        self._state = State(now.state)
        self.adapters = {info.name: info for info in now.adapters}
        self.timeline.clear()
        self.timeline.update(now.timeline)


class CoordinatedReports:
    """As OwnReports."""

    def __init__(self, coordinator: Coordinator, stall_s: float) -> None:
        self._coordinator, self._stall_s = coordinator, stall_s

    async def exposition(self) -> bytes:
        return await self._ask(AskExposition)

    async def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.msgpack.decode(await self._ask(AskStats))
        return found

    async def _ask(self, question: Callable[[int], Said]) -> bytes:
        try:
            async with asyncio.timeout(self._stall_s):
                return await self._coordinator.ask(question)
        except TimeoutError:
            raise unavailable("The process that has the engines does not answer.") from None


class CoordinatedCounter:
    """As Metrics, for what only this process knows."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def stopped(self, request_id: str, index: int) -> None:
        self._coordinator.say(StopFound(request_id, index))

    def refused(self, status: int) -> None:
        self._coordinator.say(ErrorSent(status))


class CoordinatedValidator:
    """As GrammarValidator: what one process had tried all know of, and tenants have their turns among all."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def check(self, structured: Structured, vocab_size: int, tenant: bytes = b"") -> bool:
        return bool(await self._coordinator.ask(lambda number: Try(number, structured, vocab_size, tenant)))

    def close(self) -> None:
        """It is not this process's."""
