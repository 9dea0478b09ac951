"""What drafters that look things up in a text share: where its n-grams are, found slice by slice, once for all
completions of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as Many
from typing import Generic, TypeVar

import numpy as np

from specserve.speculation.base import SequenceView

T = TypeVar("T")

NGRAMS_PER_STEP = 2**12  # taken in for all sequences of a step together: 1 to 2 ms
_BASE = 0x9E3779B97F4A7C15  # of the polynomial, modulo 2^64, that n-grams are found by
_MASK = 2**64 - 1


class NgramIndex:
    """Where the n-grams of the first `num_tokens` of `tokens` end, for every n in `sizes`. They are taken in from the
    front, by as many calls of `extend` as the caller has time for; tokens after the first `num_tokens` may come and
    go. An n-gram that ends the text leads nowhere and is not in it."""

    def __init__(self, tokens: Many[int], num_tokens: int, sizes: Iterable[int]) -> None:
        self.tokens = tokens
        self._last = num_tokens - 1
        self._sizes = sorted(sizes)
        self._num_done = 0  # n-grams that end at this index or before are in
        self._ends: dict[int, dict[int, int | list[int]]] = {size: {} for size in self._sizes}

    @property
    def is_complete(self) -> bool:
        return self._num_done >= self._last

    def extend(self, num_ngrams: int) -> int:
        """Take in about so many n-grams more, at least those of one token; returns how many."""
        if self.is_complete:
            return 0
        start = self._num_done
        stop = min(start + max(1, num_ngrams // len(self._sizes)), self._last)
        first = max(0, start + 1 - self._sizes[-1])
        ids = np.array(self.tokens[first:stop], np.uint64)
        keys = np.zeros(len(ids) + 1, np.uint64)  # of all n-grams of `ids`, by their first token
        for size in range(1, self._sizes[-1] + 1):
            keys = keys[: len(ids) - size + 1] * np.uint64(_BASE) + ids[size - 1 :]
            if size in self._ends:
                skipped = max(0, start + 1 - first - size)  # they end where earlier slices did
                self._add(self._ends[size], keys[skipped:].tolist(), first + skipped + size)
            if len(keys) <= 1:
                break
        self._num_done = stop
        return (stop - start) * len(self._sizes)

    def _add(self, ends: dict[int, int | list[int]], keys: list[int], end: int) -> None:
        for at, key in enumerate(keys, end):
            there = ends.setdefault(key, at)
            if isinstance(there, list):
                there.append(at)
            elif there != at:
                ends[key] = [there, at]

    def ends(self, newest: Many[int], keys: list[int], size: int) -> list[int]:
        """The indexes of the tokens after each n-gram that equals the last `size` of `newest`, ascending; `keys` are
        suffix_keys(newest, size or more)."""
        found = self._ends[size].get(keys[size - 1])
        if found is None:
            return []
        ends = found if isinstance(found, list) else [found]
        # Other n-grams may have that key, though nobody will see it happen by chance.
        is_same = list(self.tokens[ends[-1] - size : ends[-1]]) == list(newest[-size:])
        return ends if is_same else []


def likelihood(length: int) -> float:
    """How likely what followed earlier follows again where the `length` tokens before agree: 0.28 for 1, 0.52 for 2,
    0.75 for 4, 0.90 for 8. Fitted to what greedy answers of SmolLM2-135M-Instruct had of it; see docs/drafters.md."""
    weight: float = length**1.5
    return weight / (weight + 2.6)


def suffix_keys(tokens: Many[int], most: int) -> list[int]:
    """The keys of the last 1, 2, ... tokens, up to `most` of them."""
    keys: list[int] = []
    key, power = 0, 1
    for token in reversed(tokens[-most:]):
        key = (key + token * power) & _MASK
        power = power * _BASE & _MASK
        keys.append(key)
    return keys


class PerRequest(Generic[T]):
    """What the completions of a request have together, from the first that takes it to the last that gives it back."""

    def __init__(self) -> None:
        self._held: dict[object, tuple[T, int]] = {}  # by request, with the number of holders

    def take(self, seq: SequenceView, make: Callable[[], T]) -> T:
        held, count = self._held.get(seq.request) or (make(), 0)
        self._held[seq.request] = held, count + 1
        return held

    def give(self, seq: SequenceView) -> None:
        held, count = self._held.pop(seq.request)
        if count > 1:
            self._held[seq.request] = held, count - 1
