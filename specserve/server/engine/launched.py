"""Engines that a launcher starts elsewhere: has a server's group join those that are there, and keeps as many as the
load needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from specserve.cluster.autoscaling import Autoscaler, Scaling
from specserve.cluster.launcher import EngineLauncher, Joined, Listening, Lost, News, Waiting
from specserve.cluster.router import Load
from specserve.server.engine.messages import Failed

_log = logging.getLogger(__name__)
_LOOK_S = 0.5  # between two looks at what there is to do
_LONGEST_DRAIN_S = 3600.0  # of an engine that is not needed any more: until its longest answer has ended


class Group(Protocol):
    """Engines that a server is connected to."""

    def add_engine(self, address: str) -> None:
        """Connect to the engine at HOST:PORT, again and again."""

    async def remove_engine(self, address: str, drain_s: float = 0.0) -> None:
        """Send it nothing new, let what runs there end for so long, and forget it."""

    @property
    def loads(self) -> Mapping[str, Load]:
        """What each that takes requests has to do, by its address."""


class Launched:
    """The membership of a group, to be run as long as the server: calls `make_launcher` then. Raises the launcher's
    ConfigError, and what makes the next start of an engine fail as well where none takes requests."""

    def __init__(self, make_launcher: Callable[[], EngineLauncher], scaling: Scaling, look_s: float = _LOOK_S) -> None:
        self._make_launcher, self._scaling, self._look_s = make_launcher, scaling, look_s
        self._addresses: dict[int, str] = {}  # by number, "" while it is started
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, group: Group) -> None:
        launcher = self._make_launcher()
        self._begin(self._scale(group, launcher))
        try:
            for _ in range(self._scaling.least):
                self._start_one(launcher)
            while True:
                await self._take(await launcher.news(), group)
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for address in filter(None, self._addresses.values()):
                await group.remove_engine(address, 0.0)
            await launcher.close()

    async def _take(self, news: News, group: Group) -> None:
        match news:
            case Joined():
                _log.info("Joined the cluster at %s, which has %d nodes.", news.address, news.num_nodes)
            case Listening() if news.number in self._addresses:
                await self._join(news.number, news.address, group)
            case Lost() if news.number in self._addresses:
                _log.error("Engine %d is lost: %s Another is being started.", news.number, news.cause)
                error = Failed(news.cause, news.final).error()
                if error is not None and not group.loads:
                    raise error
            case Waiting() if news.number in self._addresses:
                _log.warning("There is no room for engine %d. %s", news.number, news.cause)

    async def _join(self, number: int, address: str, group: Group) -> None:
        """In the place of the engine that had this number before."""
        before = self._addresses[number]
        if before == address:
            return
        others = [other for other, known in self._addresses.items() if known == address]
        self._addresses[number] = address
        if before:
            await group.remove_engine(before, 0.0)
        _log.info("Engine %d listens on %s.", number, address)
        for other in others:  # it is lost, and its address is this one's now
            self._addresses[other] = ""
        if not others:
            group.add_engine(address)

    async def _scale(self, group: Group, launcher: EngineLauncher) -> None:
        """Look again and again how many engines there should be, and see to it."""
        autoscaler = Autoscaler(self._scaling)
        while self._scaling.least < self._scaling.most:
            await asyncio.sleep(self._look_s)
            waits = [load.wait_ms for load in group.loads.values()]
            num_engines = len(self._addresses)
            wanted = autoscaler.wanted(asyncio.get_running_loop().time(), waits, num_engines)
            if wanted == num_engines:
                continue
            _log.info(
                "Requests are expected to wait %.0f ms at %d engines of %d: there will be %d.",
                sum(waits) / max(1, len(waits)), len(waits), num_engines, wanted,
            )  # fmt: skip
            for _ in range(num_engines, wanted):
                self._start_one(launcher)
            for _ in range(wanted, num_engines):
                self._end_one(group, launcher)

    def _start_one(self, launcher: EngineLauncher) -> None:
        """One whose number no other has, nor one that drains."""
        number = self._next
        self._next += 1
        self._addresses[number] = ""
        launcher.start(number)

    def _end_one(self, group: Group, launcher: EngineLauncher) -> None:
        """One that has not begun yet, or else that has least to do."""
        loads = group.loads

        def work(number: int) -> tuple[bool, int, int]:
            load = loads.get(self._addresses[number])
            return bool(self._addresses[number]), 0 if load is None else load.num_open, -number

        number = min(self._addresses, key=work)
        self._begin(self._leave(number, self._addresses.pop(number), group, launcher))

    async def _leave(self, number: int, address: str, group: Group, launcher: EngineLauncher) -> None:
        if address:
            await group.remove_engine(address, _LONGEST_DRAIN_S)
        launcher.end(number)
        _log.info("Engine %d has ended: there is not enough to do.", number)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("The number of engines cannot be changed any more.", exc_info=error)
