"""How many engines there should be, from what a request is expected to wait for at each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scaling:
    """From `least` to `most` engines, so many that a request is expected to wait `target_ms` for the completions that
    were there before it. There are more once they have been too few for `up_s` seconds, and fewer once they have been
    too many for `down_s`: an engine takes seconds to start, and one that ends loses its prefix cache."""

    least: int
    most: int
    target_ms: float
    up_s: float = 3.0
    down_s: float = 60.0


class Autoscaler:
    """Says how many engines there should be, look after look."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._few: tuple[float, int] | None = None  # since when there have been too few, and the fewest that would do
        self._many: tuple[float, int] | None = None  # since when too many, and the most that were needed

    def wanted(self, now: float, waits_ms: Sequence[float], num_engines: int) -> int:
        """How many of `num_engines`, those that are being started included, there should be at the time `now`, in
        seconds of any clock. `waits_ms`: Load.wait_ms of each engine that has requests, draining ones included."""
        scaling = self._scaling
        needed = min(max(math.ceil(sum(waits_ms) / scaling.target_ms), scaling.least), scaling.most)
        few, many = self._few or (now, needed), self._many or (now, needed)
        self._few = (few[0], min(few[1], needed)) if needed > num_engines else None
        self._many = (many[0], max(many[1], needed)) if needed < num_engines else None
        if self._few is not None and now - self._few[0] >= scaling.up_s:
            return self._told(self._few[1])
        if self._many is not None and now - self._many[0] >= scaling.down_s:
            return self._told(self._many[1])
        return min(max(num_engines, scaling.least), scaling.most)

    def _told(self, num_engines: int) -> int:
        """What was seen before says nothing of how they do from now on."""
        self._few = self._many = None
        return num_engines
