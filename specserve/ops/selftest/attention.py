"""The self-test's checks of attention, with what stores keys and values before it: chains, trees and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specserve.ops import AttentionRows, HeadNorms, Rotation
from specserve.ops.selftest.inputs import NUM_ROWS as _ROWS, Check, Inputs, Rows

_CONTEXT = 250  # tokens before the rows, whose last see more than 256: kernels cut longer contexts there
_OTHER_CONTEXT, _OTHER_ROWS = 600, 3  # of another sequence, which is in the same step
_BROKEN = 1  # a row whose values are not finite
_EPS = 1e-5
_TREE = (-1, -1, 0, 0, 1, 2, 2, 3, 5, 5, 4, 8, 9, 11, 11, 13, 13)  # parents of nodes
_RING = (_ROWS - 1, *range(_ROWS - 1))  # rows that see each other
_WINDOW = 100  # positions


class _Sequence:
    """The rows of one sequence, of another before them where `beside` says so, and the KV of both. `parents` are those
    of the rows; rows of a tree are computed alone as the last of their path, after copies of its keys and values."""

    def __init__(self, inputs: Inputs, parents: Sequence[int], has_norms: bool = False, breaks: bool = False) -> None:
        self._inputs, self._parents, uses = inputs, parents, inputs.uses
        self._is_tree = list(parents) != list(range(-1, _ROWS - 1))
        self._width = (uses.num_heads + 2 * uses.num_kv_heads) * uses.head_dim
        self._qkv = inputs.normal(_ROWS, self._width)
        if breaks:
            self._qkv[_BROKEN, -1] = torch.inf
        self._others = inputs.normal(_OTHER_ROWS, self._width)
        self.norms: HeadNorms | None = None
        if has_norms:
            weights = [inputs.ops.pack_vector(inputs.normal(uses.head_dim)) for _ in range(2)]
            self.norms = HeadNorms(weights[0], weights[1], _EPS)
        angle = 6 * torch.rand(_OTHER_CONTEXT + _ROWS, uses.head_dim // 2, generator=torch.Generator().manual_seed(3))
        self._cos = inputs.there(torch.cat((angle.cos(), angle.cos()), -1))
        self._sin = inputs.there(torch.cat((-angle.sin(), angle.sin()), -1))
        self._lay_out()

    def _lay_out(self) -> None:
        inputs, size, uses = self._inputs, self._inputs.block_size, self._inputs.uses
        count, other = (-(-tokens // size) for tokens in (_CONTEXT + _ROWS, _OTHER_CONTEXT + _OTHER_ROWS))
        blocks = 1 + torch.argsort(inputs.integers(10**9, count + other))  # block 0 is nobody's
        self._tables = blocks[:count].tolist(), blocks[count:].tolist()
        shape = 2, (1 + count + other) * size, uses.num_kv_heads, uses.head_dim
        cached = inputs.normal(2, shape[1] - size, *shape[2:]).to(inputs.ops.kv_dtype)
        self.kv = torch.zeros(shape, dtype=inputs.ops.kv_dtype, device=inputs.ops.device)
        inputs.ops.write_kv(self.kv, inputs.there(torch.arange(size, shape[1])), inputs.there(cached))
        self._slots = torch.tensor([block * size + i for block in self._tables[0] for i in range(size)])
        self.run(0, _ROWS)  # whoever computes a row alone finds those before it in the cache

    def path(self, row: int) -> list[int]:
        """Its ancestors, the root first, and the row itself."""
        found = [row]
        while (parent := self._parents[found[0]]) in range(found[0]):  # in a block a row's parent comes after it
            found.insert(0, parent)
        return found

    def run(self, start: int, stop: int) -> tuple[Any, Any, Tensor, int]:
        """Stores keys and values of rows [start, stop) -> their queries, the plan, the KV, and the first of their rows
        in the step. Several rows come after another sequence's, and one comes alone."""
        inputs, ops, kv, count = self._inputs, self._inputs.ops, self.kv, stop - start
        is_alone = count == 1
        before = 0 if is_alone else _OTHER_ROWS
        depths = [len(self.path(row)) - 1 for row in range(start, stop)]
        cached = _CONTEXT + (depths[0] if is_alone else start)
        if is_alone and self._is_tree:
            kv = self._with_path(self.path(start)[:-1])
        parents = [-1] if is_alone else [*range(-1, before - 1), *self._parents[start:stop]]
        starts, contexts, tables = [0, 1], [cached], [self._tables[0]]
        if before:
            starts, contexts, tables = [0, before, before + count], [_OTHER_CONTEXT, cached], [*reversed(self._tables)]
        rows = AttentionRows.pack(starts, contexts, tables, parents, ops.row_multiple)
        plan = ops.plan(rows, inputs.block_size)
        places = [*range(_OTHER_CONTEXT, _OTHER_CONTEXT + before), *(_CONTEXT + depth for depth in depths)]
        positions = inputs.ids(torch.tensor(places), 0, before + count)
        qkv = torch.cat((self._others[:before], self._qkv[start:stop]))
        q = ops.rope_and_cache(
            inputs.products(qkv, 0, len(qkv)), self.norms, Rotation(positions, self._cos, self._sin), kv, plan
        )
        return q, plan, kv, before

    def stored(self, kv: Tensor, start: int, stop: int) -> Tensor:
        """Keys and values of the rows, [stop - start, any]."""
        at = self._slots[_CONTEXT + start : _CONTEXT + stop]
        if stop - start == 1 and self._is_tree:
            at = self._slots[[_CONTEXT + len(self.path(start)) - 1]]
        found = self._inputs.ops.read_kv(kv, self._inputs.there(at))
        return found.transpose(0, 1).flatten(1)

    def _with_path(self, path: Sequence[int]) -> Tensor:
        """A copy of the cache, where nodes of a path follow the cached tokens as if they were a chain."""
        ops, kv = self._inputs.ops, self.kv.clone()
        if path:
            values = ops.read_kv(self.kv, self._inputs.there(self._slots[[_CONTEXT + node for node in path]]))
            ops.write_kv(kv, self._inputs.there(self._slots[_CONTEXT : _CONTEXT + len(path)]), values)
        return kv


