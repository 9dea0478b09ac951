"""What the Triton kernels read: weights of integers, rows for a linear layer in integers, and weights of experts.

Inputs are padded with zeros to a multiple of PADDED, so that no kernel masks them. What a program reads of a group is
one piece of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.kernels._torch_groups import GROUP, groups_of, quantize_rows
from specserve.ops.packing import Source, loaded

PADDED = 2 * GROUP  # an int4 weight has two groups side by side


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for a linear layer. A group's number is its integer times its scale; `scales` also have, after the scales,
    these times the sums of the groups' integers."""

    ints: Tensor  # int8 [rows, width, padded]
    scales: Tensor  # float32 [2, groups, rows]
    width: int  # not padded

    def __len__(self) -> int:
        return len(self.ints)


class Integers(NamedTuple):
    """A weight [out, in]. Number i of output o is its integer times steps[g // times, o], g = i // GROUP, plus
    minima[g // times, o] where there are any, of int4."""

    numbers: Tensor  # int8 [groups, out, GROUP]; int4: uint8 [groups / 2, out, GROUP], of two groups, the first one low
    steps: Tensor  # float16 [groups / times, out]
    minima: Tensor | None  # like steps
    bias: Tensor | None  # float32 [out]
    times: int  # groups that share a step
    inputs: int  # not padded

    @property
    def num_groups(self) -> int:
        return len(self.numbers) * (1 if self.minima is None else 2)

    @property
    def outputs(self) -> int:
        return self.numbers.shape[1]


class Experts(NamedTuple):
    """Weights of gated MLPs of one size."""

    gate_up: Tensor  # [experts, 2 n, in], gate's rows and then up's
    down: Tensor  # [experts, out, n]


class IntegerExperts(NamedTuple):
    """Weights of gated MLPs of one size; their tensors have another dimension, of experts, before the others."""

    gate_up: Integers
    down: Integers


def padded(n: int) -> int:
    return n + -n % int(PADDED)


def empty_rows(rows: int, n: int, device: torch.device) -> Rows:
    """For a kernel to fill."""
    ints = torch.empty((rows, padded(n)), dtype=torch.int8, device=device)
    scales = torch.empty((2, padded(n) // GROUP, rows), dtype=torch.float32, device=device)
    return Rows(ints, scales, n)


def pack(form: str, weight: Source, bias: Source | None, device: torch.device) -> Integers:
    """A weight as "int8" or "int4"."""
    groups = groups_of(form, loaded(weight), device)
    (outputs, inputs), width = groups.numbers.shape, padded(weight.shape[1])
    numbers = F.pad(groups.numbers, (0, width - inputs)).view(outputs, -1, GROUP).transpose(0, 1)
    if groups.minima is not None:
        numbers = numbers.to(torch.uint8)
        numbers = numbers[::2] | numbers[1::2] << 4
    missing = -(-width // GROUP // groups.times) - groups.steps.shape[1]
    steps, minima = (
        None if each is None else F.pad(each, (0, missing)).T.contiguous() for each in (groups.steps, groups.minima)
    )
    assert steps is not None
    packed_bias = None if bias is None else bias[:].to(device, torch.float32)
    return Integers(numbers.contiguous(), steps, minima, packed_bias, groups.times, weight.shape[1])


def rows_in_torch(x: Tensor) -> Rows:
    """What the kernels make of rows [rows, any], in torch."""
    numbers, scales = quantize_rows(F.pad(x, (0, -x.shape[1] % PADDED)))
    sums = numbers.view(*scales.shape, GROUP).sum(-1)
    return Rows(numbers, torch.stack((scales, scales * sums)).transpose(1, 2).contiguous(), x.shape[1])


def stacked(weights: Sequence[Integers]) -> Integers:
    """Of weights of one shape, one for each expert."""
    alike = weights if len({each.times for each in weights}) == 1 else [_spread(each) for each in weights]
    numbers, steps = (torch.stack(each) for each in ([one.numbers for one in alike], [one.steps for one in alike]))
    minima = [one.minima for one in alike if one.minima is not None]
    return Integers(numbers, steps, torch.stack(minima) if minima else None, None, alike[0].times, alike[0].inputs)


def _spread(weight: Integers) -> Integers:
    """With a step for each group."""
    steps, minima = (
        None if each is None else each.repeat_interleave(weight.times, 0)[: weight.num_groups].contiguous()
        for each in (weight.steps, weight.minima)
    )
    assert steps is not None
    return weight._replace(steps=steps, minima=minima, times=1)
