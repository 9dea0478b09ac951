"""A headless engine: an engine's process beside a socket at which a server elsewhere finds it. Needs no torch here."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.checkpoint import catalog
from specserve.checkpoint.identity import model_digest
from specserve.cluster.connection import HANDSHAKE_S, TLS_SHUTDOWN_S
from specserve.cluster.kv_link import Fetcher
from specserve.errors import ConfigError, EngineError, SpecserveError
from specserve.parallel.address import Address
from specserve.parallel.handshake import LinkError, engine_handshake
from specserve.registry import DRAFTERS
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.kv_relay import KVRelay
from specserve.server.engine.listen_options import EngineListenOptions
from specserve.server.engine.messages import Failed, KVReport, Ready
from specserve.server.engine.relay import HeadlessSession, Relay
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.engine.supervisor import Supervisor

_log = logging.getLogger("specserve")
_MOST_STRANGERS = 64  # connections that have not proved anything; more are closed at once
_MOST_ENGINES = 256  # that fetch KV at once
_SAID_AGAIN_S = 60.0
_LOOK_S = 0.05  # between two looks at whether all requests have ended, while draining
_BUSY = "Another server has this engine, and an engine serves one at a time."


class HeadlessEngine:
    """One engine after another in processes of their own, for one server at a time. All of it runs on one event loop,
    whose thread must live as long as this: the engine's process ends with it.

    `options` are EngineConfig's fields. When the server goes its requests are aborted, and the prefix cache and
    adapters stay for the next one. `finished` is done when there will be no engine any more: its exception says why,
    None after `close`.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        listen: EngineListenOptions,
        timeouts: Timeouts | None = None,
        spawner: EngineSpawner | None = None,
    ) -> None:
        """Raises ConfigError and ModelError for what cannot be used."""
        self._listen = listen
        self._secret, self._tls = listen.secret(), listen.tls()
        self._folder = Path(catalog.resolve(options["model"], progress=sys.stderr.isatty()))
        self._name = str(options["model"])
        self._options = {**options, "model": str(self._folder)}
        self._timeouts = timeouts or Timeouts(listen.start_timeout_s, listen.stall_timeout_s)
        self._spawner = spawner
        self._digest = ""
        self._server: asyncio.Server | None = None
        self._relay = Relay()
        self.role, self.kv_address = listen.role, listen.kv_address
        self.exchanges_kv = self.role != "both"
        if self.exchanges_kv and not options.get("prefix_caching", True):
            raise ConfigError(
                f"--role {self.role}: what is computed for others is handed on by the prefix cache. Switch it on."
            )
        self._engines: set[HeadlessSession] = set()  # that fetch KV here
        self._peer_tls = listen.peer_tls() if self.role == "decode" else None
        self.kv = KVRelay(self._tell_kv)
        self._supervisor: _Supervisor | None = None
        self._session: HeadlessSession | None = None
        self._strangers: set[HeadlessSession] = set()
        self._is_leaving = False
        self._said = "", "", 0.0  # the last connection in the log that came to nothing: from where, why, when

    @property
    def supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "start comes first"
        return self._supervisor

    @property
    def finished(self) -> asyncio.Future[None]:
        return self.supervisor.finished

    @property
    def address(self) -> Address:
        """That it listens on, with the port that it got."""
        assert self._server is not None, "start comes first"
        return Address(self._listen.address.host, self._server.sockets[0].getsockname()[1])

    @property
    def is_connected(self) -> bool:
        """Whether a server has it."""
        return self._session is not None

    @property
    def num_open(self) -> int:
        """Completions that have not ended."""
        return self._relay.num_completions

    async def start(self) -> Address:
        """Listen, and begin to load; where it listens. Raises ConfigError for an address that cannot be had, ModelError
        for files that cannot be read."""
        self._digest = await asyncio.to_thread(model_digest, self._folder)
        if self.role == "decode":
            self.kv.fetcher = Fetcher(self._secret, self._digest, self._peer_tls, self._listen.check_peer)
        host, port = self._listen.address.host, self._listen.address.port
        secured: dict[str, Any] = {"ssl": self._tls}
        if self._tls is not None:
            secured |= {"ssl_handshake_timeout": HANDSHAKE_S, "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
        try:
            self._server = await asyncio.get_running_loop().create_server(self._accept, host, port, **secured)
        except socket.gaierror as error:
            raise ConfigError(
                f"--listen {self._listen.address}: its name cannot be resolved: {error.strerror}."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"--listen {self._listen.address} cannot be listened on: {error.strerror or error}. Choose another "
                "port (0: any that is free) or address."
            ) from error
        told = self._options, self._relay, self._timeouts, self._spawner
        self._supervisor = _Supervisor(self, self.exchanges_kv, *told)
        self._supervisor.finished.add_done_callback(self._gave_up)
        return self.address

    async def wait_until_ready(self) -> Ready:
        """What the first engine said when it was ready. Raises EngineError with the cause when none could start."""
        return await self.supervisor.wait_until_ready()

    async def drain(self, within_s: float) -> None:
        """Tell the server to send nothing new, and wait until all requests have ended or the time is over."""
        self._is_leaving = True
        if self._session is not None:
            self._session.announce_leave()
        deadline = time.monotonic() + within_s
        while self.num_open and self.is_connected and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)

    async def close(self, drain_s: float = 0.0) -> None:
        """End the engine and let go of the socket, after `drain`."""
        if drain_s:
            await self.drain(drain_s)
        self._is_leaving = True
        if self._server is not None:
            self._server.close()
        for session in (*self._strangers, *self._engines, *([self._session] if self._session else ())):
            session.close("The engine is ending.")
        self.kv.abandon()
        if self._supervisor is not None:
            await self._supervisor.close()
        elif self._spawner is not None:
            self._spawner.close()

    def admit(self) -> None:
        """Raises LinkError where no server is taken now."""
        if self._is_leaving:
            raise LinkError("The engine is ending.", is_told=True)
        if self._session is not None:
            raise LinkError(_BUSY, is_told=True)
        if self.num_open:
            raise LinkError("The engine is still ending the last server's requests.", is_told=True)

    def admit_engine(self) -> None:
        """Raises LinkError where no engine that fetches KV is taken now."""
        if self.role != "prefill":
            raise LinkError(f"This engine has --role {self.role}, and hands on no KV.", is_final=True, is_told=True)
        if len(self._engines) >= _MOST_ENGINES:
            raise LinkError(f"{_MOST_ENGINES} engines fetch KV here already.", is_told=True)

    def opened_by_engine(self, session: HeadlessSession) -> None:
        """An engine has come that fetches KV."""
        self._strangers.discard(session)
        self._engines.add(session)

    def opened(self, session: HeadlessSession) -> None:
        """A server has come."""
        self._strangers.discard(session)
        self._session = session
        self._relay.session = session
        _log.info("A server has connected from %s.", session.peer)
        if self.supervisor.state is State.READY:
            self.became_ready()

    def closed(self, session: HeadlessSession, error: LinkError) -> None:
        """A connection is over."""
        if session in self._strangers:
            self._strangers.discard(session)
            self._log_stranger(session.peer, str(error))
            return
        self._engines.discard(session)
        if session is not self._session:
            return
        self._session = self._relay.session = None
        _log.warning("The server at %s has gone: %s", session.peer, error)
        self.kv.abandon()
        self._relay.abort_all(self.supervisor)

    def became_ready(self) -> None:
        """The engine takes requests."""
        ready = self.supervisor.ready
        self.kv.most_bytes = int(ready.kv_cache_gib * 2**30) if ready is not None else 0
        if self._session is not None:
            self._session.announce(self.supervisor)

    def dropped(self, cause: str, failure: Failed | None) -> None:
        """The engine has gone, and its requests with it."""
        self.kv.abandon()
        if self._session is not None and not self._is_leaving:
            _log.error("The engine has gone, and the server is told: %s", cause)
            self._session.fail(failure or Failed(cause))

    def _accept(self) -> asyncio.Protocol:
        if len(self._strangers) >= _MOST_STRANGERS:
            return _Surplus()
        who = self._secret, self._name, self._digest
        session = HeadlessSession(self, engine_handshake(*who, self.admit, self.admit_engine))
        self._strangers.add(session)
        return session.connection

    def _tell_kv(self, report: KVReport) -> None:
        if self._session is not None:
            self._session.tell_kv(report)

    def _log_stranger(self, peer: str, text: str) -> None:
        """Once a minute what one and the same does again and again."""
        host, now = peer.rpartition(":")[0], time.monotonic()
        if (host, text) == self._said[:2] and now - self._said[2] < _SAID_AGAIN_S:
            return
        self._said = host, text, now
        _log.warning("A connection from %s was closed: %s", peer, text)

    def _gave_up(self, finished: asyncio.Future[None]) -> None:
        error = finished.exception()
        if error is not None and self._session is not None:
            known = error if isinstance(error, SpecserveError) else EngineError(str(error))
            self._session.fail(Failed.of(known))


