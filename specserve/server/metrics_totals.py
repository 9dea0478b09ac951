"""What /metrics, /stats and the log count and time: histograms, rates, windows, totals."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

from specserve.engine.counters import PHASES
from specserve.server.engine.messages import Gauges
from specserve.types import SequenceStats

STEP_PHASES = (*PHASES, "host")  # they add up to the whole of a step
RATE_SECONDS = 10
MOST_ADAPTERS = 32  # that have a label of their own; later ones share OTHER
OTHER = "other"
WINDOW = 1024  # completions over which percentiles are taken

# vLLM's buckets, in seconds: what draws its histograms draws these.
FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip


class Histogram:
    """Counts of values up to and including each bound, and their sum. `counts` has one more for what is above all."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Window:
    """The newest values, and percentiles of them."""

    def __init__(self, size: int = WINDOW) -> None:
        self._values: deque[float] = deque(maxlen=size)

    def add(self, value: float) -> None:
        self._values.append(value)

    def percentiles(self, percents: Sequence[int] = (50, 90, 99)) -> dict[str, float | None]:
        """The smallest value that this share of all does not exceed, under `p50` and so on; None without values."""
        values = sorted(self._values)
        ranks = [-(-percent * len(values) // 100) for percent in percents]
        return {f"p{p}": values[rank - 1] if values else None for p, rank in zip(percents, ranks, strict=True)}


@dataclass(slots=True)
class Flow:
    """Tokens and verify steps: since the start, and of one second."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0  # those that emitted tokens

    def add(self, other: Flow) -> None:
        self.num_prompt_tokens += other.num_prompt_tokens
        self.num_generated_tokens += other.num_generated_tokens
        self.num_steps += other.num_steps

    def minus(self, other: Flow) -> Flow:
        return Flow(*(getattr(self, entry.name) - getattr(other, entry.name) for entry in fields(Flow)))

    @property
    def tokens_per_step(self) -> float | None:
        return self.num_generated_tokens / self.num_steps if self.num_steps else None


class Traffic:
    """How many tokens flow: `total` up to the last whole second and `second`, the flow in the one that has begun."""

    def __init__(self, now: float) -> None:
        self._started = now
        self._past: deque[tuple[int, Flow]] = deque(maxlen=RATE_SECONDS - 1)
        self._settled = Flow()
        self._second = int(now)
        self._current = Flow()

    def at(self, now: float) -> Flow:
        """Where to add what happens now."""
        if int(now) != self._second:
            self._past.append((self._second, self._current))
            self._settled.add(self._current)
            self._second, self._current = int(now), Flow()
        return self._current

    @property
    def total(self) -> Flow:
        total = replace(self._settled)
        total.add(self._current)
        return total

    def recent(self, now: float) -> tuple[Flow, float]:
        """What has flowed since the second began that lies 9 before this one, and how many seconds ago that was (less
        after a start, but never less than one)."""
        first = int(now) - RATE_SECONDS + 1
        flow = Flow()
        for second, part in (*self._past, (self._second, self._current)):
            if second >= first:
                flow.add(part)
        return flow, max(1.0, min(now - first, now - self._started))


@dataclass(slots=True)
class Prefill:
    """Where the prompts of completions that ended were computed, each request's once, and their tokens. `cached` ones
    were computed for an earlier request; what a preemption made the engine compute again is not counted."""

    num_prompts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("here", "elsewhere"), 0))
    num_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("here", "elsewhere", "cached"), 0))

    def add(self, stats: SequenceStats, num_tokens: int) -> None:
        elsewhere, cached = stats.num_received_tokens, stats.num_prefix_cached_tokens
        self.num_prompts["elsewhere" if elsewhere else "here"] += 1
        for place, count in (("elsewhere", elsewhere), ("cached", min(cached, num_tokens - elsewhere))):
            self.num_tokens[place] += count
            num_tokens -= count
        self.num_tokens["here"] += num_tokens


@dataclass(slots=True)
class Acceptance:
    """How the drafts of ended sequences fared. Words and counts are those of SequenceStats."""

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_jump_forward_tokens: int = 0
    num_accepted_jump_forward_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    by_source: dict[str, list[int]] = field(default_factory=dict)

    def add(self, stats: SequenceStats | Acceptance) -> None:
        self.num_steps += stats.num_steps
        self.num_drafts += stats.num_drafts
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted_tokens += stats.num_accepted_tokens
        self.num_jump_forward_tokens += stats.num_jump_forward_tokens
        self.num_accepted_jump_forward_tokens += stats.num_accepted_jump_forward_tokens
        longer = len(stats.accepted_by_position) - len(self.accepted_by_position)
        self.accepted_by_position += [0] * longer
        for i, count in enumerate(stats.accepted_by_position):
            self.accepted_by_position[i] += count
        for source, (drafted, accepted) in stats.by_source.items():
            counts = self.by_source.setdefault(source, [0, 0])
            counts[0] += drafted
            counts[1] += accepted

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a verify step emits; None before the first."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None


def together(parts: Iterable[Acceptance]) -> Acceptance:
    whole = Acceptance()
    for part in parts:
        whole.add(part)
    return whole


@dataclass(slots=True)
class AdapterUse:
    """What requests with one LoRA adapter had. Steps and drafts are of completions that ended."""

    num_completions: int = 0  # ended
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def end(self, stats: SequenceStats | None) -> None:
        self.num_completions += 1
        if stats is not None:
            self.num_steps += stats.num_steps
            self.num_draft_tokens += stats.num_draft_tokens
            self.num_accepted_tokens += stats.num_accepted_tokens


def use_of(uses: dict[str, AdapterUse], adapter: str) -> AdapterUse:
    """That of an adapter. Names come and go while a server runs, and labels of metrics stay: only so many get one."""
    name = adapter if adapter in uses or len(uses) < MOST_ADAPTERS else OTHER
    return uses.setdefault(name, AdapterUse())


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One of several engines that serve together: what is so now, and totals of all that ran in its place."""

    state: str
    num_restarts: int
    num_requests: int  # that were sent to it
    gauges: Gauges
    role: str = "both"  # "prefill": computes prompts for others; "decode": answers; "both"
    address: str = ""  # of an engine elsewhere


@dataclass(frozen=True, slots=True)
class ApiProcessStatus:
    """One of several processes that answer HTTP. `state`: "starting", "ready" or "restarting"."""

    state: str
    num_restarts: int
    num_requests: int  # to engines, that it is answering


_NO_ENGINE = Gauges(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, dict.fromkeys((*STEP_PHASES, "total"), 0.0), {})
_SUMMED = (
    "num_steps", "num_rows", "num_preemptions", "num_prefix_query_tokens", "num_prefix_hit_tokens",
    "num_drafts_dropped", "num_adapter_loads", "num_adapter_evictions", "num_prompts_received",
    "num_prompt_tokens_received", "num_transfer_failures", "transfer_s", "num_empty_steps",
)  # fmt: skip


class Engines:
    """One engine after another as if they were one, whose totals never fall."""

    def __init__(self) -> None:
        self._gone = _NO_ENGINE
        self._last = _NO_ENGINE

    def look(self, gauges: Gauges | None) -> Gauges:
        """Totals of all engines so far. Without an engine nothing runs, waits or holds memory."""
        self._last = gauges or replace(self._last, num_running=0, num_waiting=0, num_free_blocks=0, num_blocks=0)
        sums = {name: getattr(self._gone, name) + getattr(self._last, name) for name in _SUMMED}
        seconds = {name: self._gone.seconds[name] + self._last.seconds.get(name, 0.0) for name in _NO_ENGINE.seconds}
        gone, last = self._gone.draft_seconds, self._last.draft_seconds
        drafting = {source: gone.get(source, 0.0) + last.get(source, 0.0) for source in gone | last}
        return replace(self._last, **sums, seconds=seconds, draft_seconds=drafting)

    def lost(self) -> None:
        """The next gauges are another engine's."""
        self._gone = self.look(None)
        self._last = _NO_ENGINE


def summed(parts: Sequence[Gauges]) -> Gauges:
    """Of several engines as if they were one."""
    numbers = {
        entry.name: sum(getattr(part, entry.name) for part in parts)
        for entry in fields(Gauges)
        if entry.name not in ("seconds", "draft_seconds")
    }
    seconds = {name: sum(part.seconds.get(name, 0.0) for part in parts) for name in _NO_ENGINE.seconds}
    sources = dict.fromkeys(source for part in parts for source in part.draft_seconds)
    drafting = {source: sum(part.draft_seconds.get(source, 0.0) for part in parts) for source in sources}
    return Gauges(**numbers, seconds=seconds, draft_seconds=drafting)
