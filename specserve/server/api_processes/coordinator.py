"""Processes that answer HTTP on one address, from the side of the one that has the engines: what they ask goes through
it, so that engines, counts and limits are those of one server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from specserve.machine.pulse import shared_memory
from specserve.server.admission import Counts
from specserve.server.api_processes.child import ApiProcess
from specserve.server.api_processes.messages import Given, Now
from specserve.server.api_processes.session import Shared
from specserve.server.api_processes.table import COORDINATOR, SharedCounts, Table
from specserve.server.engine.group import ReplicaGroup
from specserve.server.engine.keeper import EngineKeeper, Timeouts
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.http.listen import Sockets, tls_files
from specserve.server.metrics import Metrics
from specserve.server.metrics_totals import ApiProcessStatus
from specserve.server.reports import OwnReports
from specserve.server.settings import Settings

_SPREAD_S = 0.05  # between two looks at whether something of the engines has changed


class ApiProcesses:
    """As a Front, of `settings.options.api_processes` processes. `timeline` is told with the engines' state. What is
    counted is in `counts`.

    They take connections from one socket that all have inherited: whoever is free takes the next. One that is stopped
    or dies takes none, and what waits there is left to the others; sockets of their own (SO_REUSEPORT) would keep
    their share of the connections waiting, and drop it with them.

    `finished` is done when there will be no process any more: its exception says why, None after `close`.
    """

    def __init__(
        self,
        settings: Settings,
        engines: EngineKeeper | ReplicaGroup[Any],
        metrics: Metrics,
        validator: GrammarValidator,
        timeline: Mapping[str, float],
    ) -> None:
        options = settings.options
        self._size = options.api_processes
        self._timeouts = Timeouts(options.start_timeout_s, options.stall_timeout_s)
        self._settings = msgspec.structs.replace(settings, tls=tls_files(options))  # a file may change
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._memory = shared_memory()
        self._table = Table(self._memory, self._size)
        self.counts: Counts = SharedCounts(self._table, COORDINATOR)
        reports = OwnReports(metrics, engines, lambda: self.counts.draining, self.statuses)
        self._shared = Shared(
            engines=engines, metrics=metrics, validator=validator, reports=reports, spread=self._spread
        )
        self._engines, self._validator, self._timeline = engines, validator, timeline
        self._sockets = Sockets(options)
        self._processes: list[ApiProcess] = []
        self._now = Now(0, engines.state.value, None, [], {})
        self._spreading: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self._sockets.address

    def statuses(self) -> Sequence[ApiProcessStatus]:
        return [each.status for each in self._processes]

    async def start(self) -> None:
        """Raises ConfigError for an address or a certificate that cannot be used, EngineError for processes that cannot
        be started."""
        await self._sockets.open()
        self._table.beat(COORDINATOR)
        self._spreading = asyncio.create_task(self._keep_spreading())
        self._spreading.add_done_callback(self._one_finished)  # without it processes would go by what was
        self._processes = [self._process(row) for row in range(1, self._size + 1)]
        up = asyncio.gather(*(each.has_been_up.wait() for each in self._processes))
        ends: list[asyncio.Future[Any]] = [up, self.finished]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                await self.finished
        finally:
            up.cancel()
            await asyncio.gather(up, return_exceptions=True)

    async def close(self) -> None:
        """Those who are being answered were told that the engines are gone, and hear of it."""
        await asyncio.gather(*(each.close() for each in self._processes))
        if self._spreading is not None:
            self._spreading.cancel()
        self._sockets.close()
        os.close(self._memory)
        self._validator.close()
        if not self.finished.done():
            self.finished.set_result(None)

    def _process(self, row: int) -> ApiProcess:
        process = ApiProcess(
            row,
            self._table,
            self._memory,
            self._sockets.descriptors,
            self._shared,
            self._given,
            lambda: self._now,
            self._may_give_up,
            self._timeouts,
        )
        process.finished.add_done_callback(self._one_finished)
        return process

    def _given(self, row: int, num_starts: int) -> Given:
        return Given(self._settings, row, self._size, f"{row}.{num_starts}.", self._timeouts.stall_s)

    def _may_give_up(self, process: ApiProcess) -> bool:
        return not process.has_been_up.is_set() or not any(each.is_up for each in self._processes)

    def _one_finished(self, future: asyncio.Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not self.finished.done():
            self.finished.set_exception(error)

    async def _keep_spreading(self) -> None:
        while True:
            self._table.beat(COORDINATOR)
            if self._look():
                for each in self._processes:
                    if each.session is not None:
                        each.session.tell(self._now)
            await asyncio.sleep(_SPREAD_S)

    async def _spread(self) -> None:
        """Have all processes go by what is so of the engines now."""
        self._look()
        sessions = [each.session for each in self._processes if each.session is not None]
        await asyncio.gather(*(session.goes_by(self._now) for session in sessions))

    def _look(self) -> bool:
        """Whether something of the engines has changed."""
        engines, before = self._engines, self._now
        adapters, timeline = list(engines.adapters.values()), dict(self._timeline)
        now = Now(before.version, engines.state.value, engines.ready, adapters, timeline, engines.num_places)
        if now == before:
            return False
        self._now = msgspec.structs.replace(now, version=before.version + 1)
        return True
