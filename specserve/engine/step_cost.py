"""What steps cost, as they were measured: those of decoding, and what each token of a prompt adds, by the context it
reads."""

from __future__ import annotations

import math

import numpy as np

from specserve.speculation.cost import DecodeCost

_FIRST_CHUNK = 64  # tokens of a prompt, while nothing is known
_KEPT = 0.9  # of a sum, when another measurement comes: about the last ten count
_SHORTEST_S = 1e-9  # a token
_OUTLIER = 4.0  # times what was expected: more is a machine that paused


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

    def _observe_chunks(self, seconds: float, context: float) -> None:
        if self._sums[0]:
            a, b = self._line()
            seconds = min(seconds, _OUTLIER * (a + b * context))
        seconds = max(seconds, _SHORTEST_S)
        self._sums *= _KEPT
        self._sums += (1.0, context, seconds, context * context, context * seconds)

    def _line(self) -> tuple[float, float]:
        """a above 0 and b of at least 0, by least squares."""
        mean, level, square, product = (self._sums[1:] / self._sums[0]).tolist()
        spread = square - mean * mean
        slope = (product - mean * level) / spread if spread > 1.0 else 0.0
        b = min(max(slope, 0.0), 0.9 * level / mean if mean else 0.0)
        return level - b * mean, b
