"""What adapters read, in Triton: a x of what linear layers read, and what they change of embeddings. b is applied by
the linear layers' own kernels.

A row's bits depend on what it reads and its adapter alone: a x is added up in the tiles of K of a weight with as many
inputs, from the first to the last of each part of `_PART` inputs, and then the parts in their order. Every slot has
programs of its own, which end at once where none of their rows has that slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve.kernels._triton_bank import RANKS, Bank, Shrunk
from specserve.kernels._triton_groups import Rows
from specserve.kernels._triton_linear import constants, options, tile_of_weight, tile_of_x, tiles_for
from specserve.kernels._triton_numbers import add_product, follow, overlap, rounded, shared_memory_of

_PART = 2048  # inputs that one program adds up: a long row of few ranks would keep one multiprocessor busy for long
_EMBED_BLOCK = 128  # numbers of a row that one program changes


def shrink(x: Tensor | Rows, bank: Bank, slots: Tensor) -> Shrunk:
    """a x of x [rows, in], for rows whose slot, int64 [rows], holds an adapter. An x of float32, and what integers
    stand for, is rounded to the bank's dtype first."""
    numbers, scales = (x.ints, x.scales) if isinstance(x, Rows) else (x, None)
    rows, k = len(x), x.width if isinstance(x, Rows) else x.shape[1]
    max_rank, a = bank.max_rank, bank.a
    assert numbers.is_contiguous() and slots.is_contiguous() and a.shape[1] == max_rank * k, (k, a.shape)
    num_parts = -(-k // _PART)
    sums = torch.empty((num_parts, rows, max_rank), dtype=torch.float32, device=a.device)
    if rows:
        cut = tiles_for(rows, max_rank, k, a.element_size(), 1, shared_memory_of(a.device))
        num_tiles = -(-max_rank // cut.block_n)
        grid = -(-rows // cut.block_m), num_tiles * num_parts, len(bank.ranks)
        sizes = rows, k, numbers.shape[1], max_rank, num_tiles, *constants(cut, max_rank, k)
        _shrink_kernel[grid](numbers, scales, slots, bank.ranks, a, sums, *sizes, _PART, **options(cut, a))
    return Shrunk(bank, slots, sums)


def embed(residual: Tensor, token_ids: Tensor, bank: Bank, slots: Tensor, scale: float) -> None:
    """residual += scale * b a[:, id], in place, float32 [rows, hidden]; token_ids and slots int64 [rows]."""
    rows, hidden = residual.shape
    assert residual.is_contiguous() and bank.b.shape[1] == bank.max_rank * hidden, (residual.shape, bank.b.shape)
    if rows:
        grid = rows, -(-hidden // _EMBED_BLOCK)
        tensors = residual, token_ids, slots, bank.ranks, bank.a, bank.b
        sizes = float(scale), hidden, bank.a.stride(0), bank.b.stride(0), _EMBED_BLOCK, RANKS
        _embed_kernel[grid](*tensors, *sizes, **overlap(residual.device))


@triton.jit
def _tile_of_integers(x, scales, at_m, at_k, rows, k, width, dtype: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of `dtype`: what integers stand for."""
    mask = (at_m < rows)[:, None] & (at_k < k)[None, :]
    ints = tl.load(x + at_m.to(tl.int64)[:, None] * width + at_k[None, :], mask=mask, other=0)
    scale = tl.load(scales + (at_k // 32).to(tl.int64)[None, :] * rows + at_m[:, None], mask=mask, other=0.0)
    return rounded(ints.to(tl.float32) * scale, dtype)


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    x,
    scales,
    slots,
    ranks,
    a,
    sums,
    rows,
    k,
    width,
    max_rank,
    num_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dtype: tl.constexpr = a.dtype.element_ty
    slot = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) % num_tiles * BLOCK_N
    part = tl.program_id(1) // num_tiles
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    follow(OVERLAP)
    rank = tl.load(ranks + slot)
    is_own = tl.load(slots + at_m, mask=at_m < rows, other=-1) == slot
    if (first < rank) & (tl.max(is_own.to(tl.int32), 0) > 0):
        at_r = first + tl.arange(0, BLOCK_N)
        read = tl.minimum(at_r, rank - 1)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(part * PART, tl.minimum(part * PART + PART, k), BLOCK_K):
            at_k = start + tl.arange(0, BLOCK_K)
            if scales is None:
                left = tile_of_x(x, at_m, at_k, rows, k, EVEN_K, dtype)
            else:
                left = _tile_of_integers(x, scales, at_m, at_k, rows, k, width, dtype)
            right = tile_of_weight(a + slot * max_rank * k, read, at_k, k, EVEN_K)
            total = add_product(left, right, total)
        at = (part.to(tl.int64) * rows + at_m)[:, None] * max_rank + at_r[None, :]
        tl.store(sums + at, total, mask=is_own[:, None] & (at_r < rank)[None, :])


@triton.jit
def _embed_kernel(
    residual,
    token_ids,
    slots,
    ranks,
    a,
    b,
    scale,
    hidden,
    a_stride,
    b_stride,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow(OVERLAP)
    slot = tl.load(slots + row)
    rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    if rank > 0:
        rank = tl.multiple_of(rank, RANKS)
        own = a + slot * a_stride + tl.load(token_ids + row) * rank
        outputs = b + slot * b_stride + at * rank
        added = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, rank, RANKS):
            at_r = start + tl.arange(0, RANKS)
            left = tl.load(own + at_r).to(tl.float32)
            right = tl.load(outputs[:, None] + at_r[None, :], mask=(at < hidden)[:, None], other=0.0)
            added += tl.sum(right.to(tl.float32) * left[None, :], 1)
        place = residual + row * hidden + at
        x = tl.load(place, mask=at < hidden, other=0.0)
        tl.store(place, x + scale * added, mask=at < hidden)
