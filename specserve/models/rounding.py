"""How exactly kernels keep a checkpoint's quantised matrices: measured by what they multiply with."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from specserve.checkpoint.folder import read_config
from specserve.checkpoint.quantized import QuantizedWeights
from specserve.files import reading
from specserve.ops import Ops
from specserve.ops.packing import Weight, rows_of

_MOST_INPUTS, _MOST_OUTPUTS = 512, 256  # of a matrix that are looked at
_EXACT = 1e-6  # errors: at most what sums in float32 round
_OF_FLOAT16 = 1e-3  # less than int8 would round, and more than float16 does of a scale or of a scale times a zero


def as_stored(folder: Path, automatic: Ops, choose: Callable[[str], Ops]) -> Ops:
    """The kernels for the model in `folder` where nobody says how to store weights, given those that are `automatic`
    without a model: those that `choose` makes for int4, rather than int8, for a checkpoint that int4 keeps. Raises
    ModelError for a folder that cannot be read."""
    if automatic.quantization != "int8":
        return automatic
    with reading(folder):
        fits = QuantizedWeights(folder, read_config(folder)).fits_int4
    return choose("int4") if fits else automatic


def relative_error(ops: Ops, weight: Weight, *, is_head: bool = False) -> float:
    """The root mean square of the differences between a matrix's numbers and those that `ops` multiplies with, over
    that of its numbers. At most 256 outputs, its first, and 512 inputs, evenly spread, are looked at."""
    some = rows_of(weight, slice(0, _MOST_OUTPUTS))
    numbers = some[:].float().cpu()
    inputs = torch.linspace(0, numbers.shape[1] - 1, min(numbers.shape[1], _MOST_INPUTS)).round().long()
    one_by_one = torch.zeros(-(-len(inputs) // ops.row_multiple) * ops.row_multiple, numbers.shape[1])
    one_by_one[torch.arange(len(inputs)), inputs] = 1.0
    packed = ops.pack_head(some) if is_head else ops.pack(some)
    product = ops.linear(ops.quantize_activation(one_by_one.to(ops.device)), packed)
    found, wanted = product[: len(inputs)].float().cpu().T, numbers[:, inputs]
    size = float(wanted.norm())
    return float((found - wanted).norm()) / (size or 1.0)


def how_kept(weights: QuantizedWeights, ops: Ops, most: int = 1) -> str:
    """For people: what `ops` make of a checkpoint's quantised matrices, measured on at most so many of each kind, the
    smallest first; empty where nothing is quantised."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(weights.matrices, key=lambda name: math.prod(weights.matrices[name].shape)):
        kinds.setdefault(weights.matrices[name].kind, []).append(name)
    parts = [f"{kind}: {_in_words(ops, weights, names[:most])}" for kind, names in kinds.items()]
    return f"{weights.kind} {'; '.join([*parts, *weights.notes])}" if parts else ""


def _in_words(ops: Ops, weights: QuantizedWeights, names: list[str]) -> str:
    error = max(relative_error(ops, weights[name], is_head=name == "lm_head.weight") for name in names)
    stored = str(ops.dtype).removeprefix("torch.") if ops.quantization == "none" else ops.quantization
    if error <= _EXACT:
        return f"kept in {stored}"
    if error <= _OF_FLOAT16 and ops.quantization != "none":
        return f"kept in {stored} but for what float16 rounds of scales and zeros, error {100 * error:.2g} %"
    hint = " (int8 rounds less)" if ops.quantization == "int4" else ""
    return f"rounded to {stored}, error {100 * error:.2g} %{hint}"
