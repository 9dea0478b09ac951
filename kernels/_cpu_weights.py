"""Weights in the formats of the native kernels: rounded to them, or kept where integers of a checkpoint fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import specserve.kernels._native as _native
from specserve.ops.packing import Quantized, Weight

GROUP = 32  # inputs that share a scale
FLOAT32, BFLOAT16, INT8, INT4 = range(4)
FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
_INT8_OFFSET, _INT4_MOST = 128, 15
_SCALE_ERROR = 2.0**-10  # of the largest scale: what float16 rounds of one that is not below its normal range


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's packed weight; `bias` is padded, and lies as the weight's outputs do."""

    native: _native.Weight
    memory: Tensor  # uint8, what `native` points to
    bias: Tensor | None
    outputs: int


class _Groups(NamedTuple):
    """Number i of row o is numbers[o, i] * scales[o, g] + minima[o, g], g = i // GROUP; of int8 it is (numbers[o, i] -
    128) * scales[o, g]."""

    numbers: Tensor  # uint8 [out, in]
    scales: Tensor  # float16 [out, in / GROUP]
    minima: Tensor  # float16 [out, in / GROUP]


def pack_tiles(form: int, weight: Weight, out: Tensor) -> None:
    """Into the tiles `out`, zeros, as kernels/cpu/pack.h has them."""
    outputs, inputs = weight.shape
    groups = _kept(form, weight) if isinstance(weight, Quantized) and form in (INT8, INT4) else None
    if groups is None:
        rows = weight[:].to(torch.float32).contiguous()
        _native.pack(form, rows.data_ptr(), outputs, inputs, out.data_ptr())
    else:
        numbers, scales, minima = (part.data_ptr() for part in groups)
        _native.pack_groups(form, numbers, scales, minima, outputs, inputs, out.data_ptr())


def _kept(form: int, weight: Quantized) -> _Groups | None:
    """Its own integers, scales and zeros, if they fit the format; None for inputs in another order, groups that no
    groups of 32 make up, scales beyond float16, and integers that are too many or no whole number from their zero. A
    scale far below the largest, as of inputs that are dead, may be as inexact as all others are small beside that."""
    if weight.order is not None or weight.group % GROUP or weight.shape[1] % GROUP:
        return None
    scales = weight.scales.float()
    halves = scales.half()
    if not bool(((halves.float() - scales).abs() <= _SCALE_ERROR * scales.abs().max()).all()):
        return None
    zeros = torch.zeros_like(scales) if weight.zeros is None else weight.zeros.float()
    if form == INT4:
        lowest, highest = (int(bound) for bound in torch.aminmax(weight.ints))
        minima = (lowest - zeros).mul_(scales).half()
        fits = highest - lowest <= _INT4_MOST and bool(minima.isfinite().all())
        numbers = weight.ints - lowest
    else:
        numbers = weight.ints.int() - weight.of_inputs(zeros).int()
        lowest, highest = (int(bound) for bound in torch.aminmax(numbers))
        fits = bool((zeros == zeros.round()).all()) and lowest >= -_INT8_OFFSET and highest < _INT8_OFFSET
        numbers, minima = numbers + _INT8_OFFSET, torch.zeros_like(halves)
    if not fits:
        return None
    times = weight.group // GROUP
    spread = (each.repeat_interleave(times, 1)[:, : weight.shape[1] // GROUP] for each in (halves, minima))
    return _Groups(*(each.contiguous() for each in (numbers.to(torch.uint8), *spread)))
