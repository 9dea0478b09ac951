"""Keeps an engine running: starts its process, notices when it has died or no longer moves, tells who waits, and starts
another."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from specserve.adapters import AdapterDone, AdapterInfo, AdapterSource
from specserve.engine.request import Request
from specserve.errors import EngineError, SpecserveError
from specserve.machine.pulse import Pulse
from specserve.server.engine.client import EngineClient, Observer
from specserve.server.engine.messages import Gauges, Ready
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.metrics_totals import ReplicaStatus

_log = logging.getLogger(__name__)
_LOOK_S = 0.25  # between two looks at whether the engine moves
_LATE_S = 1.0  # a look that comes so much later says that this process did not run
_FIRST_PAUSE_S = 0.1  # before a restart; twice as long after each start that failed
_LONGEST_PAUSE_S = 30.0
_MOST_DOUBLED = 10  # times: long after the longest pause
_END_S, _HURRIED_END_S = 5.0, 1.0  # an engine that was asked to end is killed after so long


class State(Enum):
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"  # for good
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds and numbers of attempts after which a supervisor gives up on something."""

    start_s: float = 900.0  # until the engine is ready
    stall_s: float = 9.5  # without a beat of the engine's pulse while requests are open
    loop_s: float = 600.0  # of steps that bring no sequence further while requests are open
    attempts: int = 3  # starts in a row that fail before the engine was ready


