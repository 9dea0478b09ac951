"""Mixtures of experts in Triton: the pairs of a row and an expert that it goes to, expert by expert.

A pair's bits are those of its row and its expert's weights alone, added up as by a linear layer of that shape; a row's
sum over its experts goes in their order. Programs of experts that no row goes to end at once: their weights are not
read. Nothing waits for the host, and a launch is as large as its number of rows may ask for, so a graph can have it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve.kernels._triton_groups import Experts
from specserve.kernels._triton_linear import (
    ACTIVATIONS,
    Tiles,
    activated_number,
    at_outputs,
    constants,
    options,
    tile_of_weight,
    tile_of_x,
    tiles_for,
)
from specserve.kernels._triton_numbers import add_product, follow, overlap, rounded, shared_memory_of

_PAIRS_AT_ONCE = 1024
_SUM_BLOCK = 1024  # outputs of a row that one program adds up


class Pairs(NamedTuple):
    """Which rows go to which experts. Pair i is of row i // per_token."""

    order: Tensor  # int32 [experts, pairs], of each its pairs
    counts: Tensor  # int32 [experts], and how many these are
    rows: int
    per_token: int

    @property
    def number(self) -> int:
        return self.rows * self.per_token

    def rows_of_a_program(self) -> int:
        """Of an expert: what it has on average. No more than all rows go to one."""
        return -(-self.number // len(self.counts))


def pairs_of(chosen: Tensor, num_experts: int) -> Pairs:
    """Of experts [rows, per_token], those of a row all different."""
    rows, per_token = chosen.shape
    order = torch.empty((num_experts, rows * per_token), dtype=torch.int32, device=chosen.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    how = overlap(chosen.device)
    _pairs_kernel[(num_experts,)](chosen.contiguous(), order, counts, rows * per_token, _PAIRS_AT_ONCE, **how)
    return Pairs(order, counts, rows, per_token)


def experts(
    x: Tensor, weights: Experts, chosen: Tensor, shares: Tensor, activation: str, shared: Tensor | None
) -> Tensor:
    """x [rows, in] through the experts [rows, per_token] of each row, times `shares` float32 alike, added up, plus
    `shared` float32 [rows, out] -> float32 [rows, out]. What is between an expert's products is rounded to the weights'
    dtype."""
    pairs = pairs_of(chosen, len(weights.down))
    n, outputs = weights.down.shape[2], weights.down.shape[1]
    between = torch.empty((pairs.number, n), dtype=weights.down.dtype, device=x.device)
    _launch(_gated_kernel, x, weights.gate_up, between, pairs, pairs.per_token, ACTIVATIONS[activation])
    found = torch.empty((pairs.number, outputs), dtype=torch.float32, device=x.device)
    _launch(_linear_kernel, between, weights.down, found, pairs, 1)
    return add_up(found, shares, shared)


def _launch(kernel: Any, x: Tensor, weight: Tensor, out: Tensor, pairs: Pairs, per_row: int, *more: int) -> None:
    """Of x a row belongs to `per_row` pairs."""
    assert x.is_contiguous() and weight.is_contiguous() and x.shape[1] == weight.shape[2], (x.shape, weight.shape)
    parts, n, k = weight.shape[1] // out.shape[1], out.shape[1], x.shape[1]
    memory = shared_memory_of(x.device)
    cut: Tiles = tiles_for(pairs.rows_of_a_program(), n, k, weight.element_size(), parts, memory)
    grid = -(-pairs.rows // cut.block_m), -(-n // cut.block_n), len(weight)
    tensors = x, weight, out, pairs.order, pairs.counts
    sizes = len(x), pairs.number, n, k, per_row, *more, *constants(cut, n, k)
    kernel[grid](*tensors, *sizes, **options(cut, x))


def add_up(found: Tensor, shares: Tensor, shared: Tensor | None) -> Tensor:
    """Of what pairs found, float32 [rows * per_token, out], each row's sum with `shares` [rows, per_token], from the
    first to the last, plus `shared` float32 [rows, out]."""
    (rows, per_token), outputs = shares.shape, found.shape[1]
    out = torch.empty((rows, outputs), dtype=torch.float32, device=found.device)
    if rows:
        grid = rows, -(-outputs // _SUM_BLOCK)
        tensors = found, shares.contiguous(), shared, out
        _add_up_kernel[grid](*tensors, outputs, per_token, _SUM_BLOCK, **overlap(found.device))
    return out


@triton.jit(do_not_specialize=["num_pairs"])
def _pairs_kernel(chosen, order, counts, num_pairs, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    expert = tl.program_id(0)
    own = order + expert.to(tl.int64) * num_pairs
    count = 0
    follow(OVERLAP)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_own = (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(own + count + tl.cumsum(is_own, 0) - 1, pair, mask=is_own > 0)
        count += tl.sum(is_own, 0)
    tl.store(counts + expert, count)


@triton.jit
def pairs_of_program(order, count, num_pairs, at, BLOCK_M: tl.constexpr):
    """Those `at` each place in this program's rows, `num_pairs` where there is none."""
    at = tl.program_id(0) * BLOCK_M + at
    own = order + tl.program_id(2).to(tl.int64) * num_pairs
    return tl.load(own + at, mask=at < count, other=num_pairs)


@triton.jit
def store_pairs(out, y, pair, num_pairs, n, BLOCK_N: tl.constexpr):
    at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (pair < num_pairs)[:, None] & (at_n < n)[None, :]
    tl.store(out + pair.to(tl.int64)[:, None] * n + at_n[None, :], rounded(y, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "num_pairs"])
def _gated_kernel(
    x, weight, out, order, counts, rows, num_pairs, n, k, PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = weight.dtype.element_ty
    follow(OVERLAP)
    count = tl.load(counts + tl.program_id(2))
    if tl.program_id(0) * BLOCK_M < count:
        pair = pairs_of_program(order, count, num_pairs, tl.arange(0, BLOCK_M), BLOCK_M)
        row = pair // PER_ROW
        at_n = at_outputs(n, BLOCK_N, EVEN_N)
        own = weight + tl.program_id(2).to(tl.int64) * 2 * n * k
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):
            at_k = start + tl.arange(0, BLOCK_K)
            left = tile_of_x(x, row, at_k, rows, k, EVEN_K, dtype)
            gate = add_product(left, tile_of_weight(own, at_n, at_k, k, EVEN_K), gate)
            up = add_product(left, tile_of_weight(own, at_n + n, at_k, k, EVEN_K), up)
        gate = rounded(gate, dtype).to(tl.float32)
        up = rounded(up, dtype).to(tl.float32)
        store_pairs(out, activated_number(gate, ACTIVATION) * up, pair, num_pairs, n, BLOCK_N)


@triton.jit(do_not_specialize=["rows", "num_pairs"])
def _linear_kernel(
    x, weight, out, order, counts, rows, num_pairs, n, k, PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = weight.dtype.element_ty
    follow(OVERLAP)
    count = tl.load(counts + tl.program_id(2))
    if tl.program_id(0) * BLOCK_M < count:
        pair = pairs_of_program(order, count, num_pairs, tl.arange(0, BLOCK_M), BLOCK_M)
        row = pair // PER_ROW
        at_n = at_outputs(n, BLOCK_N, EVEN_N)
        own = weight + tl.program_id(2).to(tl.int64) * n * k
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):
            at_k = start + tl.arange(0, BLOCK_K)
            left = tile_of_x(x, row, at_k, rows, k, EVEN_K, dtype)
            total = add_product(left, tile_of_weight(own, at_n, at_k, k, EVEN_K), total)
        store_pairs(out, total, pair, num_pairs, n, BLOCK_N)


@triton.jit
def _add_up_kernel(found, shares, shared, out, n, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow(OVERLAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + place
        total += tl.load(found + pair * n + at, mask=at < n, other=0.0) * tl.load(shares + pair)
    if shared is not None:
        total += tl.load(shared + row * n + at, mask=at < n, other=0.0)
    tl.store(out + row * n + at, total, mask=at < n)
