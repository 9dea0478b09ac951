"""What drafters share that look continuations up: where n-grams are, how likely what followed them is, trees of the
likeliest, and options."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence as Many
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext
from specserve.speculation.constants import NGRAMS_PER_STEP as NGRAMS_PER_STEP
from specserve.types import Ids

T = TypeVar("T")


class NgramIndex:
    """Where the n-grams of a text that may grow end, for every n in `sizes` (longest first). Those that end the text
    lead nowhere, and are for a later call to take in."""

    def __init__(self, sizes: range, last: int = 0) -> None:
        self.sizes = sizes
        self.last = last  # n-grams that end before this index are in, or for others to know
        self._ends: dict[tuple[int, ...], int | list[int]] = {}

    def extend(self, tokens: Many[int], last: int) -> int:
        """Take in those that end before that index; returns with how many tokens they end."""
        ends, before, self.last = self._ends, self.last, max(self.last, last)
        for end in range(before + 1, last + 1):
            for size in self.sizes:
                if size <= end:
                    ngram = tuple(tokens[end - size : end])
                    there = ends.setdefault(ngram, end)
                    if there is end:
                        continue
                    if isinstance(there, list):
                        there.append(end)
                    else:
                        ends[ngram] = [there, end]
        return self.last - before

    def find(self, newest: tuple[int, ...]) -> tuple[int, list[int]]:
        """The n of the longest end of `newest` that is in, and the indexes of the tokens after it, ascending."""
        for size in self.sizes:
            if size <= len(newest) and (found := self._ends.get(newest[-size:])):
                return size, found if isinstance(found, list) else [found]
        return 0, []


def likelihood(length: int) -> float:
    """How likely what followed earlier follows again where the `length` tokens before agree: 0.28 for 1, 0.52 for 2,
    0.75 for 4, 0.90 for 8. Fitted to what greedy answers of SmolLM2-135M-Instruct had of it; see docs/drafters.md."""
    weight: float = length**1.5
    return weight / (weight + 2.6)


def likeliest_tree(
    children: Iterator[tuple[float, T]], follow: Callable[[T], Iterator[tuple[float, T]]], most: int
) -> tuple[list[T], Ids, NDArray[np.float32]]:
    """The `most` likeliest nodes of a tree, parents before children, the parents' places among them, and how likely
    each is if its parent is. That comes with a node in `children`, the root's, and in what `follow` gives of any other
    node, the likeliest first. No more of these are asked for than may be among the likeliest."""
    nodes: list[T] = []
    parents: list[int] = []
    confidence: list[float] = []
    order = count()  # of equal ones the earlier
    likely: list[tuple[float, int, tuple[float, T], int, float, Iterator[tuple[float, T]]]] = []

    def push(siblings: Iterator[tuple[float, T]], parent: int, above: float) -> None:
        if (child := next(siblings, None)) is not None:
            heapq.heappush(likely, (-above * child[0], next(order), child, parent, above, siblings))

    push(children, -1, 1.0)
    while likely:
        value, _, (given, node), parent, above, siblings = heapq.heappop(likely)
        nodes.append(node)
        parents.append(parent)
        confidence.append(given)
        if len(nodes) == most:
            break
        push(siblings, parent, above)
        push(follow(node), len(nodes) - 1, -value)
    return nodes, np.array(parents, np.int32), np.array(confidence, np.float32)


def checked_sizes(least_name: str, least: int, most_name: str, most: int) -> range:
    """The lengths of n-grams from `most` down to `least`, two options of a drafter."""
    if any(type(value) is not int for value in (least, most)) or not 1 <= least <= most:
        raise ConfigError(
            f"{least_name} is {least!r} and {most_name} is {most!r}; both must be whole numbers, with "
            f"1 <= {least_name} <= {most_name}."
        )
    return range(most, least - 1, -1)


def checked_mib(name: str, value: float | None, default: float, least: float, context: DraftContext) -> float:
    """An option that says how many MiB a drafter keeps; by default `default`, but no more than are left for it."""
    if value is None:
        return default if context.memory_bytes is None else min(default, context.memory_bytes / 2**20)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 2**20:
        raise ConfigError(f"{name} is {value!r}; it must be a number of MiB from {least:g} to 2^20.")
    return value
