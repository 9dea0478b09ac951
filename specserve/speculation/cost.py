"""What steps of decoding cost by their rows and context, as they were measured."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from specserve.speculation import constants as tuned


class DecodeCost:
    """Seconds of a step of decoding by its rows and by how many tokens its sequences have in all.

    What one number of rows takes in proportion to another is a shape; a load, which is how many tokens are read, has a
    factor for all of them. A step moves the factor of its load a little, and its number of rows within the shape more.
    A number of rows that was not measured for a while, or only before there were requests, is doubted.
    """

    def __init__(self) -> None:
        self._shape = np.zeros(len(tuned.ROWS))  # seconds; 0: nothing is known
        self._apart = np.zeros(len(tuned.ROWS))  # logarithms of what the shape is multiplied with
        self._num = np.zeros(len(tuned.ROWS))  # measurements, those of a while ago for less
        self._factors: dict[int, float] = {}  # logarithms, by load
        self._num_observed = 0
        self._by_rows: list[float] = []  # seconds of 0, 1, 2 ... rows, but for the factor; never falling

    @property
    def is_known(self) -> bool:
        return bool(self._by_rows)

    def begin(self, seconds: NDArray[np.float64]) -> None:
        """Start from these seconds of steps of ROWS rows each over a short context."""
        self._shape = np.maximum.accumulate(np.maximum(seconds, tuned.SHORTEST_S))
        self._apart[:], self._num[:] = 0, tuned.START
        self._factors.clear()
        self._list()

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """A step of decoding alone took so long."""
        seconds = max(seconds, tuned.SHORTEST_S)
        if not self.is_known:
            self._shape[:] = seconds
            self._list()
        load, at = _load(context), row_class(rows)
        ratio = seconds / self.seconds(rows, context)
        is_new = not self._num[at]
        ratio = math.log(ratio if is_new else min(ratio, tuned.MOST))
        self._num *= 1 - tuned.FADES
        if load not in self._factors:
            self._factors[load] = self._factor(load) + ratio
        else:
            self._apart[at] += max(tuned.FOLLOWS, 1 / (self._num[at] + 1)) * ratio
            self._factors[load] += tuned.DRIFTS * min(max(ratio, -tuned.SUDDEN), tuned.SUDDEN)
        self._num[at] += 1
        self._num_observed += 1
        if is_new or self._num_observed % tuned.LISTED_EVERY == 0:
            self._list()

    def seconds(self, rows: int, context: int = 0) -> float:
        """Of a step; 0 while nothing is known."""
        return self.curve(rows, 0, context)[0]

    def is_doubted(self, rows: int) -> bool:
        """Whether what so many rows take should be measured anew."""
        return bool(self._num[row_class(rows)] < tuned.FEW)

    def curve(self, rows: int, more: int, context: int = 0) -> list[float]:
        """Seconds of steps of `rows` to `rows` + `more` rows, [more + 1], never falling."""
        if not self.is_known:
            return [0.0] * (more + 1)
        factor = math.exp(self._factor(_load(context)))
        last = len(self._by_rows) - 1
        found = [factor * seconds for seconds in self._by_rows[rows : rows + more + 1]]
        slope = factor * (self._by_rows[last] - self._by_rows[last // 2]) / (last - last // 2)
        beyond = range(max(rows, last + 1), rows + more + 1)
        return found + [factor * self._by_rows[last] + (at - last) * slope for at in beyond]

    def _list(self) -> None:
        rising = _rising(self._shape * np.exp(self._apart), self._num)
        self._by_rows = np.interp(range(tuned.ROWS[-1] + 1), tuned.ROWS, rising).tolist()

    def _factor(self, load: int) -> float:
        """That of the nearest load that was measured."""
        if not self._factors:
            return 0.0
        nearest = load if load in self._factors else min(self._factors, key=lambda known: abs(known - load))
        return self._factors[nearest]


def _rising(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest values that never fall, by their weights: neighbours that would fall are averaged."""
    found: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), (weights + tuned.SHORTEST_S).tolist(), strict=True):
        count = 1
        while found and found[-1][0] > value:
            mean, more, others = found.pop()
            value, weight, count = (mean * more + value * weight) / (more + weight), more + weight, count + others
        found.append((value, weight, count))
    return np.repeat([value for value, _, _ in found], [count for _, _, count in found])


def row_class(rows: int) -> int:
    """Which of ROWS stands for so many."""
    return bisect_left(tuned.ROWS, rows, hi=len(tuned.ROWS) - 1)


def _load(context: int) -> int:
    return min((context // tuned.CONTEXT).bit_length(), tuned.NUM_LOADS)
