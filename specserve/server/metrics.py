"""What the server has done, counted from the engine's events: for /metrics, /stats and the log. One thread calls
everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol, get_args

from specserve.server import metrics_report
from specserve.server.engine.messages import Gauges
from specserve.server.metrics_families import CONTENT_TYPE, Service, exposition
from specserve.server.metrics_totals import (
    FIRST_TOKEN_BOUNDS,
    GAP_BOUNDS,
    REQUEST_BOUNDS,
    Acceptance,
    AdapterUse,
    ApiProcessStatus,
    Engines,
    Histogram,
    Prefill,
    ReplicaStatus,
    Traffic,
    Window,
    use_of,
)
from specserve.types import Event, FinishReason, SequenceStats

__all__ = ["CONTENT_TYPE", "Metrics"]

REFUSALS = (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 431, 500, 501, 503, 504)
_ENDED_WELL = ("stop", "length")
_MOST_OPEN = 65_536  # far above any queue; who forgets to end requests here cannot fill the memory


class _Open:
    """A request whose completions have not all ended."""

    __slots__ = (
        "last_event",
        "num_left",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_size",
        "replica",
        "stopped",
        "use",
    )

    def __init__(self, num_completions: int, num_prompt_tokens: int, use: AdapterUse | None, replica: int) -> None:
        self.use = use  # of its adapter
        self.replica = replica
        self.num_left = num_completions
        self.prompt_size = num_prompt_tokens
        self.num_prompt_tokens = num_prompt_tokens  # 0 once they are counted
        self.last_event: list[float | None] = [None] * num_completions
        self.num_tokens = [0] * num_completions
        self.stopped: set[int] = set()


class Times:
    """Histograms of seconds, under the names that they have in the exposition, and windows for percentiles.

    How long until the scheduler took a completion, and until its first token, is told of each that came so far; the
    times that end with its end, of those that were not cut off by an abort or an error.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.inter_token_latency = Histogram(GAP_BOUNDS)
        self.e2e_request_latency = Histogram(REQUEST_BOUNDS)
        self.request_queue_time = Histogram(REQUEST_BOUNDS)
        self.request_prefill_time = Histogram(REQUEST_BOUNDS)
        self.request_decode_time = Histogram(REQUEST_BOUNDS)
        self.windows = {name: Window() for name in ("time_to_first_token", "per_token", "end_to_end")}

    def add(self, stats: SequenceStats, num_tokens: int, ended_well: bool) -> None:
        if stats.first_scheduled is None:
            return
        self.request_queue_time.observe(stats.first_scheduled - stats.arrived)
        if stats.first_token is None:
            return
        self.request_prefill_time.observe(stats.first_token - stats.first_scheduled)
        self.time_to_first_token.observe(stats.first_token - stats.arrived)
        self.windows["time_to_first_token"].add(stats.first_token - stats.arrived)
        if ended_well and stats.finished is not None:
            self._add_end(stats.arrived, stats.first_token, stats.finished, num_tokens)

    def _add_end(self, arrived: float, first_token: float, finished: float, num_tokens: int) -> None:
        self.request_decode_time.observe(finished - first_token)
        self.e2e_request_latency.observe(finished - arrived)
        self.windows["end_to_end"].add(finished - arrived)
        if num_tokens > 1:
            self.windows["per_token"].add((finished - first_token) / (num_tokens - 1))


class RequestCounter(Protocol):
    """Is told what only the process knows that answers a request."""

    def stopped(self, request_id: str, index: int) -> None:
        """A stop string has ended this completion: the abort that the engine will report counts as "stop"."""

    def refused(self, status: int) -> None:
        """An error response was sent."""


