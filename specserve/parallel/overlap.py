"""How many steps of a model in stages are under way at once: as many as were measured to serve sequences soonest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from specserve.runtime.cost import DecodeCost

_KEPT = 0.9  # of sums, when another step ends: about the last ten count
_FEW = 4  # steps: what fewer have shown is not believed yet
_AGAIN = 512  # steps, after which what was not tried since may be worth it again
_BETTER = 0.98  # of what one step at a time takes: less is worth more steps


class _Kind(NamedTuple):
    """Steps of one kind: of so many at once, about so many sequences that decode, with chunks of prompts or without."""

    num: int
    size: int
    has_chunks: bool


@dataclass(slots=True)
class _Speed:
    """What steps would have taken one at a time, and what they took, in seconds of the newest ones."""

    expected: float = 0.0
    taken: float = 0.0
    num_steps: int = 0
    at: int = 0  # the newest one's number


class Overlap:
    """Several steps under way have a part of the sequences each: while one stage computes one of them the next computes
    another, and all read the weights that a single step for all would have read once. So what a round of all sequences
    takes is measured, by number of steps, against what it would take in one step at a time, by `cost`.

    One step at a time is tried first, and again after a while, so that `cost` knows what it takes; what else was not
    tried, or not for a while, is taken for as good as can be. One step at a time is the only way for a single sequence
    that decodes, and for executors that take `most` = 1.
    """

    def __init__(self, cost: DecodeCost, most: int) -> None:
        self.most, self.num = most, 1
        self.gain = 1.0  # how many times as fast as one step at a time
        self._cost = cost
        self._speeds: dict[_Kind, _Speed] = {}
        self._kind = _Kind(1, 0, False)
        self._level = 1.0  # of what steps take beside others, times what they take alone
        self._width = 1.0  # rows of a sequence that decodes, with its draft
        self._num_ended = self._num_since = 0  # steps; since their number has changed
        self._last: float | None = None  # when the last one ended

    def choose(self, num_seqs: int, context: int, chunk_s: float) -> int:
        """How many shall be under way now, for so many sequences that decode, which have `context` tokens in all, and
        chunks of prompts that are to take `chunk_s` seconds of a round."""
        if self.most == 1:
            return 1
        before, alone = self.num, 0.0
        for num in range(1, self.most + 1):
            parts = min(num, max(num_seqs, 1))
            if parts < num and not chunk_s:
                break
            kind = _Kind(num, min(1, num_seqs) if chunk_s else num_seqs.bit_length(), chunk_s > 0)
            speed = self._speed(kind)
            rows = max(1, round(self._width * num_seqs / parts))
            decoding = parts * self._cost.seconds(rows, context // parts) if num_seqs else 0.0
            seconds = (decoding + chunk_s) / (speed or num)
            if num == 1:
                best, alone = _BETTER * seconds, decoding + chunk_s
                self.num, self._kind, self.gain = 1, kind, 1.0
                if speed is None:
                    break
            elif seconds < best:
                best, self.num, self._kind = seconds, num, kind
                self.gain = max(1.0, alone / seconds)
        if self.num != before:
            self._num_since = 0
        return self.num

    def ended(self, rows: int, num_seqs: int, expected: float, seconds: float, is_alone: bool) -> float:
        """A step has ended, with so many rows of sequences that decode, which took so long in all its stages and was
        expected to take `expected` seconds. Returns what it would have taken alone."""
        if self.most == 1:
            return seconds
        if num_seqs:
            self._width += (1 - _KEPT) * (rows / num_seqs - self._width)
        now, last = time.perf_counter(), self._last
        self._last = now
        self._num_ended += 1
        self._num_since += 1
        if last is not None and self._num_since > self.num and expected:
            found = self._speeds.setdefault(self._kind, _Speed())
            if self._num_ended - found.at > _AGAIN:
                found.expected = found.taken = found.num_steps = 0
            found.expected = _KEPT * found.expected + expected
            found.taken = _KEPT * found.taken + now - last
            found.num_steps += 1
            found.at = self._num_ended
        if is_alone or not expected:
            return seconds
        self._level += (1 - _KEPT) * (seconds / expected - self._level)
        return seconds / self._level

    def pause(self) -> None:
        """There is nothing to do: time passes that no step takes."""
        self._last = None

    def _speed(self, kind: _Kind) -> float | None:
        """Times that of steps one at a time, as `cost` has them; None: too little is known."""
        found = self._speeds.get(kind)
        if found is None or found.num_steps < _FEW or self._num_ended - found.at > _AGAIN:
            return None
        return found.expected / found.taken
