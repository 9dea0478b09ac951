"""How often times came, in memory that does not grow with their number."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_SHORTEST_S, _BINS_PER_DOUBLING, _NUM_BINS = 1e-6, 8, 193  # up to 17 s


@dataclass(slots=True)
class Histogram:
    """How often a time came, by its logarithm: so many bins however many times come, and a percentile is at most 9 %
    above the true one. Those of a stretch are the difference of two."""

    counts: list[int] = field(default_factory=lambda: [0] * _NUM_BINS)

    def add(self, seconds: float, count: int = 1) -> None:
        place = math.ceil(_BINS_PER_DOUBLING * math.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S))
        self.counts[min(place, _NUM_BINS - 1)] += count

    def percentile(self, percent: float) -> float | None:
        """The seconds that this share of the times does not exceed, None without any."""
        wanted, seen = math.ceil(sum(self.counts) * percent / 100), 0
        for place, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return _SHORTEST_S * math.exp2(place / _BINS_PER_DOUBLING)
        return None

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram([a + b for a, b in zip(self.counts, other.counts, strict=True)])

    def __sub__(self, other: Histogram) -> Histogram:
        return Histogram([a - b for a, b in zip(self.counts, other.counts, strict=True)])
