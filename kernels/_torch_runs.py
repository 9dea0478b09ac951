"""Runs of a step's rows that attention in torch computes together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.ops import AttentionRows

_RUN_ROWS = 128


@dataclass(slots=True)
class Run:
    """Consecutive rows of one sequence that share a linear KV view."""

    first_row: int
    slots: list[int]
    last: list[int]  # that each row sees
    own: Sequence[int] = ()  # where each row stands itself; empty: where `last` does


def runs(rows: AttentionRows, s: int, block_size: int) -> list[Run]:
    """A chain is one run, or a few. In a tree every node is a run of its own, which sees its ancestors as if they were
    a chain: the same numbers in the same order, hence the same bits as that path alone."""
    start, stop = rows.query_starts[s : s + 2].tolist()
    cached, parents = int(rows.cached[s]), rows.parents[start:stop].tolist()
    slots = slots_of(rows.block_tables[s].tolist(), cached + stop - start, block_size)
    if rows.is_block(s):
        return [Run(start, slots, [len(slots) - 1] * (stop - start), range(cached, len(slots)))]
    if parents == list(range(-1, stop - start - 1)):
        cuts = [*range(0, stop - start, _RUN_ROWS), stop - start]
        return [
            Run(start + a, slots[: cached + b], list(range(cached + a, cached + b)))
            for a, b in itertools.pairwise(cuts)
        ]
    found = []
    for r in range(stop - start):
        path = ancestors(parents, r)
        linear = slots[:cached] + [slots[cached + node] for node in path]
        found.append(Run(start + r, linear, [len(linear) - 1]))
    return found


def slots_of(blocks: list[int], num_tokens: int, block_size: int) -> list[int]:
    slots = [block * block_size + offset for block in blocks for offset in range(block_size)]
    return slots[:num_tokens]


def ancestors(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
