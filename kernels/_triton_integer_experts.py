"""Mixtures of experts of int8 and int4 in Triton: as _triton_experts, with the products of _triton_integers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve.kernels._torch_groups import GROUP
from specserve.kernels._triton_experts import add_up, pairs_of, pairs_of_program, store_pairs
from specserve.kernels._triton_groups import IntegerExperts, Integers, Rows, empty_rows
from specserve.kernels._triton_integers import constants, product, quantize_tile, tiles_for
from specserve.kernels._triton_linear import ACTIVATIONS, activated_number, at_outputs
from specserve.kernels._triton_numbers import follow, overlap, shared_memory_of, store_groups

_GROUP = tl.constexpr(GROUP)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a launch is cut; see _triton_integers.Tiles."""

    grid: tuple[int, int, int]
    constants: tuple[int, int, int, bool]  # TIMES, BLOCK_M, BLOCK_N, EVEN_N
    options: dict[str, int]


def experts(
    x: Rows, weights: IntegerExperts, chosen: Tensor, shares: Tensor, activation: str, shared: Tensor | None
) -> Tensor:
    """x [rows, in] through the experts [rows, per_token] of each row, times `shares` float32 alike, added up, plus
    `shared` float32 [rows, out] -> float32 [rows, out]. What is between an expert's products is in integers, too."""
    num_experts, _, outputs, _ = weights.down.numbers.shape
    n, pairs = weights.down.inputs, pairs_of(chosen, num_experts)
    between = empty_rows(pairs.number, n, x.ints.device)
    rows_each, order = pairs.rows_of_a_program(), (pairs.order, pairs.counts)
    if pairs.rows:
        width = between.ints.shape[1]
        cut = _cut(rows_each, pairs.rows, weights.gate_up, width, n, True)
        sizes = pairs.rows, pairs.number, n, x.ints.shape[1], width, pairs.per_token, ACTIVATIONS[activation]
        written = between.ints, between.scales
        _gated_kernel[cut.grid](*_tensors(x, weights.gate_up), *written, *order, *sizes, *cut.constants, **cut.options)
    found = torch.empty((pairs.number, outputs), dtype=torch.float32, device=x.ints.device)
    if pairs.rows:
        cut = _cut(rows_each, pairs.rows, weights.down, outputs, outputs, False)
        own_sizes = pairs.number, pairs.number, outputs, between.ints.shape[1]
        _linear_kernel[cut.grid](
            *_tensors(between, weights.down), found, *order, *own_sizes, *cut.constants, **cut.options
        )
    total: Tensor = add_up(found, shares, shared)
    return total


def _tensors(x: Rows, weight: Integers) -> tuple[Tensor | None, ...]:
    return x.ints, x.scales, weight.numbers, weight.steps, weight.minima


def _cut(rows_each: int, rows: int, weight: Integers, columns: int, n: int, is_quantized: bool) -> _Cut:
    """For n outputs, of which `columns`, padding included, are written."""
    device = weight.numbers.device
    tiles = tiles_for(rows_each, n, weight.minima is not None, is_quantized, shared_memory_of(device))
    return _Cut(
        (-(-rows // tiles.block_m), -(-columns // tiles.block_n), len(weight.numbers)),
        constants(tiles, weight.times, n, columns),
        {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, **overlap(device)},
    )


@triton.jit
def _product_of_expert(
    x, scales, weight, steps, minima, row, at_n, rows, n, k,
    TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As `product`, of the weight [n, k] of this program's expert."""
    expert = tl.program_id(2).to(tl.int64)
    of_steps = expert * tl.cdiv(k // _GROUP, TIMES) * n
    steps += of_steps
    if minima is None:
        weight += expert * n * k
    else:
        weight += expert * n * (k // 2)
        minima += of_steps
    return product(x, scales, weight, steps, minima, row, at_n, rows, n, k, TIMES, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["rows", "num_pairs"])
def _gated_kernel(
    x, scales, weight, steps, minima, out, out_scales, order, counts, rows, num_pairs, n, k, out_k,
    PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr,
    TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    count = tl.load(counts + tl.program_id(2))
    if tl.program_id(0) * BLOCK_M < count:
        row = pairs_of_program(order, count, num_pairs, tl.arange(0, BLOCK_M), BLOCK_M) // PER_ROW
        at_n = at_outputs(n, BLOCK_N, EVEN_N)
        y = _product_of_expert(x, scales, weight, steps, minima, row, at_n, rows, 2 * n, k, TIMES, BLOCK_M, BLOCK_N)
        y = activated_number(y, ACTIVATION) * _product_of_expert(
            x, scales, weight, steps, minima, row, at_n + n, rows, 2 * n, k, TIMES, BLOCK_M, BLOCK_N
        )
        found, scale, sums, at, at_g = quantize_tile(y, n, BLOCK_M, BLOCK_N)
        pair = pairs_of_program(order, count, num_pairs, at, BLOCK_M)
        mask = (pair < num_pairs) & (at_g < out_k // _GROUP)
        store_groups(out, out_scales, found, scale, sums, pair.to(tl.int64), at_g, mask, num_pairs, out_k)


@triton.jit(do_not_specialize=["rows", "num_pairs"])
def _linear_kernel(
    x, scales, weight, steps, minima, out, order, counts, rows, num_pairs, n, k,
    TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    count = tl.load(counts + tl.program_id(2))
    if tl.program_id(0) * BLOCK_M < count:
        pair = pairs_of_program(order, count, num_pairs, tl.arange(0, BLOCK_M), BLOCK_M)
        at_n = at_outputs(n, BLOCK_N, EVEN_N)
        y = _product_of_expert(x, scales, weight, steps, minima, pair, at_n, rows, n, k, TIMES, BLOCK_M, BLOCK_N)
        store_pairs(out, y, pair, num_pairs, n, BLOCK_N)
