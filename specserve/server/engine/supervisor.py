"""Keeps an engine running: starts its process, notices when it has died or no longer moves, tells who waits, and starts
another."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from specserve.adapters import AdapterSource
from specserve.errors import EngineError
from specserve.machine.pulse import Pulse
from specserve.server.engine.client import LocalClient, Observer
from specserve.server.engine.keeper import EngineKeeper, State, Timeouts
from specserve.server.engine.spawn import EngineSpawner

_log = logging.getLogger(__name__)
_LOOK_S = 0.25  # between two looks at whether the engine moves
_LATE_S = 1.0  # a look that comes so much later says that this process did not run
_FIRST_PAUSE_S = 0.1  # before a restart; twice as long after each start that failed
_LONGEST_PAUSE_S = 30.0
_MOST_DOUBLED = 10  # times: long after the longest pause
_END_S, _HURRIED_END_S = 5.0, 1.0  # an engine that was asked to end is killed after so long


class Supervisor(EngineKeeper):
    """One engine after another, in processes of their own that die with this one.

    `observer` gets the events of all of them, and is told when one is gone. `options` are EngineConfig's fields; the
    processes come from `spawner`. Of several supervisors `name` tells this one apart in the log, and `num_engines` are
    started to share the machine's memory.
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
        super().__init__(observer, timeouts)
        self._options = dict(options)
        self._spawner = spawner or EngineSpawner()
        self._name, self._num_engines = name, num_engines
        self._exchanges_kv = False  # with engines beside it
        self._waiters = ThreadPoolExecutor(2, "specserve-wait")  # its own: those of the event loop are few
        self._process: subprocess.Popen[bytes] | None = None
        self._num_beats = 0  # of the running engine's pulse, at the last look
        self._begin()

    @property
    def pid(self) -> int | None:
        """The engine's process, while there is one."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    def kill(self) -> None:
        """End the engine's process, if there is one, as if it had died."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

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
            self._client = LocalClient(child.end, self._observer)
        except OSError as error:  # no descriptors, no memory
            return f"The engine's process cannot be started: {error}."
        self._process = child.process
        kv_timeout_s = self._timeouts.kv_s if self._exchanges_kv else 0.0
        self._client.configure(self._engine_options(), self._num_engines, kv_timeout_s)
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

    async def _end(self, hurried: bool) -> None:
        if self._client is not None and self._process is not None and self._process.poll() is None:
            self._client.stop()
            within_s = _HURRIED_END_S if hurried else _END_S
            timeout = within_s if self._client.ready.done() else 0  # one that loads does not listen yet
            try:
                await self._wait(timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await self._wait()
        self._drop("The server is ending.")
        self._spawner.close()
        self._waiters.shutdown(wait=False)

    async def _wait(self, within_s: float | None = None) -> None:
        """Until the process has ended. Raises TimeoutExpired."""
        assert self._process is not None, "there is one"
        await asyncio.get_running_loop().run_in_executor(self._waiters, self._process.wait, within_s)
