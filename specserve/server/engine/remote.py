"""Engines elsewhere as the replicas of this server: connections that are made again and again."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from specserve.checkpoint.identity import model_digest
from specserve.cluster.connection import Connection, connect
from specserve.parallel.address import Address
from specserve.parallel.handshake import MOST_MESSAGE_BYTES, Agreed, LinkError, Welcome, server_handshake
from specserve.parallel.security import read_secret, server_tls
from specserve.server.engine.client import EngineClient, Observer
from specserve.server.engine.group import Member, ReplicaGroup
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.messages import Leaving, Ready, Report, Role, Stepped
from specserve.server.metrics_totals import ReplicaStatus
from specserve.server.options import ServeOptions
from specserve.types import Event

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between two tries to connect; each is twice as long as the one before
_REFUSED_PAUSE_S = 30.0  # where a try will fail until somebody does something about it
_SAID_AGAIN_S = 60.0  # the same cause in the log
_LOOK_S = 0.05  # between two looks at whether all requests have ended, while draining


@dataclass(frozen=True, slots=True)
class Dialer:
    """How engines are reached. `digest` is that of the model's files here, `model` what people call it."""

    secret: bytes
    model: str
    digest: str
    tls: ssl.SSLContext | None = None
    heartbeat_s: float = 3.0

    @classmethod
    def of(cls, options: ServeOptions, model: str, folder: Path) -> Dialer:
        """As a server's options say; `folder` is the model's. Raises ConfigError."""
        secret = read_secret(options.engine_secret_file, "--engine-secret-file")
        tls = server_tls(options.engine_ca, options.engine_cert, options.engine_key)
        return cls(secret, model, model_digest(folder), tls, options.engine_heartbeat_s)

    async def connect(self, address: Address, client: RemoteClient) -> None:
        """Have the client connected, and its handshake done. Raises LinkError."""
        connection = Connection(server_handshake(self.secret, self.heartbeat_s, self._check), client)
        client.attach(connection)
        await connect(connection, address, self.tls, "--engine-ca")
        await asyncio.shield(client.agreed)

    def _check(self, welcome: Welcome) -> None:
        if welcome.digest != self.digest:
            raise LinkError(
                f"It serves {welcome.model!r} from other files (digest {welcome.digest[:12]}) than those of "
                f"{self.model!r} here (digest {self.digest[:12]}). Engines and server need the same model.",
                is_final=True,
            )


class RemoteClient(EngineClient):
    """An engine elsewhere, at the other end of one connection. `over` is done when that is, with why."""

    most_message_bytes = MOST_MESSAGE_BYTES

    def __init__(self, observer: Observer, told_to_leave: Callable[[], None]) -> None:
        """`told_to_leave` is called when the engine wants no new requests."""
        super().__init__(observer)
        self.agreed: asyncio.Future[Agreed] = self._loop.create_future()
        self.over: asyncio.Future[LinkError] = self._loop.create_future()
        self._told_to_leave = told_to_leave
        self._connection: Connection | None = None
        self._clock_offset = 0.0

    def attach(self, connection: Connection) -> None:
        self._connection = connection

    def opened(self, agreed: Agreed) -> None:
        self._clock_offset = agreed.clock_offset
        if not self.agreed.done():
            self.agreed.set_result(agreed)

    def received(self, message: bytes) -> None:
        report = self._decode(message)
        if isinstance(report, Leaving):
            self._told_to_leave()
        else:
            self._take(self._on_this_clock(report))

    def closed(self, error: LinkError) -> None:
        if not self.agreed.done():
            self.agreed.set_exception(error)
            self.agreed.exception()  # looked at: whoever waited may have gone
        if not self.over.done():
            self.over.set_result(error)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _write(self, message: bytes) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _on_this_clock(self, report: Report) -> Report:
        """Times of another machine are of another clock."""
        if self._clock_offset and isinstance(report, Stepped):
            events = [self._shifted(event) for event in report.events]
            return Stepped(events, report.gauges)
        return report

    def _shifted(self, event: Event) -> Event:
        stats = event.stats
        if stats is None:
            return event

        def shifted(time_s: float | None) -> float | None:
            return None if time_s is None else time_s + self._clock_offset

        moved = replace(
            stats,
            arrived=stats.arrived + self._clock_offset,
            first_scheduled=shifted(stats.first_scheduled),
            first_token=shifted(stats.first_token),
            finished=shifted(stats.finished),
        )
        return msgspec.structs.replace(event, stats=moved)


