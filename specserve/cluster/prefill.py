"""Whether a prompt is computed where it is answered, or by an engine that only computes prompts."""

from __future__ import annotations

import time
from collections.abc import Callable

_UNMEASURED_MS = 20.0  # that a transfer counts as before one was measured
_LONGEST_PAUSE_S, _MOST_DOUBLED = 30.0, 10
_KEPT = 0.9  # of earlier measurements with each new one
_FORGOTTEN = 0.99  # of what a transfer is thought to cost, each time that it was too much, or none was tried again


class TransferCost:
    """Milliseconds that KV takes from one engine to another, as measured: by token, and no fewer than the shortest."""

    def __init__(self) -> None:
        self._ms = self._tokens = 0.0
        self._least = float("inf")

    def observe(self, num_tokens: int, milliseconds: float) -> None:
        """KV of so many tokens took so long, from asking for it to having it."""
        self._ms = _KEPT * self._ms + milliseconds
        self._tokens = _KEPT * self._tokens + num_tokens
        self._least = min(self._least, milliseconds)

    def milliseconds(self, num_tokens: int) -> float:
        if not self._tokens:
            return _UNMEASURED_MS
        return max(self._least, num_tokens * self._ms / self._tokens)

    def pays(self, num_tokens: int, prompt_token_ms: float) -> bool:
        """Whether to compute so many tokens, of which each takes that long, costs more than to send their KV."""
        if num_tokens * prompt_token_ms > self.milliseconds(num_tokens):
            return True
        self._ms *= _FORGOTTEN
        self._least *= _FORGOTTEN
        return False


class Ways:
    """Between which engines KV can be sent, as far as is known. Where it failed several times on end it is not tried
    for a while, each time twice as long as before. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[tuple[int, int], tuple[int, float]] = {}  # how often on end, and until when it is closed

    def is_open(self, source: int, target: int) -> bool:
        return self._failed.get((source, target), (0, 0.0))[1] <= self._clock()

    def succeeded(self, source: int, target: int) -> None:
        self._failed.pop((source, target), None)

    def failed(self, source: int, target: int) -> None:
        times = self._failed.get((source, target), (0, 0.0))[0] + 1
        pause = min(_LONGEST_PAUSE_S, 2.0 ** min(times - 2, _MOST_DOUBLED)) if times > 1 else 0.0
        self._failed[source, target] = times, self._clock() + pause

    def forget(self, engine: int) -> None:
        """It is another one now."""
        self._failed = {way: found for way, found in self._failed.items() if engine not in way}