class Metrics:
    """Counts for one served model. `clock` gives seconds, on the scale of SequenceStats.

    Its memory is bounded: one entry a request that is open, one a drafter, so many adapters, and windows of fixed size.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model = model
        self.clock = clock
        self.started = clock()
        self.traffic = Traffic(self.started)
        self.times = Times()
        self.acceptance: dict[str, Acceptance] = {}  # by drafter
        self.prefill = Prefill()
        self.adapters: dict[str, AdapterUse] = {}  # by name, as far as they have labels
        self.ended: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.refusals: dict[str, int] = dict.fromkeys([*map(str, REFUSALS), "other"], 0)
        self.engines = Engines()
        self._open: dict[str, _Open] = {}
        self._line = metrics_report.Line(self.started)

    def begin(
        self,
        request_id: str,
        num_completions: int,
        num_prompt_tokens: int,
        adapter: str | None = None,
        replica: int = 0,
    ) -> None:
        """A request goes to the engine under this id, or to that of one of several replicas."""
        use = None if adapter is None else use_of(self.adapters, adapter)
        self._open[request_id] = _Open(num_completions, num_prompt_tokens, use, replica)
        if len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]

    def notify(self, event: Event) -> None:
        """The engine reported this. Also to be called for requests that nobody waits for any more."""
        request = self._open.get(event.request_id)
        if request is None:
            return
        if event.tokens:
            self._count_tokens(request, event.index, len(event.tokens))
        if event.finish_reason is not None:
            self._end(request, event)

    def stopped(self, request_id: str, index: int) -> None:
        """See RequestCounter."""
        if (request := self._open.get(request_id)) is not None:
            request.stopped.add(index)

    def forget(self, request_id: str) -> None:
        """The engine has refused the request: it has no events."""
        self._open.pop(request_id, None)

    def lost(self) -> None:
        """The engine has died, and with it everything open. The gauges that it left must not come again."""
        self.ended["error"] += sum(request.num_left for request in self._open.values())
        self._open.clear()
        self.engines.lost()

    def lost_replica(self, replica: int) -> None:
        """One of several engines has died, and with it what was sent there."""
        gone = [name for name, request in self._open.items() if request.replica == replica]
        self.ended["error"] += sum(self._open.pop(name).num_left for name in gone)

    def of_replica(self, replica: int) -> ReplicaMetrics:
        """What observes that one of several engines."""
        return ReplicaMetrics(self, replica)

    def refused(self, status: int) -> None:
        """See RequestCounter."""
        self.refusals[str(status) if status in REFUSALS else "other"] += 1

    def exposition(
        self,
        gauges: Gauges | None,
        num_restarts: int,
        ready: bool,
        replicas: Sequence[ReplicaStatus] = (),
        processes: Sequence[ApiProcessStatus] = (),
    ) -> bytes:
        """The body of /metrics, in Prometheus' text format; its type is CONTENT_TYPE. Without an engine, or before its
        first step, `gauges` is None. Of several engines they are the sum, and `replicas` tells of each; `processes` of
        those that answer HTTP, where that is not this one."""
        service = Service(
            model=self.model,
            engine=self.engines.look(gauges),
            num_restarts=num_restarts,
            ready=ready,
            flow=self.traffic.total,
            ended=self.ended,
            refusals=self.refusals,
            prefill=self.prefill,
            acceptance=self.acceptance,
            adapters=self.adapters,
            times=vars(self.times),
            replicas=replicas,
            processes=processes,
        )
        return exposition(service)

    def stats(
        self,
        gauges: Gauges | None,
        num_restarts: int,
        state: str,
        replicas: Sequence[ReplicaStatus] = (),
        processes: Sequence[ApiProcessStatus] = (),
    ) -> dict[str, Any]:
        """The JSON of GET /stats. Times are in ms; what there is no value of yet is None. Arguments as `exposition`."""
        now = self.clock()
        flow, seconds = self.traffic.recent(now)
        totals = self.engines.look(gauges)
        return {
            "model": self.model,
            "state": state,
            "uptime_s": now - self.started,
            "num_restarts": num_restarts,
            **metrics_report.engine(totals),
            "tokens": metrics_report.tokens(self.traffic.total, flow, seconds),
            "latency_ms": metrics_report.latency(self.times.windows),
            "speculation": metrics_report.speculation(self.acceptance, flow, totals),
            "prefill": metrics_report.prefill(self.prefill, totals),
            "adapters": {name: asdict(use) for name, use in self.adapters.items()},
            "requests": dict(self.ended),
            "refused": {status: count for status, count in self.refusals.items() if count},
            **metrics_report.replicas(replicas),
            **metrics_report.api_processes(processes),
        }

    def status_line(self, gauges: Gauges | None) -> str | None:
        """One line for the log about the time since the last call; None when nothing has happened in it and no request
        is open."""
        ended, refused = sum(self.ended.values()), sum(self.refusals.values())
        happened = (self.traffic.total, ended, refused)
        return self._line.make(self.clock(), self.engines.look(gauges), happened, is_busy=bool(self._open))

    def _count_tokens(self, request: _Open, index: int, count: int) -> None:
        now = self.clock()
        flow = self.traffic.at(now)
        flow.num_generated_tokens += count
        flow.num_steps += 1
        last = request.last_event[index]
        request.last_event[index] = now
        request.num_tokens[index] += count
        if request.use is not None:
            request.use.num_generated_tokens += count
            request.use.num_prompt_tokens += request.num_prompt_tokens  # none once they are counted
        if last is None:
            flow.num_prompt_tokens += request.num_prompt_tokens  # once a request, whatever n is
            request.num_prompt_tokens = 0
        else:
            self.times.inter_token_latency.observe(now - last)

    def _end(self, request: _Open, event: Event) -> None:
        assert event.finish_reason is not None, "only an end ends"
        reason = "stop" if event.index in request.stopped else event.finish_reason
        self.ended[reason] += 1
        if request.use is not None:
            request.use.end(event.stats)
        if event.stats is not None:
            if event.index == 0 and event.stats.first_token is not None:
                self.prefill.add(event.stats, request.prompt_size)
            self.acceptance.setdefault(event.stats.drafter, Acceptance()).add(event.stats)
            self.times.add(event.stats, request.num_tokens[event.index], reason in _ENDED_WELL)
        request.num_left -= 1
        if request.num_left == 0:
            del self._open[event.request_id]


class ReplicaMetrics:
    """Counts what one of several engines reports."""

    def __init__(self, metrics: Metrics, replica: int) -> None:
        self._metrics, self._replica = metrics, replica
        self.notify, self.forget = metrics.notify, metrics.forget

    def begin(self, request_id: str, num_completions: int, num_prompt_tokens: int, adapter: str | None) -> None:
        self._metrics.begin(request_id, num_completions, num_prompt_tokens, adapter, self._replica)

    def lost(self) -> None:
        self._metrics.lost_replica(self._replica)