class RemoteEngine(Member):
    """The engine at one address: one connection after another. `check_alike` raises LinkError for an engine whose
    answers would not be those of the others; `failed` is called when a try has failed or a connection is over."""

    def __init__(
        self,
        group: ReplicaGroup[Any],
        number: int,
        address: Address,
        dialer: Dialer,
        observer: Observer,
        timeouts: Timeouts,
        check_alike: Callable[[Ready], None],
        failed: Callable[[RemoteEngine], None],
    ) -> None:
        self.join(group, number)
        self._check_alike, self._failed = check_alike, failed
        super().__init__(observer, timeouts)
        self.address = address
        self.failure: LinkError | None = None  # of the last try
        self._dialer = dialer
        self._is_removed = False
        self._has_served = False  # the engine of the last connection
        self._said: tuple[str, float] | None = None  # the last failure in the log, and when
        self._begin()

    @property
    def pid(self) -> None:
        """Its process is elsewhere."""
        return

    @property
    def role(self) -> Role:
        return "both" if self.ready is None else self.ready.role

    @property
    def kv_address(self) -> str:
        return (self.ready.kv_address if self.ready is not None else "") or str(self.address)

    @property
    def status(self) -> ReplicaStatus:
        return replace(super().status, address=str(self.address))

    @property
    def is_gone(self) -> bool:
        """Whether it was removed, and nothing of it is left."""
        return self._is_removed and self.finished.done()

    def stop_taking(self) -> None:
        """Send it nothing new, ever again."""
        self._is_removed = True
        self.state = State.STOPPED

    async def remove(self, drain_s: float) -> None:
        """After `stop_taking`: let what runs end for so long, and leave it."""
        deadline = time.monotonic() + drain_s
        while self._client is not None and self._client.num_open and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        await self.close()

    async def _run_all(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            error = await self._run_one()
            if not self._is_removed:
                self.state = State.LOADING if self.ready is None else State.RESTARTING
            self.failure = error
            self._drop(f"The connection to engine {self.number} is lost.")
            if self._is_removed:
                return
            if self._has_served:
                pause = _FIRST_PAUSE_S
                self.num_restarts += 1
            wait_s = _REFUSED_PAUSE_S if error.is_final else pause
            self._log_failure(error, wait_s)
            self._failed(self)
            await asyncio.sleep(wait_s)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _run_one(self) -> LinkError:
        """Connect, and watch the connection until it is over; why it is."""
        client, self._has_served = RemoteClient(self._observer, self._leave), False
        self._client = client
        try:
            await self._dialer.connect(self.address, client)
        except LinkError as error:
            return error
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                news: list[asyncio.Future[Any]] = [client.over, client.ready]
                await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return LinkError(f"It was not ready after {self._timeouts.start_s:.0f} s.")
        if client.ready.done() and not self._is_removed:
            try:
                self._check_alike(client.ready.result())
            except LinkError as error:
                return error
            self._notice_ready()
            self._has_served = True
            _log.info("The engine at %s takes requests.", self.address)
        over = await asyncio.shield(client.over)
        failed = client.failure
        if failed is None:
            return over
        return LinkError(f"It failed: {failed.message}", is_final=failed.error() is not None)

    def _leave(self) -> None:
        """It is about to end: what runs may end there."""
        if self.state is State.READY:
            self.state = State.RESTARTING
            _log.info("The engine at %s is about to end and is sent no new requests.", self.address)

    def _log_failure(self, error: LinkError, wait_s: float) -> None:
        now, text = time.monotonic(), str(error)
        if self._said is not None and self._said[0] == text and now - self._said[1] < _SAID_AGAIN_S:
            return
        self._said = text, now
        _log.error("Engine %s: %s The next try is in %.1f s; then again and again.", self.address, text, wait_s)

    async def _end(self, hurried: bool) -> None:
        self._drop("The server is ending." if not self._is_removed else "The engine was removed.")