class Supervisor:
    """One engine after another, in processes of their own that die with this one.

    `observer` gets the events of all of them, and is told when one is gone. `options` are EngineConfig's fields; the
    processes come from `spawner`. Of several supervisors `name` tells this one apart in the log, and `num_engines` are
    started to share the machine's memory.

    `finished` is done when there will be no engine any more: its exception says why, None after `close`.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        observer: Observer,
        timeouts: Timeouts | None = None,
        spawner: EngineSpawner | None = None,
        name: str = "",
        num_engines: int = 1,
    ) -> None:
        self.state = State.LOADING
        self.ready: Ready | None = None  # of the engine that runs, or of the last one
        self.num_restarts = 0
        self.adapters: dict[str, AdapterInfo] = {}  # that requests may name; the next engine loads them again
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timeouts = timeouts or Timeouts()
        self._observer = observer
        self._options = dict(options)
        self._spawner = spawner or EngineSpawner()
        self._name, self._num_engines = name, num_engines
        self._waiters = ThreadPoolExecutor(2, "specserve-wait")  # its own: those of the event loop are few
        self._client: EngineClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._num_beats = 0  # of the running engine's pulse, at the last look
        self._first = asyncio.Event()  # the first start has succeeded, or all have failed
        self._keeper = asyncio.create_task(self._keep())

    @property
    def pid(self) -> int | None:
        """The engine's process, while there is one."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    @property
    def client(self) -> EngineClient:
        """The engine that takes requests now. Raises EngineError when there is none."""
        if self.state is not State.READY or self._client is None:
            raise EngineError(f"The engine is {self.state.value}; try again in a moment.")
        return self._client

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

    def reset_prefix_cache(self) -> None:
        """Raises EngineError where there is no engine."""
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

    def _engine_options(self) -> dict[str, Any]:
        """Of the next engine: with the adapters that the last one had, but for those whose folders have gone."""
        if self.ready is None:
            return self._options
        known = [
            AdapterSource(info.name, info.path, info.is_pinned, info.head if Path(info.head).is_dir() else "")
            for info in self.adapters.values()
        ]
        found = [source for source in known if Path(source.path).is_dir()]
        if lost := [source.name for source in known if source not in found]:
            text = "%sThe folders of these adapters are gone, and requests can no longer name them: %s."
            _log.error(text, self._name, lost)
        return {**self._options, "lora": [str(source) for source in found], "max_loras": self.ready.max_loras}

    async def close(self, hurried: bool = False) -> None:
        """End the engine after the step it is in, and everything else with it; `hurried`, a step that takes long is cut
        off, too."""
        self.state = State.STOPPED
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        await self._end(_HURRIED_END_S if hurried else _END_S)
        self._spawner.close()
        self._waiters.shutdown(wait=False)
        if not self.finished.done():
            self.finished.set_result(None)

    async def _keep(self) -> None:
        """Run engines until there will be none any more."""
        try:
            await self._run_all()
        except Exception as error:  # without a keeper requests would be refused for ever, and nobody would know
            _log.exception("Engines cannot be looked after any more.")
            self._give_up(EngineError(f"Engines cannot be looked after any more: {type(error).__name__}: {error}"))

    async def _run_all(self) -> None:
        """Run one engine after another until starting has failed too often."""
        failures = 0
        while True:
            cause = await self._run_one()
            was_ready, self.state = self.state is State.READY, State.RESTARTING
            failures = 0 if was_ready else failures + 1
            failure = None if self._client is None else self._client.failure
            self._drop(cause)
            error = None if failure is None else failure.error()
            if error is not None and self._may_give_up():
                self._give_up(error)
                return
            if failure is not None:  # what it said is for the log: it may name files of this machine
                cause = f"{cause} It said: {failure.message}"
            if failures >= self._timeouts.attempts and self._may_give_up():
                self._give_up(EngineError(cause))
                return
            pause = min(_FIRST_PAUSE_S * 2 ** min(failures, _MOST_DOUBLED), _LONGEST_PAUSE_S)
            _log.error("%s%s Starting another in %.1f s.", self._name, cause, pause)
            self.num_restarts += 1
            await asyncio.sleep(pause)

    def _may_give_up(self) -> bool:
        """Whether starts that fail may end all of them."""
        return True

    async def _run_one(self) -> str:
        """Start an engine and watch it until it is gone; why it is."""
        try:
            child = self._spawner.take()
            self._client = EngineClient(child.end, self._observer)
        except OSError as error:  # no descriptors, no memory
            return f"The engine's process cannot be started: {error}."
        self._process = child.process
        self._client.configure(self._engine_options(), self._num_engines)
        begun = looked = time.monotonic()
        ended = asyncio.get_running_loop().run_in_executor(self._waiters, self._process.wait)
        while not ended.done():
            news: list[asyncio.Future[Any]] = [ended]
            if self.state is not State.READY:
                news.append(self._client.ready)
            await asyncio.wait(news, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            self._notice_ready()
            looked = self._look_again(looked, child.pulse)
            if (trouble := self._trouble(begun)) and not ended.done():
                self._process.kill()
                await ended
                return trouble
        return f"The engine's process ended with status {ended.result()}."

    def _notice_ready(self) -> None:
        assert self._client is not None, "an engine is running"
        if self.state is not State.READY and self._client.ready.done():
            self.ready = self._client.ready.result()
            self.adapters = {info.name: info for info in self.ready.adapters}
            self.state = State.READY
            self._first.set()

    def _look_again(self, looked: float, pulse: Pulse) -> float:
        """Now. Time in which this process was stopped, with its machine or by a signal, is not the engine's: that was
        stopped too, or what it said has not been read. An engine in a long step says nothing, but has a pulse."""
        client = self._client
        assert client is not None, "an engine is running"
        now, num_beats = time.monotonic(), pulse.count
        late = now - looked - _LOOK_S
        if late > _LATE_S:
            client.last_progress = min(now, client.last_progress + late)
            client.last_advanced = min(now, client.last_advanced + late)
        if num_beats != self._num_beats:
            self._num_beats = num_beats
            client.last_progress = now
        return now

    def _trouble(self, begun: float) -> str | None:
        """Why the running engine has to go, if it has."""
        assert self._client is not None, "an engine is running"
        now, timeouts = time.monotonic(), self._timeouts
        if self.state is not State.READY:
            late = now - begun > timeouts.start_s
            return f"The engine was not ready after {timeouts.start_s:.0f} s." if late else None
        if self._client.is_broken:
            return "What the engine says cannot be read."
        if not self._client.num_open:
            return None
        if now - self._client.last_progress > timeouts.stall_s:
            return f"The engine made no progress for {timeouts.stall_s:.0f} s."
        if now - self._client.last_advanced > timeouts.loop_s:
            return f"The engine ran for {timeouts.loop_s:.0f} s and brought no request further."
        return None

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

    async def _end(self, within_s: float = _END_S) -> None:
        if self._client is not None and self._process is not None and self._process.poll() is None:
            self._client.stop()
            timeout = within_s if self._client.ready.done() else 0  # one that loads does not listen yet
            try:
                await self._wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await self._wait()
        self._drop("The server is ending.")

    async def _wait(self, within_s: float | None = None) -> None:
        """Until the process has ended. Raises TimeoutExpired."""
        assert self._process is not None, "there is one"
        await asyncio.get_running_loop().run_in_executor(self._waiters, self._process.wait, within_s)
