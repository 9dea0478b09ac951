"""Between a server elsewhere and the engine of this process: its commands go on to the engine, events back to it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from specserve.adapters import AdapterInfo
from specserve.cluster.connection import Connection
from specserve.engine.request import Request
from specserve.errors import EngineError, InputError, SpecserveError
from specserve.parallel.handshake import MOST_MESSAGE_BYTES, Agreed, Handshake, LinkError
from specserve.server.engine.client import UnknownAdapterError
from specserve.server.engine.keeper import EngineKeeper, State
from specserve.server.engine.kv_relay import KVRelay
from specserve.server.engine.messages import (
    Abort,
    AdapterChanged,
    Expire,
    ExportKV,
    Failed,
    Gauges,
    ImportKV,
    KVReport,
    Leaving,
    LoadAdapter,
    Refused,
    ReleaseKV,
    RemoteCommand,
    Report,
    ResetPrefixCache,
    Role,
    Stepped,
    UnloadAdapter,
    Wake,
)  # fmt: skip
from specserve.types import Event

_GAUGES_S = 0.1  # between two looks at gauges that no event brings, as in the chunks of a long prompt


class Relay:
    """An Observer of the engine: what it has to do for servers, whichever of them asked, and `session`, which is told
    of events: the server that has it."""

    def __init__(self) -> None:
        self.session: HeadlessSession | None = None
        self._open: dict[str, int] = {}  # completions of each request that have not ended

    @property
    def num_completions(self) -> int:
        return sum(self._open.values())

    def begin(self, request_id: str, num_completions: int, num_prompt_tokens: int, adapter: str | None) -> None:
        self._open[request_id] = num_completions

    def notify(self, event: Event) -> None:
        if event.finish_reason is not None and event.request_id in self._open:
            self._open[event.request_id] -= 1
            if not self._open[event.request_id]:
                del self._open[event.request_id]
        if self.session is not None:
            self.session.tell(event)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def lost(self) -> None:
        self._open.clear()

    def abort_all(self, engine: EngineKeeper) -> None:
        """Nobody waits for anything any more."""
        if engine.state is State.READY:
            for request_id in list(self._open):
                engine.client.abort(request_id)


class Owner(Protocol):
    """Whose sessions they are."""

    kv: KVRelay
    role: Role
    kv_address: str
    exchanges_kv: bool

    @property
    def supervisor(self) -> EngineKeeper: ...
    def opened(self, session: HeadlessSession) -> None: ...
    def opened_by_engine(self, session: HeadlessSession) -> None: ...
    def closed(self, session: HeadlessSession, error: LinkError) -> None: ...


class HeadlessSession:
    """A connection that came in: a server's, once `owner` was told that it is open."""

    def __init__(self, owner: Owner, handshake: Handshake) -> None:
        self.connection = Connection(handshake, self)
        self._owner = owner
        self._events: list[Event] = []  # not sent yet
        self._gauges: Gauges | None = None  # that were sent last
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_of_engine = False  # that fetches KV
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(RemoteCommand).decode

    @property
    def peer(self) -> str:
        return self.connection.peer

    def opened(self, agreed: Agreed) -> None:
        self._is_of_engine = agreed.purpose == "kv"
        if self._is_of_engine:
            self._owner.opened_by_engine(self)
            return
        self._owner.opened(self)
        self._look()

    def received(self, message: bytes) -> None:
        """Obey. Raises LinkError for what no server says now."""
        kv = self._owner.kv
        if self._is_of_engine:
            self.connection.send(kv.answer(message))
            return
        command, engine = self._decode(message), self._owner.supervisor
        if engine.state is not State.READY:
            raise LinkError("It said something before the engine was ready.")
        client = engine.client
        match command:
            case Request():
                self._submit(command)
            case Wake():
                client.wake_engine()
            case Abort():
                client.abort(command.id, command.index)
                if command.index is None:
                    kv.forget(command.id)
            case Expire():
                client.expire(command.id)
            case ResetPrefixCache():
                client.reset_prefix_cache()
            case LoadAdapter():
                self._change(command.number, engine.load_adapter(command.source, command.replaces))
            case UnloadAdapter():
                self._change(command.number, engine.unload_adapter(command.name))
            case ExportKV() | ReleaseKV() | ImportKV():
                if not self._owner.exchanges_kv:
                    raise LinkError("It spoke of KV to an engine with --role both.")
                kv.obey(command, client)

    def closed(self, error: LinkError) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._events.clear()
        self._owner.closed(self, error)

    def close(self, reason: str) -> None:
        """After what has been told: it may be the end of requests that a drain waited for."""
        self._flush()
        self.connection.close(reason)

    def announce(self, engine: EngineKeeper) -> None:
        """The engine takes requests, with the adapters that it has now."""
        assert engine.ready is not None, "it said so when it was ready"
        role, address = self._owner.role, self._owner.kv_address
        adapters = list(engine.adapters.values())
        self._send(msgspec.structs.replace(engine.ready, adapters=adapters, role=role, kv_address=address))

    def announce_leave(self) -> None:
        self._send(Leaving())

    def tell_kv(self, report: KVReport) -> None:
        """What becomes of KV."""
        self._send(report)

    def fail(self, failed: Failed) -> None:
        """The engine has gone: no request has any more events."""
        self._flush()
        self._send(failed)
        self.connection.close("The engine has gone.")

    def tell(self, event: Event) -> None:
        """Those of one moment go together."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _submit(self, request: Request) -> None:
        def listen(event: Event | SpecserveError) -> None:
            """Events go the observer's way; what ends all requests ends this session, too."""
            if self._owner.exchanges_kv:
                self._owner.kv.forget(request.id)  # once there are tokens no KV is awaited any more
            if isinstance(event, InputError):
                self._send(Refused(request.id, str(event), event.param, event.code))

        client = self._owner.supervisor.client
        try:
            client.submit(request, listen)
        except InputError as error:
            raise LinkError(str(error)) from error
        if self._owner.exchanges_kv:
            self._owner.kv.expect(request, client)

    def _change(self, number: int, change: Coroutine[Any, Any, AdapterInfo]) -> None:
        async def changed() -> None:
            try:
                self._send(AdapterChanged(number, await change))
            except EngineError:  # ends this session
                return
            except SpecserveError as error:
                self._send(AdapterChanged(number, None, str(error), isinstance(error, UnknownAdapterError)))

        task = asyncio.create_task(changed())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look(self) -> None:
        """Send gauges that have changed, every now and then."""
        gauges = self._owner.supervisor.gauges
        if gauges is not None and gauges != self._gauges:
            self._report(gauges)
        self._timer = asyncio.get_running_loop().call_later(_GAUGES_S, self._look)

    def _flush(self) -> None:
        gauges = self._owner.supervisor.gauges or self._gauges
        if self._events and gauges is not None:
            self._report(gauges)

    def _report(self, gauges: Gauges) -> None:
        events, self._events = self._events, []
        self._gauges = gauges
        message = self._encode(Stepped(events, gauges))
        if len(message) <= MOST_MESSAGE_BYTES:
            self.connection.send(message)
            return
        for event in events:
            self._send(Stepped([self._bounded(event)], gauges))

    def _bounded(self, event: Event) -> Event:
        """The event, or what ends its completion where it is too large to be sent."""
        size = len(self._encode(event))
        if size <= MOST_MESSAGE_BYTES // 2:
            return event
        error = f"A step's log-probabilities take {size} bytes, too many to be sent. Ask for fewer of them."
        return Event(event.request_id, event.index, [], finish_reason="error", error=error, stats=event.stats)

    def _send(self, report: Report) -> None:
        self.connection.send(self._encode(report))
