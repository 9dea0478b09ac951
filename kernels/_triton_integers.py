"""Linear layers of int8 and int4 in Triton: rows and weights are integers in groups of 32 inputs.

A group's sum is a whole number, exact however it is added up. What a row's bits depend on is how these sums are added:
one by one, from the first group to the last, each by one fused multiplication and addition (and one of int4's minimum),
by one program. Tiles decide who computes what and how far ahead it is read, and never about bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve.kernels._torch_groups import GROUP
from specserve.kernels._triton_bank import Shrunk
from specserve.kernels._triton_groups import Integers, Rows, empty_rows
from specserve.kernels._triton_linear import ACTIVATIONS, activated_number, adapted, adapters_of, at_outputs, store_tile
from specserve.kernels._triton_numbers import (
    H100_SHARED_MEMORY,
    follow,
    overlap,
    quantize_groups,
    rounded,
    shared_memory_of,
    store_groups,
)

STEP = 4  # groups of a step of the loop: few enough that their scales are in registers a step ahead
_RESERVED = 2 * 1024  # bytes of shared memory that the compiler may want for itself
_MOST_STAGES = {16: 6, 32: 5, 64: 4, 128: 3}  # by block_m
_SHARED_MEMORY_OF_AMD = 64 * 1024  # on whose chips Triton keeps what is on its way in registers: a few tiles fill them
_NARROW = 4096  # fewer outputs are cut finer, so that every multiprocessor has a program
_QUANTIZE_BLOCK = 1024  # numbers of a row that one program rounds
_GROUP, _STEP = tl.constexpr(GROUP), tl.constexpr(STEP)


class Tiles(NamedTuple):
    """How a launch is cut. None of it decides about bits."""

    block_m: int  # rows of a program
    block_n: int  # outputs of a program; of a gated layer so many of gate, and then of up
    num_warps: int
    num_stages: int

    def shared_memory(self, is_int4: bool) -> int:
        """Bytes of the tiles of x and of the weight that are on their way."""
        weights = self.block_n // 2 if is_int4 else self.block_n
        return self.num_stages * (self.block_m + weights) * STEP * int(GROUP)


def tiles_for(
    rows: int, n: int, is_int4: bool, is_quantized: bool = False, shared_memory: int = H100_SHARED_MEMORY
) -> Tiles:
    """For so many rows times weights of n outputs; where the result `is_quantized` a program has whole groups of them.
    There are four buckets of rows, and all of a bucket are cut alike."""
    block_m = next((m for m in (16, 32, 64) if rows <= m), 128)
    if block_m == 128:
        is_narrow = is_int4 or is_quantized  # wider ones spill registers
        cut = Tiles(block_m, 32 if is_narrow else 64, 8, _MOST_STAGES[block_m])
    elif n < _NARROW and not is_quantized:
        cut = Tiles(block_m, 16, 2, _MOST_STAGES[block_m])
    else:
        cut = Tiles(block_m, 32, 4, _MOST_STAGES[block_m])
    if shared_memory <= _SHARED_MEMORY_OF_AMD:
        return _tiles_for_amd(block_m, is_int4, is_quantized)
    while cut.num_stages > 1 and cut.shared_memory(is_int4) > shared_memory - _RESERVED:
        cut = cut._replace(num_stages=cut.num_stages - 1)
    return cut


def _tiles_for_amd(most: int, is_int4: bool, is_quantized: bool) -> Tiles:
    """For so many rows at most. What is on its way is in registers, and none of these tiles spills any."""
    if is_int4 and is_quantized:
        return Tiles(16, 64, 2, 1)
    block_m = min(most, 32) if is_quantized else most
    is_wide = block_m <= 32  # as those of whole groups have to be
    num_warps = {16: 2, 32: 4, 64: 4, 128: 8}[block_m]
    return Tiles(block_m, 32 if is_wide else 16, num_warps, 1 if is_int4 else 2)


def quantize(x: Tensor) -> Rows:
    """x [rows, any] for a linear layer."""
    rows, n = x.shape
    assert x.is_contiguous()
    out = empty_rows(rows, n, x.device)
    if rows:
        grid = rows, -(-out.ints.shape[1] // _QUANTIZE_BLOCK)
        _quantize_kernel[grid](
            x, out.ints, out.scales, rows, n, out.ints.shape[1], _QUANTIZE_BLOCK, **overlap(x.device)
        )
    return out


def linear(x: Rows, weight: Integers, out_dtype: torch.dtype, adapters: Shrunk | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus its bias, plus what `adapters` add -> [rows, out], rounded
    once."""
    device = x.ints.device
    cut = tiles_for(len(x), weight.outputs, weight.minima is not None, False, shared_memory_of(device))
    out = torch.empty((len(x), weight.outputs), dtype=out_dtype, device=device)
    if len(x):
        grid = -(-len(x) // cut.block_m), -(-weight.outputs // cut.block_n)
        how = constants(cut, weight.times, weight.outputs, weight.outputs)
        _linear_kernel[grid](*_arguments(x, weight, out, 1, adapters), *how, **_options(cut, x))
    return out


def gated(x: Rows, weight: Integers, activation: str, adapters: Shrunk | None = None) -> Rows:
    """activation(gate) * up of a weight [2 n, in] with its bias, gate's n rows and then up's, plus what `adapters` add
    -> [rows, n]."""
    return _activated(x, weight, activation, 2, adapters)


def activated(x: Rows, weight: Integers, activation: str, adapters: Shrunk | None = None) -> Rows:
    """activation(x weight^T + bias), plus what `adapters` add before it -> [rows, out]."""
    return _activated(x, weight, activation, 1, adapters)


def _activated(x: Rows, weight: Integers, activation: str, parts: int, adapters: Shrunk | None) -> Rows:
    n, device = weight.outputs // parts, x.ints.device
    cut = tiles_for(len(x), n, weight.minima is not None, True, shared_memory_of(device))
    out = empty_rows(len(x), n, device)
    if len(x):
        grid = -(-len(x) // cut.block_m), -(-out.ints.shape[1] // cut.block_n)
        arguments = _arguments(x, weight, out.ints, parts, adapters)
        more = out.scales, out.ints.shape[1], parts == 2, ACTIVATIONS[activation]
        how = constants(cut, weight.times, n, out.ints.shape[1])
        _activated_kernel[grid](*arguments, *more, *how, **_options(cut, x))
    return out


def _arguments(
    x: Rows, weight: Integers, out: Tensor, parts: int, adapters: Shrunk | None
) -> tuple[Tensor | int | None, ...]:
    assert x.width == weight.inputs and x.ints.shape[1] == GROUP * weight.num_groups, (x.width, weight.inputs)
    tensors = x.ints, x.scales, weight.numbers, weight.steps, weight.minima, weight.bias, out
    sizes = len(x), weight.outputs // parts, x.ints.shape[1]
    return *tensors, *sizes, *adapters_of(adapters, weight.outputs)


def constants(cut: Tiles, times: int, n: int, columns: int) -> tuple[int, int, int, bool]:
    """TIMES, BLOCK_M, BLOCK_N, EVEN_N of the kernels, for n outputs, of which `columns`, padding included, are
    written."""
    return times, cut.block_m, cut.block_n, n == columns and n % cut.block_n == 0


def _options(cut: Tiles, x: Rows) -> dict[str, int]:
    return {"num_warps": cut.num_warps, "num_stages": cut.num_stages, **overlap(x.ints.device)}


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(x, ints, scales, rows, n, k, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    follow(OVERLAP)
    numbers = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    found, scale, sums = quantize_groups(tl.reshape(numbers, (BLOCK // _GROUP, _GROUP)))
    at_g = first // _GROUP + tl.arange(0, BLOCK // _GROUP)
    store_groups(ints, scales, found, scale, sums, row, at_g, at_g < k // _GROUP, rows, k)


@triton.jit
def _scales_of_rows(scales, group, at_m, rows, num_groups):
    """Of a group float32 [BLOCK_M]; behind the last group 0, which takes away whatever is multiplied."""
    mask = (at_m < rows) & (group < num_groups)
    return tl.load(scales + group * rows + at_m, mask=mask, other=0.0)


@triton.jit
def _of_outputs(values, group, at_n, n, num_groups, TIMES: tl.constexpr):
    """Of a group float32 [BLOCK_N], behind the last those of the last."""
    group = tl.minimum(group, num_groups - 1) // TIMES
    return tl.load(values + group.to(tl.int64) * n + at_n).to(tl.float32)


@triton.jit
def _step_of_rows(scales, first, at_m, rows, num_groups):
    """Of the groups of a step."""
    return (
        _scales_of_rows(scales, first, at_m, rows, num_groups),
        _scales_of_rows(scales, first + 1, at_m, rows, num_groups),
        _scales_of_rows(scales, first + 2, at_m, rows, num_groups),
        _scales_of_rows(scales, first + 3, at_m, rows, num_groups),
    )


@triton.jit
def _step_of_outputs(values, first, at_n, n, num_groups, TIMES: tl.constexpr):
    return (
        _of_outputs(values, first, at_n, n, num_groups, TIMES),
        _of_outputs(values, first + 1, at_n, n, num_groups, TIMES),
        _of_outputs(values, first + 2, at_n, n, num_groups, TIMES),
        _of_outputs(values, first + 3, at_n, n, num_groups, TIMES),
    )


@triton.jit
def _integers_of_rows(x, group, at_m, rows, k, num_groups):
    """[BLOCK_M, GROUP]"""
    at = tl.minimum(group, num_groups - 1) * _GROUP + tl.arange(0, _GROUP)
    return tl.load(x + at_m.to(tl.int64)[:, None] * k + at[None, :], mask=(at_m < rows)[:, None], other=0)


@triton.jit
def _integers_of_outputs(weight, group, at_n, n, num_groups):
    """[GROUP, BLOCK_N]"""
    own = weight + tl.minimum(group, num_groups - 1).to(tl.int64) * n * _GROUP
    return tl.load(own + at_n[None, :] * _GROUP + tl.arange(0, _GROUP)[:, None])


@triton.jit
def _fma(x, y, z):
    """x y + z, rounded once: where a compiler may choose, two kernels may differ."""
    return tl.fma(x, tl.broadcast_to(y, x.shape), tl.broadcast_to(z, x.shape))


@triton.jit
def _add_group(total, left, right, scale, step):
    """total [BLOCK_M, BLOCK_N] plus a group's sum, times what it stands for."""
    dots = tl.dot(left, right, out_dtype=tl.int32)
    return _fma(dots.to(tl.float32), scale[:, None] * step[None, :], total)


@triton.jit
def product(
    x, scales, weight, steps, minima, at_m, at_n, rows, n, k,
    TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] of the outputs at_n of all `n` that a weight has. Scales are read a step before they are
    needed: the compiler has only what it multiplies underway for longer."""
    num_groups = k // _GROUP
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sums_of_rows = scales + num_groups * rows
    scale = _step_of_rows(scales, 0, at_m, rows, num_groups)
    step = _step_of_outputs(steps, 0, at_n, n, num_groups, TIMES)
    if minima is None:
        for first in range(0, num_groups, _STEP):
            next_scale = _step_of_rows(scales, first + _STEP, at_m, rows, num_groups)
            next_step = _step_of_outputs(steps, first + _STEP, at_n, n, num_groups, TIMES)
            for i in tl.static_range(_STEP):
                left = _integers_of_rows(x, first + i, at_m, rows, k, num_groups)
                right = _integers_of_outputs(weight, first + i, at_n, n, num_groups)
                total = _add_group(total, left, right, scale[i], step[i])
            scale, step = next_scale, next_step
    else:
        sums = _step_of_rows(sums_of_rows, 0, at_m, rows, num_groups)
        least = _step_of_outputs(minima, 0, at_n, n, num_groups, TIMES)
        for first in range(0, num_groups, _STEP):
            next_scale = _step_of_rows(scales, first + _STEP, at_m, rows, num_groups)
            next_step = _step_of_outputs(steps, first + _STEP, at_n, n, num_groups, TIMES)
            next_sums = _step_of_rows(sums_of_rows, first + _STEP, at_m, rows, num_groups)
            next_least = _step_of_outputs(minima, first + _STEP, at_n, n, num_groups, TIMES)
            for i in tl.static_range(_STEP // 2):
                both = _integers_of_outputs(weight, first // 2 + i, at_n, n, num_groups // 2)
                for j in tl.static_range(2):
                    left = _integers_of_rows(x, first + 2 * i + j, at_m, rows, k, num_groups)
                    right = ((both >> 4) if j == 1 else (both & 15)).to(tl.int8)
                    total = _add_group(total, left, right, scale[2 * i + j], step[2 * i + j])
                    total = _fma(
                        tl.broadcast_to(least[2 * i + j][None, :], total.shape), sums[2 * i + j][:, None], total
                    )
            scale, step, sums, least = next_scale, next_step, next_sums, next_least
    return total


@triton.jit
def quantize_tile(y, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program's outputs [BLOCK_M, BLOCK_N] as groups; and of each group which of the program's rows has it, and which
    of the row's groups it is. Outputs behind the last are zeros, which fill up groups."""
    PER_ROW: tl.constexpr = BLOCK_N // _GROUP
    is_there = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N) < n
    y = tl.where(is_there[None, :], y, 0.0)
    found, scale, sums = quantize_groups(tl.reshape(y, (BLOCK_M * PER_ROW, _GROUP)))
    each = tl.arange(0, BLOCK_M * PER_ROW)
    return found, scale, sums, each // PER_ROW, tl.program_id(1) * PER_ROW + each % PER_ROW


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, scales, weight, steps, minima, bias, out, rows, n, k, slots, sums, ranks, b, num_slots, num_parts, max_rank,
    TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = at_outputs(n, BLOCK_N, EVEN_N)
    follow(OVERLAP)
    total = product(x, scales, weight, steps, minima, at_m, at_n, rows, n, k, TIMES, BLOCK_M, BLOCK_N)
    if bias is not None:
        total += tl.load(bias + at_n)[None, :]
    if slots is not None:
        own = tl.load(slots + at_m, mask=at_m < rows, other=-1)
        total = adapted(total, own, sums, ranks, b, at_m, at_n, rows, n, num_slots, num_parts, max_rank)
    store_tile(out, rounded(total, out.dtype.element_ty), at_m, rows, n, BLOCK_N)


@triton.jit(do_not_specialize=["rows"])
def _activated_kernel(
    x, scales, weight, steps, minima, bias, out, rows, n, k, slots, sums, ranks, b, num_slots, num_parts, max_rank,
    out_scales, out_k, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    TIMES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    parts: tl.constexpr = 2 if GATED else 1
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = at_outputs(n, BLOCK_N, EVEN_N)
    follow(OVERLAP)
    y = product(x, scales, weight, steps, minima, at_m, at_n, rows, parts * n, k, TIMES, BLOCK_M, BLOCK_N)
    if bias is not None:
        y += tl.load(bias + at_n)[None, :]
    if slots is not None:
        own = tl.load(slots + at_m, mask=at_m < rows, other=-1)
        y = adapted(y, own, sums, ranks, b, at_m, at_n, rows, parts * n, num_slots, num_parts, max_rank)
    y = activated_number(y, ACTIVATION)
    if GATED:
        up = product(x, scales, weight, steps, minima, at_m, at_n + n, rows, 2 * n, k, TIMES, BLOCK_M, BLOCK_N)
        if bias is not None:
            up += tl.load(bias + n + at_n)[None, :]
        if slots is not None:
            up = adapted(up, own, sums, ranks, b, at_m, at_n + n, rows, 2 * n, num_slots, num_parts, max_rank)
        y *= up
    found, scale, of_sums, at, at_g = quantize_tile(y, n, BLOCK_M, BLOCK_N)
    row = tl.program_id(0) * BLOCK_M + at
    mask = (row < rows) & (at_g < out_k // _GROUP)
    store_groups(out, out_scales, found, scale, of_sums, row.to(tl.int64), at_g, mask, rows, out_k)
