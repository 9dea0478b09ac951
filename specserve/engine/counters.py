"""What the engine counts and times. Knows names and totals, nothing of what they mean to a user."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

PHASES = ("draft", "mask", "forward", "sample")


class _Timer:
    """Adds the time of a `with` block to a phase; several a step, so not a generator."""

    __slots__ = ("_phase", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds = seconds
        self._phase = phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._seconds[self._phase] += time.perf_counter() - self._start


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; use differences. `live_tokens` and `allocated_tokens` (KV slots that hold a
    committed token, and that belong to a sequence) are summed over steps. `seconds` has PHASES, "total", and "host":
    what of the total is in no phase."""

    num_steps: int = 0
    num_rows: int = 0  # without padding
    num_prefill_chunks: int = 0  # pieces of a sequence that did not reach its end
    num_preemptions: int = 0
    num_aborted: int = 0
    num_drafts_dropped: int = 0
    live_tokens: int = 0
    allocated_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "host", "total"), 0.0))

    def timed(self, phase: str) -> _Timer:
        return _Timer(self.seconds, phase)

    def snapshot(self) -> Counters:
        return replace(self, seconds=dict(self.seconds))

    def settle(self) -> None:
        """After a step: the host's share is what the phases leave of the total."""
        self.seconds["host"] = self.seconds["total"] - sum(self.seconds[phase] for phase in PHASES)
