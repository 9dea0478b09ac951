"""What there is to know of an engine that is kept running: its state, its adapters, who waits for it. How it is run is
for the subclasses: a process of this machine, or a connection to an engine elsewhere."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from specserve.adapters import AdapterDone, AdapterInfo, AdapterSource
from specserve.engine.request import Request
from specserve.errors import EngineError, SpecserveError
from specserve.parallel.frame import TIMEOUT_S
from specserve.server.engine.client import EngineClient, Observer
from specserve.server.engine.messages import Gauges, Ready
from specserve.server.metrics_totals import ReplicaStatus

_log = logging.getLogger(__name__)


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # for good
    STOPPED = "stopped"
    STALLED = "stalled"  # as another process sees it: the one that has the engines stands still


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds and numbers of attempts after which a supervisor gives up on something."""

    start_s: float = 900.0  # until the engine is ready
    stall_s: float = 9.5  # without a beat of the engine's pulse while requests are open
    loop_s: float = 600.0  # of steps that bring no sequence further while requests are open
    kv_s: float = TIMEOUT_S  # from asking another engine for KV to having it, or hearing that it comes
    attempts: int = 3  # starts in a row that fail before the engine was ready


class EngineKeeper(ABC):
    """One engine after another. `observer` gets the events of all of them, and is told when one is gone.

    `finished` is done when there will be no engine any more: its exception says why, None after `close`.
    """

    def __init__(self, observer: Observer, timeouts: Timeouts | None = None) -> None:
        self.state = State.LOADING
        self.ready: Ready | None = None  # of the engine that runs, or of the last one
        self.num_restarts = 0
        self.adapters: dict[str, AdapterInfo] = {}  # that requests may name; the next engine loads them again
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timeouts = timeouts or Timeouts()
        self._observer = observer
        self._client: EngineClient | None = None
        self._first = asyncio.Event()  # the first start has succeeded, or all have failed
        self._keeper: asyncio.Task[None] | None = None

    def _begin(self) -> None:
        """The last step of a subclass's start."""
        self._keeper = asyncio.create_task(self._keep())

    @property
    def client(self) -> EngineClient:
        """The engine that takes requests now. Raises EngineError when there is none."""
        if self.state is not State.READY or self._client is None:
            raise EngineError(f"The engine is {self.state.value}; try again in a moment.")
        return self._client

    @property
    def num_places(self) -> int:
        """Places beyond those that the server's own start counted."""
        return 0

    @property
    def gauges(self) -> Gauges | None:
        """Those of the engine that takes requests now; None where there is none, or it has not stepped."""
        return self._client.gauges if self.state is State.READY and self._client is not None else None

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """It is no group."""
        return ()

    def place(self, request: Request) -> EngineClient:
        """The engine that a request goes to. Raises EngineError when there is none."""
        return self.client

    def wake_engine(self) -> None:
        """Have an engine that rests ready for a request. Raises EngineError when there is none."""
        self.client.wake_engine()

    async def reset_prefix_cache(self) -> None:
        """Before any request that comes later. Raises EngineError where there is no engine."""
        self.client.reset_prefix_cache()

    async def wait_until_ready(self) -> Ready:
        """What the first engine said when it was ready. Raises EngineError with the cause when none could start."""
        await self._first.wait()
        if self.ready is None:
            await asyncio.shield(self.finished)
        assert self.ready is not None, "an end before the first start has a cause"
        return self.ready

    async def load_adapter(self, source: AdapterSource, replaces: bool) -> AdapterInfo:
        """Let requests name an adapter. Raises InputError for one that is refused, EngineError where there is no
        engine."""
        return await self._changed(lambda done: self.client.load_adapter(source, replaces, done))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Let none name it any more. Raises UnknownAdapterError, and EngineError where there is no engine."""
        return await self._changed(lambda done: self.client.unload_adapter(name, done), is_there=False)

    async def _changed(self, ask: Callable[[AdapterDone], None], is_there: bool = True) -> AdapterInfo:
        """What is known of an adapter once it is loaded or unloaded, which nobody who waits cancels."""
        found: asyncio.Future[AdapterInfo] = asyncio.get_running_loop().create_future()

        def done(info: AdapterInfo | SpecserveError) -> None:
            if isinstance(info, AdapterInfo):
                self.adapters.pop(info.name, None)
                self.adapters |= {info.name: info} if is_there else {}
            if not found.done():
                found.set_exception(info) if isinstance(info, SpecserveError) else found.set_result(info)

        ask(done)
        return await found

    async def close(self, hurried: bool = False) -> None:
        """End the engine after the step it is in, and everything else with it; `hurried`, a step that takes long is cut
        off, too."""
        self.state = State.STOPPED
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        await self._end(hurried)
        if not self.finished.done():
            self.finished.set_result(None)

    async def _keep(self) -> None:
        """Run engines until there will be none any more."""
        try:
            await self._run_all()
        except Exception as error:  # without a keeper requests would be refused for ever, and nobody would know
            _log.exception("Engines cannot be looked after any more.")
            self._give_up(EngineError(f"Engines cannot be looked after any more: {type(error).__name__}: {error}"))

    @abstractmethod
    async def _run_all(self) -> None:
        """Run one engine after another."""

    @abstractmethod
    async def _end(self, hurried: bool) -> None:
        """The last of `close`."""

    def _notice_ready(self) -> None:
        assert self._client is not None, "an engine is running"
        if self.state is not State.READY and self._client.ready.done():
            self.ready = self._client.ready.result()
            self.adapters = {info.name: info for info in self.ready.adapters}
            self.state = State.READY
            self._first.set()

    def _drop(self, cause: str) -> None:
        """Tell everybody who waits for the engine that has gone."""
        if self._client is not None:
            self._observer.lost()
            self._client.fail(EngineError(f"{cause} The request is lost; send it again."))
            self._client.close()
            self._client = None

    def _give_up(self, error: SpecserveError) -> None:
        self.state = State.FAILED
        self.finished.set_exception(error)
        self._first.set()
