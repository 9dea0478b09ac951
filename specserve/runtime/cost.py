"""What steps cost, as they were measured: those of decoding by their rows and context, and what each token of a prompt
adds, by the context it reads."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# What a change of each would give is in benchmarks/LOG.md (2026-11-26: what each constant of drafting is worth; and
# 2026-11-29: what steps seem to cost after others).
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)  # of steps that are told apart
_FADES = 0.002  # of what measurements count, with each step
_START, _FEW = 0.4, 0.5  # measurements: what the start counts as, and less than which is doubted
_MOST_OF_MACHINE = 10  # measurements that the machine's factor rests on: it changes all the time
_ALONE = 0.1  # logarithm: a step that takes longer than expected by more than this may be a pause
_NEAR, _FOLLOWS = 3, 0.5  # numbers of rows that follow one, and how far the next one does
_CONTEXT, _NUM_LOADS = 512, 16  # tokens that a step reads in all; twice as many are another load
_LISTED_EVERY = 8  # observations: until then decisions do without them
_TINY = 1e-9  # seconds of a step and of a token of a prompt, and measurements
_FIRST_CHUNK = 64  # tokens of a prompt, while nothing is known
_KEPT = 0.9  # of a sum, when another measurement comes: about the last ten count
_OUTLIER = 4.0  # times what was expected: more is a machine that paused


@dataclass(slots=True)
class _Part:
    """One factor of what a step takes: its logarithm, and how many measurements it rests on, those of a while ago for
    less."""

    log: float = 0.0
    num: float = 0.0
    at: int = 0  # the step after which that was so

    def num_known(self, now: int) -> float:
        return self.num * (1 - _FADES) ** (now - self.at)


class DecodeCost:
    """Seconds of a step of decoding by its rows and by how many tokens its sequences have in all.

    They are what a step of so many rows took at the start, times three factors: of the number of rows, of the load,
    which is how many tokens are read, and of the machine, which has slow and fast times. What a step took otherwise
    than expected moves all three, most of all what rests on the fewest measurements, as in a Kalman filter; so what
    every step has in common is found in those of few rows, too. A pause comes alone: a step that took longer counts as
    far as the one of as many rows before it did, and a little more. A number of rows that was not measured for a while,
    or only before there were requests, is doubted.
    """

    def __init__(self) -> None:
        self._shape = [0.0] * len(ROWS)  # seconds; 0: nothing is known
        self._rows = [_Part() for _ in ROWS]
        self._longer = [0.0] * len(ROWS)  # logarithms: what the newest step took, by what was expected
        self._loads: dict[int, _Part] = {}
        self._machine = _Part(num=_START)
        self._num_observed = 0
        self._by_rows: list[float] = []  # seconds of 0, 1, 2 ... rows, but for the other factors; never falling

    @property
    def is_known(self) -> bool:
        return bool(self._by_rows)

    def begin(self, seconds: NDArray[np.float64]) -> None:
        """Start from these seconds of steps of ROWS rows each over a short context."""
        self._shape = np.maximum.accumulate(np.maximum(seconds, _TINY)).tolist()
        self._rows, self._longer = [_Part(num=_START) for _ in ROWS], [0.0] * len(ROWS)
        self._loads, self._machine, self._num_observed = {}, _Part(num=_START), 0
        self._list()

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """A step of decoding alone took so long."""
        seconds = max(seconds, _TINY)
        if not self.is_known:
            self._shape = [seconds] * len(ROWS)
            self._list()
        self._num_observed += 1
        load, at, now = _load(context), row_class(rows), self._num_observed
        if load not in self._loads:
            self._loads[load] = _Part(self._of_load(load), _START, now)
        parts = self._rows[at], self._loads[load], self._machine
        is_new = not parts[0].num
        longer = math.log(seconds / self.seconds(rows, context))
        counted = longer if is_new else min(longer, max(self._longer[at], 0.0) + _ALONE)
        self._longer[at] = longer
        doubts = [1 / max(part.num_known(now), _TINY) for part in parts]
        self._lead(at, counted * doubts[0] / (sum(doubts) + 1))
        for part, doubt in zip(parts, doubts, strict=True):
            part.log += counted * doubt / (sum(doubts) + 1)
            part.num, part.at = part.num_known(now) + 1, now
        self._machine.num = min(self._machine.num, _MOST_OF_MACHINE)
        if is_new or self._num_observed % _LISTED_EVERY == 0:
            self._list()

    def _lead(self, at: int, moved: float) -> None:
        """A number of rows moves by so much; others that little is known of follow it, the less the further they are:
        what a start measured wrong is seldom wrong for one alone."""
        for other, part in enumerate(self._rows[: at + _NEAR + 1]):
            if 0 < abs(other - at) <= _NEAR and (num := part.num_known(self._num_observed)):
                part.log += moved * _FOLLOWS ** abs(other - at) * min(_START / num, 1.0)

    def seconds(self, rows: int, context: int = 0) -> float:
        """Of a step; 0 while nothing is known."""
        return self.curve(rows, 0, context)[0]

    def is_doubted(self, rows: int) -> bool:
        """Whether what so many rows take should be measured anew."""
        return self._rows[row_class(rows)].num_known(self._num_observed) < _FEW

    def curve(self, rows: int, more: int, context: int = 0) -> list[float]:
        """Seconds of steps of `rows` to `rows` + `more` rows, [more + 1], never falling."""
        if not self.is_known:
            return [0.0] * (more + 1)
        factor = math.exp(self._machine.log + self._of_load(_load(context)))
        last = len(self._by_rows) - 1
        found = [factor * seconds for seconds in self._by_rows[rows : rows + more + 1]]
        slope = factor * (self._by_rows[last] - self._by_rows[last // 2]) / (last - last // 2)
        beyond = range(max(rows, last + 1), rows + more + 1)
        return found + [factor * self._by_rows[last] + (at - last) * slope for at in beyond]

    def _list(self) -> None:
        seconds = [s * math.exp(part.log) for s, part in zip(self._shape, self._rows, strict=True)]
        rising = _rising(seconds, [part.num_known(self._num_observed) for part in self._rows])
        self._by_rows = np.interp(range(ROWS[-1] + 1), ROWS, rising).tolist()

    def _of_load(self, load: int) -> float:
        """The factor's logarithm of the nearest load that was measured."""
        if not self._loads:
            return 0.0
        nearest = load if load in self._loads else min(self._loads, key=lambda known: abs(known - load))
        return self._loads[nearest].log


