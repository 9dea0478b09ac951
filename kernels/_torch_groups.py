"""Integers in groups of 32 inputs, in torch: weights rounded to them, or kept where those of a checkpoint fit, and rows
rounded likewise. The same numbers as kernels/cpu/pack.cpp and kernels/cpu/rowwise.h have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.ops.packing import Quantized, Weight

GROUP = 32  # inputs that share a scale
MOST = {"int8": 127, "int4": 15}  # of the integers that numbers are rounded to; int4's begin at 0
_LEAST = {"int8": -128, "int4": 0}
_SCALE_ERROR = 2.0**-10  # of the largest scale: what float16 rounds of one that is not below its normal range
_GRID_ERROR = 4e-7  # of a group's largest number: what rounds a product and a sum
_PROBED = 4  # numbers of a group that tell nearly all grids that it does not lie on
_NOTHING = 1e-30  # a group of rows that is smaller is rounded to 0
_ROWS_AT_ONCE = 2**22  # numbers of a weight that are rounded together


class Groups(NamedTuple):
    """A matrix, of contiguous parts: number i of row o is numbers[o, i] * steps[o, g] + minima[o, g], g = i // (times *
    GROUP)."""

    numbers: Tensor  # int8 [out, in], of int4 from 0 to 15; in is a multiple of GROUP
    steps: Tensor  # float16 [out, in / GROUP / times]
    minima: Tensor | None  # like steps; None, of int8: 0
    times: int  # groups of 32 inputs that share a step


def groups_of(form: str, weight: Weight, device: torch.device | None = None) -> Groups:
    """A weight [out, in] as "int8" or "int4", computed on `device`: its own integers where they fit, else its numbers
    rounded; zeros fill up the last group."""
    found = kept(form, weight) if isinstance(weight, Quantized) else None
    if found is None:
        parts = []
        for start in range(0, weight.shape[0], max(_ROWS_AT_ONCE // weight.shape[1], 1)):
            rows = weight[start : start + max(_ROWS_AT_ONCE // weight.shape[1], 1)]
            parts.append(rounded(form, rows.to(device, torch.float32)))
        columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        numbers, steps, minima = columns
        assert numbers is not None and steps is not None
        return Groups(numbers, steps, minima, 1)
    return found._replace(
        numbers=found.numbers.to(device),
        steps=found.steps.to(device),
        minima=None if found.minima is None else found.minima.to(device),
    )


def kept(form: str, weight: Quantized) -> Groups | None:
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
    minima = None
    if form == "int4":
        lowest, highest = (int(bound) for bound in torch.aminmax(weight.ints))
        minima = (lowest - zeros).mul_(scales).half()
        fits = highest - lowest <= MOST[form] and bool(minima.isfinite().all())
        numbers = weight.ints - lowest
    else:
        numbers = weight.ints.int() - weight.of_inputs(zeros).int()
        lowest, highest = (int(bound) for bound in torch.aminmax(numbers))
        fits = bool((zeros == zeros.round()).all()) and lowest >= _LEAST[form] and highest <= MOST[form]
    if not fits:
        return None
    minima = None if minima is None else minima.contiguous()
    return Groups(numbers.to(torch.int8).contiguous(), halves.contiguous(), minima, weight.group // GROUP)


def rounded(form: str, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numbers float32 [out, in] as integers, steps and minima of groups of 32."""
    x = _in_groups(rows)
    if form == "int4":
        steps, minima = _grids(x.flatten(0, 1))
        numbers = _nearest(x.flatten(0, 1), steps, minima).view(x.shape)
        return numbers.to(torch.int8).flatten(1), steps.view(x.shape[:2]), minima.view(x.shape[:2])
    steps = (x.abs().amax(-1) / _tensor(127.0, x)).half()
    scale = steps.float()[..., None]
    numbers = torch.where(scale > 0, (x / scale).round_(), 0).clamp_(-MOST[form], MOST[form])
    return numbers.to(torch.int8).flatten(1), steps, None


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, n] as integers of at most 127, int8 [rows, n padded to whole groups], times scales float32 [rows,
    groups]. What is not finite makes the scale of its group NaN: it must not vanish."""
    groups = _in_groups(x.float())
    is_finite = groups.isfinite().all(-1)
    groups = torch.where(is_finite[..., None], groups, 0)
    peak = groups.abs().amax(-1)
    most = _tensor(127.0, x)
    inverse = torch.where(peak > _NOTHING, most / peak, 0)
    numbers = (groups * inverse[..., None]).round_().to(torch.int8)
    return numbers.flatten(1), torch.where(is_finite, peak / most, torch.nan)


def product(x: Tensor, weight: Groups, bias: Tensor | None) -> Tensor:
    """x [rows, in], rounded to integers, times a weight transposed, plus bias [out] -> float32 [rows, out]. Sums of a
    group are whole numbers below 2^24, exact in any order; groups are added up from the first to the last."""
    numbers, scales = quantize_rows(x)
    total = torch.zeros((len(x), len(weight.numbers)), device=x.device)
    assert numbers.shape[1] == weight.numbers.shape[1], "as many inputs"
    for g in range(scales.shape[1]):
        left, right = (each[:, g * GROUP : (g + 1) * GROUP] for each in (numbers, weight.numbers))
        scale, step = scales[:, g, None], weight.steps[:, g // weight.times].float()
        total += (left.float() @ right.float().T) * (scale * step)
        if weight.minima is not None:
            total += weight.minima[:, g // weight.times].float() * (scale * left.sum(1, keepdim=True).float())
    return total if bias is None else total.add_(bias)


def _in_groups(x: Tensor) -> Tensor:
    """[rows, n] -> [rows, groups, GROUP], filled up with zeros."""
    whole = F.pad(x, (0, -x.shape[1] % GROUP))
    return whole.reshape(len(x), whole.shape[1] // GROUP, GROUP)


def _tensor(value: float, like: Tensor) -> Tensor:
    """Divided by this, a number is rounded once; on a GPU torch would multiply with the inverse of a Python number."""
    return torch.full((), value, device=like.device)


def _nearest(x: Tensor, steps: Tensor, minima: Tensor) -> Tensor:
    """The integers of groups x float32 [groups, any] on their grids."""
    step = steps.float()[:, None]
    return torch.where(step == 0, 0, ((x - minima.float()[:, None]) / step).round_().clamp_(0, MOST["int4"]))


def _lies_on(x: Tensor, steps: Tensor, minima: Tensor, tolerance: Tensor) -> Tensor:
    numbers = steps.float()[:, None] * _nearest(x, steps, minima) + minima.float()[:, None]
    return ((numbers - x).abs() <= tolerance[:, None]).all(1)


def _grids(x: Tensor) -> tuple[Tensor, Tensor]:
    """Steps and minima, float16, of groups float32 [groups, GROUP]: of the grid that a group was rounded to before, as
    GGUF's Q4_0 and Q4_1 are: a float16 step and one of its ends in float16, the upper end if the step is negative. Else
    of the one that spans the group."""
    low, high = torch.aminmax(x, dim=1)
    tolerance = torch.maximum(low.abs(), high.abs()) * _GRID_ERROR
    steps, minima = ((high - low) / _tensor(15.0, x)).half(), low.half()
    open_ = torch.arange(len(x), device=x.device)  # groups whose grid is not found
    for num_steps in range(MOST["int4"], 0, -1):
        step = (high - low) / _tensor(float(num_steps), x)
        for one, end in ((step.half(), low.half()), (step.neg().half(), high.half())):
            some = open_[_lies_on(x[open_, :_PROBED], one[open_], end[open_], tolerance[open_])]
            some = some[_lies_on(x[some], one[some], end[some], tolerance[some])]
            if len(some):
                steps[some], minima[some] = one[some], end[some]
                open_ = open_[torch.isin(open_, some, invert=True)]
    return steps, minima