def _rope_and_cache(inputs: Inputs, has_norms: bool = False) -> Rows:
    """What was stored, and whose keys or values were not finite. Queries are read by attention alone."""
    sequence = _Sequence(inputs, range(-1, _ROWS - 1), has_norms, breaks=True)

    def compute(a: int, b: int) -> list[Tensor]:
        _, plan, kv, before = sequence.run(a, b)
        broken = torch.zeros(b - a, 1, dtype=torch.int64)
        broken[[row - before for row in inputs.ops.broken_rows(plan)]] = 1
        stored = sequence.stored(kv, a, b).float().cpu()
        return [torch.where(broken > 0, stored.isfinite(), stored), broken]  # what it has of others is nobody's

    return compute


def _attention(
    inputs: Inputs, window: int | None = None, is_sloped: bool = False, parents: Sequence[int] = range(-1, _ROWS - 1)
) -> Rows:
    ops, uses = inputs.ops, inputs.uses
    sequence = _Sequence(inputs, parents)
    scale, width = uses.head_dim**-0.5, uses.num_heads * uses.head_dim
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / uses.num_heads) for head in range(uses.num_heads)])
    packed = ops.pack_vector(slopes) if is_sloped else None

    def compute(a: int, b: int) -> list[Tensor]:
        a, b = (0, _ROWS) if parents is _RING else (a, b)
        q, plan, kv, before = sequence.run(a, b)
        attended = ops.attention(q, kv, plan, scale, window, packed)
        return [inputs.numbers(attended, before + b - a, width)[before:]]

    return compute


OF_CHAINS = (
    Check("attention", "", _attention),
    Check("attention in a window", "window", partial(_attention, window=_WINDOW)),
)
CHECKS = (
    Check("rotation and storing keys and values", "", _rope_and_cache),
    Check("rotation with norms of heads", "head_norms", partial(_rope_and_cache, has_norms=True)),
    *OF_CHAINS,
    Check("attention with ALiBi", "alibi", partial(_attention, is_sloped=True)),
    Check("attention of trees", "", partial(_attention, parents=_TREE)),
    Check("attention of trees in a window", "window", partial(_attention, window=_WINDOW, parents=_TREE)),
    Check("attention of blocks", "", partial(_attention, parents=_RING), by_row=False),
)