def _rising(values: list[float], weights: list[float]) -> NDArray[np.float64]:
    """The nearest values that never fall, by their weights: neighbours that would fall are averaged."""
    found: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        weight, count = weight + _TINY, 1
        while found and found[-1][0] > value:
            mean, more, others = found.pop()
            value, weight, count = (mean * more + value * weight) / (more + weight), more + weight, count + others
        found.append((value, weight, count))
    return np.repeat([value for value, _, _ in found], [count for _, _, count in found])


def row_class(rows: int) -> int:
    """Which of ROWS stands for so many."""
    return bisect_left(ROWS, rows, hi=len(ROWS) - 1)


def _load(context: int) -> int:
    return min((context // _CONTEXT).bit_length(), _NUM_LOADS)


class StepCost:
    """Seconds of a step with rows of decoding and chunks of prompts: those of decoding + the sum over the chunks'
    tokens of (a + b * context), context being how many tokens a token reads. a and b are the line through the newest
    measurements, each a step's seconds above those of decoding, by token."""

    def __init__(self) -> None:
        self.decoding = DecodeCost()
        self._sums = np.zeros(5)  # over measurements, decayed: of 1, context, seconds, context^2, context * seconds

    def observe(self, rows: int, context: int, tokens: int, read: float, seconds: float) -> None:
        """A step took so long: `rows` of decoding, whose sequences have `context` tokens in all, and `tokens` of
        prompts that read `read` tokens on average."""
        if tokens:
            decoding = self.decoding.seconds(rows, context) if rows else 0.0
            self._observe_chunks((seconds - decoding) / tokens, read)
        elif rows:
            self.decoding.observe(rows, context, seconds)

    def seconds(self, rows: int, context: int, tokens: int, read: float) -> float:
        """Of such a step; 0 where too little is known."""
        decoding = self.decoding.seconds(rows, context) if rows else 0.0
        return decoding + self.added(tokens, round(read - tokens / 2)) if self.decoding.is_known else 0.0

    def chunk(self, seconds: float, context: int) -> int:
        """How many tokens of a prompt that has `context` tokens in the cache may be added to a step for so long."""
        if not self._sums[0]:
            return _FIRST_CHUNK
        a, b = self._line()
        a += b * context
        # n (a + b n / 2) = seconds; this form of the root does not divide by b, which may be 0
        return int(2 * max(seconds, 0.0) / (a + math.sqrt(a * a + 2 * b * max(seconds, 0.0))))

    def added(self, tokens: int, context: int) -> float:
        """Seconds that so many tokens of that prompt add."""
        if not self._sums[0]:
            return 0.0
        a, b = self._line()
        return tokens * (a + b * (context + tokens / 2))

    @property
    def prompt_line(self) -> tuple[float, float]:
        """Seconds that a token of a prompt adds: a, and b for each token that it reads; 0: nothing is known."""
        return self._line() if self._sums[0] else (0.0, 0.0)

    def _observe_chunks(self, seconds: float, context: float) -> None:
        if self._sums[0]:
            a, b = self._line()
            seconds = min(seconds, _OUTLIER * (a + b * context))
        seconds = max(seconds, _TINY)
        self._sums *= _KEPT
        self._sums += (1.0, context, seconds, context * context, context * seconds)

    def _line(self) -> tuple[float, float]:
        """a above 0 and b of at least 0, by least squares."""
        mean, level, square, product = (self._sums[1:] / self._sums[0]).tolist()
        spread = square - mean * mean
        slope = (product - mean * level) / spread if spread > 1.0 else 0.0
        b = min(max(slope, 0.0), 0.9 * level / mean if mean else 0.0)
        return level - b * mean, b
