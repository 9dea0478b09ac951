"""The plan that is made of arrays says of every row what a slow one says that follows it token by token."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specserve.ops import AttentionRows

BLOCK = 4
planning = importlib.import_module("specserve.kernels._triton_plan")


@st.composite
def steps(draw: st.DrawFn) -> AttentionRows:
    """Chains, trees (some begin with tokens of their own), rings and sequences of one row, in any order, padded."""
    starts, cached, tables, parents = [0], [], [], []
    free = draw(st.permutations(range(1, 60)))
    for _ in range(draw(st.integers(1, 4))):
        count, kind = draw(st.integers(1, 9)), draw(st.sampled_from(["chain", "tree", "ring"]))
        own = list(range(-1, count - 1))
        if kind == "tree":
            own = [draw(st.integers(-1, node - 1)) for node in range(count)]
        elif kind == "ring" and count > 1:
            own[0] = count - 1
        cached.append(draw(st.integers(0, 20)))
        num_blocks = -(-(cached[-1] + count) // BLOCK) + draw(st.integers(0, 1))
        tables.append([free.pop() for _ in range(num_blocks)])
        parents += own
        starts.append(starts[-1] + count)
    return AttentionRows.pack(starts, cached, tables, parents, draw(st.sampled_from([1, 4])))


def slow(rows: AttentionRows) -> list[tuple[list[int], int]]:
    """The slots that each row sees, in order, and that which it writes; nothing and -1 for padding."""
    found: list[tuple[list[int], int]] = []
    for s, cached in enumerate(rows.cached.tolist()):
        start, stop = rows.query_starts[s : s + 2].tolist()
        slots = [block * BLOCK + i for block in rows.block_tables[s].tolist() for i in range(BLOCK)]
        parents = rows.parents[start:stop].tolist()
        for row in range(stop - start):
            path, node = [row], parents[row]
            while node >= 0 and not rows.is_block(s):
                path.append(node)
                node = parents[node]
            own = range(stop - start) if rows.is_block(s) else path[::-1]
            found.append((slots[:cached] + [slots[cached + each] for each in own], slots[cached + row]))
    return found + [([], -1)] * (rows.num_rows - len(found))


def followed(plan: object, num_rows: int) -> list[tuple[list[int], int]]:
    """The same, as a kernel reads a plan."""
    tensors = plan.tensors(torch.device("cpu"))  # type: ignore[attr-defined]
    tables, paths = tensors.tables, tensors.paths
    found = []
    for row in range(num_rows):
        seq, visible, prefix = int(tensors.row_seq[row]), int(tensors.visible[row]), int(tensors.prefix[row])
        flat, at = tables.reshape(-1), seq * tables.stride(0)
        in_blocks = [int(flat[at + j // BLOCK]) * BLOCK + j % BLOCK for j in range(min(prefix, visible))]
        on_path = [int(paths[int(tensors.path_start[row]) + j - prefix]) for j in range(prefix, visible)]
        found.append((in_blocks + on_path, int(tensors.write_slots[row])))
    return found


@given(steps())
def test_a_plan_says_what_following_each_row_says(rows: AttentionRows) -> None:
    assert followed(planning.Plan(rows, BLOCK), rows.num_rows) == slow(rows)


@given(steps())
def test_its_splits_hold_the_longest_context(rows: AttentionRows) -> None:
    longest = max(len(seen) for seen, _ in slow(rows))
    assert planning.Plan(rows, BLOCK).tensors(torch.device("cpu")).max_splits == -(-longest // planning.SPLIT)


@pytest.mark.parametrize("broken", [[], [0], [1, 3]])
def test_broken_rows_are_read_back(broken: Sequence[int]) -> None:
    plan = planning.Plan(AttentionRows.pack([0, 4], [0], [[1]], [-1, 0, 1, 2], 1), BLOCK)
    plan.tensors(torch.device("cpu")).broken[list(broken)] = True
    assert plan.broken_rows() == list(broken)


def test_its_arrays_are_of_the_kinds_that_kernels_read() -> None:
    rows = AttentionRows.one_each(np.array([3, 9], np.int32), np.array([[1, 0, 0], [2, 3, 4]], np.int32))
    tensors = planning.Plan(rows, BLOCK).tensors(torch.device("cpu"))
    assert tensors.write_slots.dtype == torch.int64
    assert {getattr(tensors, name).dtype for name in (*list(planning.PARTS)[1:], "numbers")} == {torch.int32}
    assert tensors.numbers.tolist() == [1, 2, 3, 4]
