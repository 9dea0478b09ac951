"""What /metrics and /stats say, made where everything is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from specserve.server.engine.group import ReplicaGroup
from specserve.server.engine.keeper import EngineKeeper, State
from specserve.server.metrics import Metrics
from specserve.server.metrics_totals import ApiProcessStatus


class Reports(Protocol):
    """Both raise WireError where what they tell of does not answer."""

    async def exposition(self) -> bytes:
        """The body of /metrics."""

    async def stats(self) -> dict[str, Any]:
        """The JSON of /stats."""


class OwnReports:
    """Those of the process that has the engines. `is_draining`: whether the server takes nothing new; `processes`:
    those that answer HTTP, where they are others."""

    def __init__(
        self,
        metrics: Metrics,
        engines: EngineKeeper | ReplicaGroup[Any],
        is_draining: Callable[[], bool],
        processes: Callable[[], Sequence[ApiProcessStatus]] = tuple,
    ) -> None:
        self._metrics, self._engines = metrics, engines
        self._is_draining, self._processes = is_draining, processes

    async def exposition(self) -> bytes:
        return self.exposition_now()

    async def stats(self) -> dict[str, Any]:
        return self.stats_now()

    def exposition_now(self) -> bytes:
        engines, is_ready = self._engines, self._engines.state is State.READY
        now = engines.gauges, engines.num_restarts, is_ready, engines.replicas, self._processes()
        return self._metrics.exposition(*now)

    def stats_now(self) -> dict[str, Any]:
        engines = self._engines
        state = "draining" if self._is_draining() else engines.state.value
        return self._metrics.stats(engines.gauges, engines.num_restarts, state, engines.replicas, self._processes())
