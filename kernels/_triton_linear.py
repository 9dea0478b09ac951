"""Linear layers in Triton: row-invariant, near memory bandwidth for few rows.

A row's bits depend on the order in which its products are added, and that is the order of K alone: in tiles of
`block_k`, which follows from the weight's shape, from the first to the last, by one program. How many rows and outputs
a program has, its warps and its stages only decide who computes what, and are free to follow the number of rows.
What an adapter adds is a sum of its own, in the order of its ranks, which is added to the rows that have it: after the
bias, and in a gated layer before the activation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve.kernels._triton_bank import RANKS, Shrunk
from specserve.kernels._triton_numbers import (
    H100_SHARED_MEMORY,
    add_product,
    fetch,
    follow,
    overlap,
    rounded,
    shared_memory_of,
)

_RESERVED = 2 * 1024  # bytes of shared memory that the compiler may want for itself
_MOST_STAGES = {16: 8, 32: 6, 64: 5, 128: 4}  # by block_m
_PREFILL_ROWS = 256  # more of them are bound by arithmetic
_RANKS = tl.constexpr(RANKS)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "gelu": 3}  # as `activated_number` knows them


class Tiles(NamedTuple):
    """How a launch is cut. Of these `block_k` alone decides about bits."""

    block_m: int  # rows of a program
    block_n: int  # outputs of a program
    block_k: int  # inputs of a step of its loop
    num_warps: int
    num_stages: int

    def shared_memory(self, itemsize: int, parts: int) -> int:
        """Bytes of the tiles of x and of `parts` weights that are on their way."""
        return self.num_stages * (self.block_m + parts * self.block_n) * self.block_k * itemsize


def tiles_for(
    rows: int, n: int, k: int, itemsize: int, parts: int = 1, shared_memory: int = H100_SHARED_MEMORY
) -> Tiles:
    """For x [rows, k] times `parts` weights [n, k] of elements of `itemsize` bytes. There are five buckets of rows, and
    all of a bucket are cut alike."""
    block_m = next((m for m in (16, 32, 64) if rows <= m), 128)
    block_k = _block_k(k, itemsize)
    if itemsize == 4:  # no tensor cores: products and sums of single numbers, in registers
        cut = Tiles(min(block_m, 32), 32, block_k, 4, 3)
    else:
        cut = Tiles(
            block_m, _block_n(block_m, rows, n, parts), block_k, 8 if block_m == 128 else 4, _MOST_STAGES[block_m]
        )
    while cut.num_stages > 1 and cut.shared_memory(itemsize, parts) > shared_memory - _RESERVED:
        cut = cut._replace(num_stages=cut.num_stages - 1)
    return cut


def _block_k(k: int, itemsize: int) -> int:
    if itemsize == 4:
        return 32
    return next((size for size in (128, 64, 32) if k % size == 0), 64)


def _block_n(block_m: int, rows: int, n: int, parts: int) -> int:
    """Narrow where only that gives every multiprocessor (an H100 has 132) a program; but every program reads all of
    its rows of x. The borders are where an H100 is fastest with the weights of models of 135M, 1.5B and 8B."""
    if block_m == 128:
        return 64 if parts == 2 or rows <= _PREFILL_ROWS or n < 1024 else 128
    if block_m == 64:
        return 16 if n < 4096 else 32 if n < 6144 * parts else 64
    return 16 if n < 4096 and parts == 1 else 32


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    adapters: Shrunk | None = None,
) -> Tensor:
    """x [rows, k] times weight [n, k] transposed, plus bias [n], plus what `adapters` add -> [rows, n], added up in
    float32 and rounded once, to `out_dtype` (None: the weight's). An x of float32 is rounded to the weight's dtype
    first."""
    n, k = weight.shape
    cut = tiles_for(len(x), n, k, weight.element_size(), 1, shared_memory_of(x.device))
    return linear_in(cut, x, weight, bias, out_dtype, adapters)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, adapters: Shrunk | None = None) -> Tensor:
    """activation(gate) * up -> [rows, n]. x [rows, k] times weight [2 n, k] transposed, plus bias [2 n], plus what
    `adapters` add, is gate's n columns, then up's; both are rounded to the weight's dtype. `activation` is one of
    ACTIVATIONS."""
    n, k = len(weight) // 2, weight.shape[1]
    cut = tiles_for(len(x), n, k, weight.element_size(), 2, shared_memory_of(x.device))
    return gated_in(cut, x, weight, bias, activation, adapters)


def linear_in(
    cut: Tiles,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    adapters: Shrunk | None = None,
) -> Tensor:
    """`linear` with tiles of one's choice."""
    out = _empty(x, weight, len(weight), out_dtype or weight.dtype)
    if len(out):
        sizes = (len(x), *weight.shape, *adapters_of(adapters, len(weight)))
        _linear_kernel[_grid(cut, out)](x, weight, bias, out, *sizes, *constants(cut, *weight.shape), **options(cut, x))
    return out


def gated_in(
    cut: Tiles, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, adapters: Shrunk | None = None
) -> Tensor:
    """`gated` with tiles of one's choice."""
    n, k = len(weight) // 2, weight.shape[1]
    out = _empty(x, weight, n, weight.dtype)
    if len(out):
        sizes = (len(x), n, k, *adapters_of(adapters, 2 * n), ACTIVATIONS[activation], *constants(cut, n, k))
        _gated_kernel[_grid(cut, out)](x, weight, bias, out, *sizes, **options(cut, x))
    return out


def adapters_of(adapters: Shrunk | None, num_outputs: int) -> tuple[Tensor | int | None, ...]:
    """What kernels are told of adapters."""
    if adapters is None:
        return None, None, None, None, 0, 0, 0
    bank, slots, sums = adapters
    assert bank.b.shape[1] == bank.max_rank * num_outputs, (bank.b.shape, num_outputs)
    return slots, sums, bank.ranks, bank.b, len(bank.ranks), len(sums), bank.max_rank


def constants(cut: Tiles, n: int, k: int) -> tuple[int, int, int, bool, bool]:
    """BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K of the kernels."""
    return cut.block_m, cut.block_n, cut.block_k, n % cut.block_n == 0, k % cut.block_k == 0


def options(cut: Tiles, x: Tensor) -> dict[str, int]:
    return {"num_warps": cut.num_warps, "num_stages": cut.num_stages, **overlap(x.device)}


def _grid(cut: Tiles, out: Tensor) -> tuple[int, int]:
    """Programs that read the same weights start one after the other: all but the first find them in L2."""
    rows, n = out.shape
    return -(-rows // cut.block_m), -(-n // cut.block_n)


def _empty(x: Tensor, weight: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    return torch.empty((len(x), n), dtype=dtype, device=x.device)


@triton.jit
def tile_of_x(x, at_m, at_k, rows, k, EVEN_K: tl.constexpr, dtype: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of `dtype`"""
    mask = (at_m < rows)[:, None]
    if not EVEN_K:
        mask = mask & (at_k < k)[None, :]
    tile = tl.load(x + at_m.to(tl.int64)[:, None] * k + at_k[None, :], mask=mask, other=0.0)
    return tile if tile.dtype == dtype else rounded(tile, dtype)


@triton.jit
def tile_of_weight(weight, at_n, at_k, k, EVEN_K: tl.constexpr):
    """[BLOCK_K, BLOCK_N]"""
    at = weight + at_n.to(tl.int64)[None, :] * k + at_k[:, None]
    if EVEN_K:
        return tl.load(at)
    return tl.load(at, mask=(at_k < k)[:, None], other=0.0)


@triton.jit
def _fetch_weight(weight, at_n, k):
    """The first 16 lines of each row."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    at_k = tl.minimum(tl.arange(0, 16) * LINE, k - 1)
    fetch(weight + at_n.to(tl.int64)[:, None] * k + at_k[None, :])


@triton.jit
def at_outputs(n, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    """The outputs of this program; what lies beyond the last is the last again, and never stored."""
    at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    return at_n if EVEN_N else tl.minimum(at_n, n - 1)


@triton.jit
def store_tile(out, y, at_m, rows, n, BLOCK_N: tl.constexpr):
    at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (at_m < rows)[:, None] & (at_n < n)[None, :]
    tl.store(out + at_m.to(tl.int64)[:, None] * n + at_n[None, :], y, mask=mask)


@triton.jit
def adapted(total, own, sums, ranks, b, at_m, at_n, rows, n, num_slots, num_parts, max_rank):
    """total [BLOCK_M, BLOCK_N] plus b a x of the rows whose slot `own` int64 [BLOCK_M] holds an adapter. What one of
    them adds is added to no other row, not even times zero: it may be NaN."""
    slot = tl.min(tl.where(own >= 0, own, num_slots), 0)
    while slot < num_slots:
        is_own = own == slot
        rank = tl.multiple_of(tl.load(ranks + slot), _RANKS)
        outputs = b + slot * n * max_rank + at_n.to(tl.int64) * rank
        added = tl.zeros_like(total)
        for start in range(0, rank, _RANKS):
            at_r = start + tl.arange(0, _RANKS)
            right = tl.load(outputs[None, :] + at_r[:, None])
            left = tl.zeros((total.shape[0], _RANKS), tl.float32)
            for part in range(num_parts):
                at = (part * rows + at_m).to(tl.int64)[:, None] * max_rank + at_r[None, :]
                left += tl.load(sums + at, mask=is_own[:, None], other=0.0)
            added = _add_expanded(left, right, added)
        total = tl.where((is_own & (rank > 0))[:, None], total + added, total)
        slot = tl.min(tl.where(own > slot, own, num_slots), 0)
    return total


@triton.jit
def _add_expanded(left, right, total):
    """total + left [BLOCK_M, RANKS] right [RANKS, BLOCK_N]. To multiply bfloat16, left is split into two: it is no more
    rounded than its sums in float32 are."""
    if right.dtype == tl.float32:
        return add_product(left, right, total)
    high = rounded(left, right.dtype)
    low = rounded(left - high.to(tl.float32), right.dtype)
    return add_product(high, right, add_product(low, right, total))


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    n,
    k,
    slots,
    sums,
    ranks,
    b,
    num_slots,
    num_parts,
    max_rank,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dtype: tl.constexpr = weight.dtype.element_ty
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = at_outputs(n, BLOCK_N, EVEN_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if OVERLAP:
        _fetch_weight(weight, at_n, k)
    follow(OVERLAP)
    if slots is not None:
        own = tl.load(slots + at_m, mask=at_m < rows, other=-1)
    for start in range(0, k, BLOCK_K):
        at_k = start + tl.arange(0, BLOCK_K)
        left = tile_of_x(x, at_m, at_k, rows, k, EVEN_K, dtype)
        total = add_product(left, tile_of_weight(weight, at_n, at_k, k, EVEN_K), total)
    if bias is not None:
        total += tl.load(bias + at_n).to(tl.float32)[None, :]
    if slots is not None:
        total = adapted(total, own, sums, ranks, b, at_m, at_n, rows, n, num_slots, num_parts, max_rank)
    store_tile(out, rounded(total, out.dtype.element_ty), at_m, rows, n, BLOCK_N)


@triton.jit
def activated_number(x, ACTIVATION: tl.constexpr):
    """The approximation of GELU by tanh, x / 2 (1 + tanh(y)), is x times the sigmoid of 2 y."""
    if ACTIVATION == 0:
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == 1:
        return x / (1.0 + tl.exp(-2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if ACTIVATION == 2:
        return tl.where(x < 0.0, 0.0, x)
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    n,
    k,
    slots,
    sums,
    ranks,
    b,
    num_slots,
    num_parts,
    max_rank,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dtype: tl.constexpr = weight.dtype.element_ty
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = at_outputs(n, BLOCK_N, EVEN_N)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if OVERLAP:
        _fetch_weight(weight, at_n, k)
        _fetch_weight(weight, at_n + n, k)
    follow(OVERLAP)
    if slots is not None:
        own = tl.load(slots + at_m, mask=at_m < rows, other=-1)
    for start in range(0, k, BLOCK_K):
        at_k = start + tl.arange(0, BLOCK_K)
        left = tile_of_x(x, at_m, at_k, rows, k, EVEN_K, dtype)
        gate = add_product(left, tile_of_weight(weight, at_n, at_k, k, EVEN_K), gate)
        up = add_product(left, tile_of_weight(weight, at_n + n, at_k, k, EVEN_K), up)
    if bias is not None:
        gate += tl.load(bias + at_n).to(tl.float32)[None, :]
        up += tl.load(bias + n + at_n).to(tl.float32)[None, :]
    if slots is not None:
        gate = adapted(gate, own, sums, ranks, b, at_m, at_n, rows, 2 * n, num_slots, num_parts, max_rank)
        up = adapted(up, own, sums, ranks, b, at_m, at_n + n, rows, 2 * n, num_slots, num_parts, max_rank)
    gate = rounded(gate, dtype).to(tl.float32)
    up = rounded(up, dtype).to(tl.float32)
    store_tile(out, rounded(activated_number(gate, ACTIVATION) * up, dtype), at_m, rows, n, BLOCK_N)
