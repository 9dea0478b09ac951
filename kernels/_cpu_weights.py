"""Weights in the formats of the native kernels: rounded to them, or kept where integers of a checkpoint fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import specserve.kernels._native as _native
from specserve.kernels._torch_groups import GROUP, kept
from specserve.ops.packing import Quantized, Weight

FLOAT32, BFLOAT16, INT8, INT4 = range(4)
FORMATS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "int8": INT8, "int4": INT4}
_NAMES = {INT8: "int8", INT4: "int4"}  # of integers in groups
_INT8_OFFSET = 128


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear layer's packed weight; `bias` is padded, and lies as the weight's outputs do."""

    native: _native.Weight
    memory: Tensor  # uint8, what `native` points to
    bias: Tensor | None
    outputs: int


def pack_tiles(form: int, weight: Weight, out: Tensor) -> None:
    """Into the tiles `out`, zeros, as kernels/cpu/pack.h has them."""
    outputs, inputs = weight.shape
    groups = kept(_NAMES[form], weight) if isinstance(weight, Quantized) and form in _NAMES else None
    if groups is None:
        rows = weight[:].to(torch.float32).contiguous()
        _native.pack(form, rows.data_ptr(), outputs, inputs, out.data_ptr())
        return
    numbers = (groups.numbers.short() + (_INT8_OFFSET if form == INT8 else 0)).to(torch.uint8)
    minima = torch.zeros_like(groups.steps) if groups.minima is None else groups.minima
    steps, minima = (
        each.repeat_interleave(groups.times, 1)[:, : inputs // GROUP].contiguous() for each in (groups.steps, minima)
    )
    addresses = numbers.data_ptr(), steps.data_ptr(), minima.data_ptr()
    _native.pack_groups(form, *addresses, outputs, inputs, out.data_ptr())
