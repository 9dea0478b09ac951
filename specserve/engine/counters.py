"""What the engine counts and times, as totals by name."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from specserve.histogram import Histogram

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
    what of the total is in no phase. All that grammars do is in the phase "mask", also what they do while the target
    works, of which "forward" has then only the rest; `mask_per_step` and `mask_per_row` are its times of each step with
    constrained rows, and of each such row of them, draft nodes too."""

    num_steps: int = 0
    num_rows: int = 0  # without padding
    num_advanced: int = 0  # tokens that got KV for the first time: what is computed again after a preemption adds none
    num_prefill_chunks: int = 0  # pieces of a sequence that did not reach its end
    num_preemptions: int = 0
    num_aborted: int = 0
    num_drafts_dropped: int = 0
    num_jump_forward_tokens: int = 0  # drafted because a grammar forced them, of sequences that ended
    num_accepted_jump_forward_tokens: int = 0
    live_tokens: int = 0
    allocated_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES, "host", "total"), 0.0))
    draft_seconds: dict[str, float] = field(default_factory=dict)  # each drafter's part of the phase "draft"
    mask_per_step: Histogram = field(default_factory=Histogram)
    mask_per_row: Histogram = field(default_factory=Histogram)

    def timed(self, phase: str) -> _Timer:
        return _Timer(self.seconds, phase)

    def snapshot(self) -> Counters:
        times = {name: getattr(self, name) + Histogram() for name in ("mask_per_step", "mask_per_row")}
        return replace(self, seconds=dict(self.seconds), draft_seconds=dict(self.draft_seconds), **times)

    def end_step(self, mask_s: float, num_masked_rows: int) -> None:
        """After a step, whose masks took so long: the host's share is what the phases leave of the total."""
        if num_masked_rows:
            self.mask_per_step.add(mask_s)
            self.mask_per_row.add(mask_s / num_masked_rows, num_masked_rows)
        self.seconds["host"] = self.seconds["total"] - sum(self.seconds[phase] for phase in PHASES)
