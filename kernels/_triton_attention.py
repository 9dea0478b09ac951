"""Paged attention over chains, trees and blocks, in Triton: one kernel for prefill, decode and verification.

A row sees a list of logical positions, the one it stands at being the last, and its bits depend on what lies there
alone. The list is cut into splits of SPLIT positions, each a softmax of its own, and these are merged from the first to
the last. With few rows every split is a program, and a second kernel merges them; with many rows a program has all
splits of its row and merges as it goes, with the same operations. A tree node's list is its path from the root, the
same as if that path were a chain.

The query heads of a kv head are 16 or more rows of a product; where they are fewer, consecutive rows that read the same
keys in a split share a program, and each still has the bits that it has alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve.kernels._triton_numbers import add_product, follow, overlap, rounded
from specserve.kernels._triton_plan import SPLIT

MERGED_AT_ONCE = 8  # splits whose loads do not wait for each other
_ENOUGH_PROGRAMS = 2048  # rows times kv heads that keep a GPU busy without splits, several rows in a program
_MOST_PARTIAL_BYTES = 64 * 2**20
_ALL = 2**30  # logical positions of a window that hides nothing
_MOST_TILE_BYTES = 16 * 1024  # of keys, and as many of values, by stage
_LOG2_E = 1.4426950408889634


class Cut(NamedTuple):
    """How a program goes through a split. Bits depend on all three, so nothing here may depend on rows."""

    tile: int  # logical positions of a step; whole tiles are a split
    num_warps: int
    num_stages: int


def cut_for(d: int, itemsize: int) -> Cut:
    """For heads of `d` elements of `itemsize` bytes."""
    row_bytes = triton.next_power_of_2(d) * itemsize
    return Cut(min(64, max(16, _MOST_TILE_BYTES // row_bytes)), 8 if row_bytes > 256 else 4, 3)


class Plan(Protocol):
    """Where the rows of a step find their keys and values: tensors int32 on the device."""

    @property
    def row_seq(self) -> Tensor:
        """[rows] whose tables a row reads."""

    @property
    def visible(self) -> Tensor:
        """[rows] how many logical positions a row sees, its own included; 0: padding, whose result is 0."""

    @property
    def prefix(self) -> Tensor:
        """[rows] logical position j below this has slot tables[row_seq, j // block_size] * block_size +
        j % block_size."""

    @property
    def path_start(self) -> Tensor:
        """[rows] logical position j from prefix on has slot paths[path_start + j - prefix]."""

    @property
    def paths(self) -> Tensor:
        """[any] KV slots."""

    @property
    def tables(self) -> Tensor:
        """[seqs, blocks] block ids."""

    @property
    def block_size(self) -> int: ...

    @property
    def max_splits(self) -> int:
        """At least visible / SPLIT of any row."""


def attention(
    q: Tensor,
    kv: Tensor,
    plan: Plan,
    scale: float,
    window: int | None,
    slopes: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """q [rows, heads, d] over kv [2, slots, kv_heads, d] -> [rows, heads * d] of `out_dtype` (None: kv's). A row sees
    at most the `window` latest of its logical positions; scores lose slopes float32 [heads] for each position of
    distance."""
    is_busy = len(q) * kv.shape[2] >= _ENOUGH_PROGRAMS or 4 * q.numel() * plan.max_splits > _MOST_PARTIAL_BYTES
    is_looped = plan.max_splits == 1 or is_busy
    return attention_in(is_looped, q, kv, plan, scale, window, slopes, out_dtype=out_dtype)


def attention_in(
    is_looped: bool,
    q: Tensor,
    kv: Tensor,
    plan: Plan,
    scale: float,
    window: int | None,
    slopes: Tensor | None = None,
    cut: Cut | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`attention`, with all splits of a row in one program or each in its own, and tiles of one's choice."""
    rows, heads, d = q.shape
    assert q.is_contiguous() and kv.is_contiguous() and plan.tables.is_contiguous()
    out = torch.empty((rows, heads * d), dtype=out_dtype or kv.dtype, device=q.device)
    if not rows:
        return out
    splits = 1 if is_looped else plan.max_splits
    partial = None if is_looped else torch.empty((rows, heads, splits, d), dtype=torch.float32, device=q.device)
    scalars = None if is_looped else torch.empty((2, rows, heads, splits), dtype=torch.float32, device=q.device)
    where = (plan.row_seq, plan.visible, plan.prefix, plan.path_start, plan.paths, plan.tables)
    width = _ALL if window is None else window
    numbers = (plan.tables.stride(0), kv.stride(0), rows, width, scale * _LOG2_E)
    constants = _constants(q, kv, cut or cut_for(d, kv.element_size()))
    constants |= {"BLOCK_SIZE": plan.block_size, "LOOPED": is_looped, "SLOPED": slopes is not None}
    _attention_kernel[rows, kv.shape[2], splits](q, kv, slopes, out, partial, scalars, *where, *numbers, **constants)
    if not is_looped:
        block_d = triton.next_power_of_2(d)
        tensors = (partial, scalars, out, plan.visible)
        sizes = (splits, rows, width, heads, d, block_d, SPLIT, MERGED_AT_ONCE, window is not None)
        _merge_kernel[rows, heads](*tensors, *sizes, num_warps=max(block_d // 64, 1), **overlap(q.device))
    return out


def _constants(q: Tensor, kv: Tensor, cut: Cut) -> dict[str, int]:
    """Constants and options of the kernel that do not depend on rows."""
    heads, kv_heads, d = q.shape[1], *kv.shape[2:]
    share = heads // kv_heads
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "SHARE": share, "D": d, "SPLIT": SPLIT, "TILE": cut.tile}
    blocks = {"BLOCK_H": max(triton.next_power_of_2(share), 16), "BLOCK_D": max(triton.next_power_of_2(d), 16)}
    return {**sizes, **blocks, "num_warps": cut.num_warps, "num_stages": cut.num_stages, **overlap(q.device)}


@triton.jit
def _slots(at, stop, prefix, table, path, BLOCK_SIZE: tl.constexpr):
    """The KV slots of logical positions `at`, 0 from `stop` on."""
    is_cached = at < tl.minimum(prefix, stop)
    block = tl.load(table + at // BLOCK_SIZE, mask=is_cached, other=0)
    node = tl.load(path + (at - prefix), mask=(at >= prefix) & (at < stop), other=0)
    return tl.where(is_cached, block * BLOCK_SIZE + at % BLOCK_SIZE, node).to(tl.int64)


@triton.jit
def _fma(x, y, z):
    """x y + z, rounded once: where a compiler may choose, two kernels may differ."""
    y = tl.broadcast_to(y, x.shape)
    return tl.fma(x, y, tl.broadcast_to(z, x.shape))


@triton.jit
def _shares(top, top_next):
    """The higher of two powers of 2, and both divided by it; of two zeros, which are -inf here, both are 0."""
    higher = tl.maximum(top, top_next)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp2(top - base), tl.exp2(top_next - base)


@triton.jit
def _sloped(scores, slope, at, stop, scale):
    """scores [BLOCK_H, TILE] times scale, less the slope of each query times its distance from positions `at`."""
    distance = (at[None, :] - (stop - 1)[:, None]).to(tl.float32)
    return _fma(distance, slope[:, None], scores * scale)


@triton.jit
def _attend(
    q, keys, values, start, end, first, stop, slope, prefix, table, path, scale,
    KV_WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """One split: the highest score [BLOCK_H], as a power of 2, the sum of all scores' powers [BLOCK_H] and the values
    times these [BLOCK_H, BLOCK_D], both divided by that of the highest.

    It has the tiles of [start, end), a query those logical positions that are in [first, stop), int32 [BLOCK_H]. A tile
    of which a query sees nothing leaves its sums as they are, to the bit. SLOPED: a score loses slope [BLOCK_H], as a
    power of 2, for each position of distance from the query's own."""
    BLOCK_H: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    at_d = tl.arange(0, BLOCK_D)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    mixed = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
    for tile in range(start, end, TILE):
        at = tile + tl.arange(0, TILE)
        place = _slots(at, end, prefix, table, path, BLOCK_SIZE)[:, None] * KV_WIDTH + at_d[None, :]
        mask = (at < end)[:, None] & (at_d < D)[None, :]
        k = tl.load(keys + place, mask=mask, other=0.0)
        scores = add_product(q, tl.trans(k), tl.zeros((BLOCK_H, TILE), tl.float32))
        if SLOPED:
            scores = _sloped(scores, slope, at, stop, scale)
        is_seen = (at[None, :] >= first[:, None]) & (at[None, :] < stop[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * (1.0 if SLOPED else scale))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        if SLOPED:
            powers = tl.exp2(scores - base[:, None])
        else:
            powers = tl.exp2(_fma(scores, tl.full((1, 1), scale, tl.float32), -base[:, None]))
        total = tl.fma(total, shrink, tl.sum(powers, 1))
        v = tl.load(values + place, mask=mask, other=0.0)
        mixed = add_product(rounded(powers, v.dtype), v, mixed * shrink[:, None])
        top = higher
    return top, total, mixed


@triton.jit
def _attend_all(
    q, keys, values, first, stop, firsts, stops, slope, prefix, table, path, scale,
    KV_WIDTH: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    SLOPED: tl.constexpr,
):  # fmt: skip
    """All splits of [first, stop), merged in order: the sum and the values times the powers, as of `_attend`."""
    top = tl.full((q.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((q.shape[0],), tl.float32)
    mixed = tl.zeros(q.shape, tl.float32)
    for split in range(first // SPLIT, tl.cdiv(stop, SPLIT)):
        start = tl.maximum(split * SPLIT, first // TILE * TILE)
        end = tl.minimum(stop, split * SPLIT + SPLIT)
        top_next, total_next, mixed_next = _attend(
            q, keys, values, start, end, firsts, stops, slope, prefix, table, path, scale,
            KV_WIDTH, D, BLOCK_SIZE, TILE, SLOPED,
        )  # fmt: skip
        top, left, right = _shares(top, top_next)
        total = tl.fma(total, left, total_next * right)
        mixed = _fma(mixed, left[:, None], mixed_next * right[:, None])
    return total, mixed


@triton.jit
def _rows_together(row, rows, end, row_seq, visible, prefix, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):
    """How many rows the program of `row` has, and their sequence. Rows in a group of GROUP that find all they see below
    `end` in the table of one sequence are the first one's; else each has its own program."""
    seq = tl.load(row_seq + row)
    count = 1
    if GROUP > 1:
        at = tl.arange(0, BLOCK_G)
        each = row // GROUP * GROUP + at
        mask = (at < GROUP) & (each < rows)
        stop = tl.load(visible + each, mask=mask, other=0)
        seqs = tl.load(row_seq + each, mask=mask, other=0)
        on_path = tl.minimum(stop, end) > tl.load(prefix + each, mask=mask, other=0)
        lowest = tl.min(tl.where(stop > 0, seqs, 2147483647), 0)
        highest = tl.max(tl.where(stop > 0, seqs, 0), 0)
        if (lowest >= highest) & (tl.max(tl.where((stop > 0) & on_path, 1, 0), 0) == 0):
            count = tl.where(row % GROUP == 0, GROUP, 0)
            seq = highest
    return count, seq


@triton.jit(do_not_specialize=["rows", "window"])
def _attention_kernel(
    q, kv, slopes, out, partial, scalars, row_seq, visible, prefix, path_start, paths, tables,
    table_stride, kv_stride, rows, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, BLOCK_SIZE: tl.constexpr, LOOPED: tl.constexpr,
    SLOPED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, kv head, split), or of several rows where these read the same keys. LOOPED: of all splits, to
    `out`; else `partial` float32 [rows, heads, splits, d] gets the split's values, `scalars` float32 [2, rows, heads,
    splits] its highest score and its sum."""
    GROUP: tl.constexpr = BLOCK_H // SHARE
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    begin = 0 if LOOPED else tl.program_id(2) * SPLIT
    limit = 2147483647 if LOOPED else begin + SPLIT
    follow(OVERLAP)
    count, seq = _rows_together(row, rows, limit, row_seq, visible, prefix, GROUP, BLOCK_H)
    at_h = tl.arange(0, BLOCK_H)
    at_d = tl.arange(0, BLOCK_D)
    each = row + at_h // SHARE
    is_own = (at_h < count * SHARE) & (each < rows)
    stops = tl.load(visible + each, mask=is_own, other=0)
    firsts = tl.maximum(stops - window, 0)
    stop = tl.minimum(tl.max(stops, 0), limit)
    first = tl.min(tl.where(stops > 0, firsts, 2147483647), 0)
    head = each.to(tl.int64) * HEADS + kv_head * SHARE + at_h % SHARE
    mask = is_own[:, None] & (at_d < D)[None, :]
    own = tl.load(q + head[:, None] * D + at_d[None, :], mask=mask, other=0.0)
    own = rounded(own, kv.dtype.element_ty)
    slope = tl.zeros((BLOCK_H,), tl.float32)
    if SLOPED:
        slope = tl.load(slopes + kv_head * SHARE + at_h % SHARE) * 1.4426950408889634
    keys = kv + kv_head * D
    values = keys + kv_stride
    prefix = tl.where(count == 1, tl.load(prefix + row), 2147483647)
    table = tables + seq.to(tl.int64) * table_stride
    path = paths + tl.load(path_start + row)
    if LOOPED:
        total, mixed = _attend_all(
            own, keys, values, first, stop, firsts, stops, slope, prefix, table, path, scale,
            KV_HEADS * D, D, BLOCK_SIZE, TILE, SPLIT, SLOPED,
        )  # fmt: skip
        y = mixed / tl.where(stops > 0, total, 1.0)[:, None]
        tl.store(out + head[:, None] * D + at_d[None, :], rounded(y, out.dtype.element_ty), mask=mask)
    else:
        start = tl.maximum(begin, first // TILE * TILE)
        if start < stop:
            top, total, mixed = _attend(
                own, keys, values, start, stop, firsts, stops, slope, prefix, table, path, scale,
                KV_HEADS * D, D, BLOCK_SIZE, TILE, SLOPED,
            )  # fmt: skip
            place = head * tl.num_programs(2) + tl.program_id(2)
            is_here = is_own & (begin < stops) & (limit > firsts)
            tl.store(partial + place[:, None] * D + at_d[None, :], mixed, mask=mask & is_here[:, None])
            tl.store(scalars + place, top, mask=is_here)
            tl.store(scalars + rows.to(tl.int64) * HEADS * tl.num_programs(2) + place, total, mask=is_here)


@triton.jit
def _merge_some(
    top, total, mixed, begin, end, partial, scalars, head, splits, num_heads,
    D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """With AT_ONCE splits from `begin` on. From `end` on the row has none: they are read, but merged as sums of
    nothing, which changes no bit. So loads wait neither for each other nor for `end`."""
    at_d = tl.arange(0, mixed.shape[0])
    for i in tl.static_range(AT_ONCE):
        split = begin + i
        place = head * splits + split
        top_next = tl.load(scalars + place, mask=split < splits, other=0.0)
        total_next = tl.load(scalars + num_heads * splits + place, mask=split < splits, other=0.0)
        mixed_next = tl.load(partial + place * D + at_d, mask=(split < splits) & (at_d < D), other=0.0)
        top, left, right = _shares(top, tl.where(split < end, top_next, float("-inf")))
        total = tl.fma(total, left, tl.where(split < end, total_next, 0.0) * right)
        mixed = _fma(mixed, left, tl.where(split < end, mixed_next, 0.0) * right)
    return top, total, mixed


@triton.jit(do_not_specialize=["splits", "rows", "window"])
def _merge_kernel(
    partial, scalars, out, visible, splits, rows, window,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (row, head)."""
    row = tl.program_id(0).to(tl.int64)
    head = row * HEADS + tl.program_id(1)
    num_heads = rows.to(tl.int64) * HEADS
    follow(OVERLAP)
    stop = tl.load(visible + row)
    end = tl.cdiv(stop, SPLIT)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(stop - window, 0) // SPLIT
    top, total, mixed = _merge_some(
        float("-inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32),
        first, end, partial, scalars, head, splits, num_heads, D, AT_ONCE,
    )  # fmt: skip
    for begin in range(first + AT_ONCE, end, AT_ONCE):
        top, total, mixed = _merge_some(
            top, total, mixed, begin, end, partial, scalars, head, splits, num_heads, D, AT_ONCE
        )
    at_d = tl.arange(0, BLOCK_D)
    y = mixed / tl.where(stop > 0, total, 1.0)
    tl.store(out + head * D + at_d, rounded(y, out.dtype.element_ty), mask=at_d < D)