class _Surplus(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "of a socket"
        transport.abort()


class _Supervisor(Supervisor):
    """Tells the headless engine what becomes of its process."""

    def __init__(self, owner: HeadlessEngine, exchanges_kv: bool, *arguments: Any) -> None:
        self._owner = owner
        super().__init__(*arguments)
        self._exchanges_kv = exchanges_kv

    def _notice_ready(self) -> None:
        was_ready = self.state is State.READY
        super()._notice_ready()
        if self.state is State.READY and not was_ready:
            self._owner.became_ready()

    def _drop(self, cause: str) -> None:
        if self._client is not None:
            self._owner.dropped(cause, self._client.failure)
        super()._drop(cause)


def serve_headless(options: Mapping[str, Any], listen: EngineListenOptions, spawner: EngineSpawner) -> None:
    """Be an engine for servers elsewhere until a signal ends it; a second one cuts its drain short. Raises as
    HeadlessEngine does, and EngineError with the cause when the engine cannot be kept running."""
    DRAFTERS.check(options["drafter"])
    engine = HeadlessEngine(options, listen, spawner=spawner)
    asyncio.run(_until_signalled(engine, listen.drain_timeout_s))


async def _until_signalled(engine: HeadlessEngine, drain_s: float) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        address = await engine.start()
        _log.info("Listening on %s for a server; the engine is loading.", address)
        reporting = asyncio.create_task(_report(engine, address))
        asked = asyncio.create_task(signals.get())
        ends: list[asyncio.Future[Any]] = [asked, engine.finished]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        reporting.cancel()
        if not engine.finished.done():
            _log.info("Draining %d completions; a second signal ends them at once.", engine.num_open)
            again, draining = asyncio.create_task(signals.get()), asyncio.create_task(engine.drain(drain_s))
            ends = [again, draining]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
    finally:
        await engine.close()
    engine.finished.result()


async def _report(engine: HeadlessEngine, address: Address) -> None:
    ready = await engine.wait_until_ready()
    _log.info("%s", ready.summary)
    _log.info("Ready on %s.", address)
