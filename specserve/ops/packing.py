"""What a backend packs weights from, and the cache that it takes packed weights from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [out, in] of integers, as GPTQ, AWQ, compressed-tensors and GGUF have them. Number i of row o is
    (ints[o, i] - zeros[o, g]) * scales[o, g], where g, the group of input i, is order[i], or i // group where all
    inputs of a group lie together. Indexed by rows it is these numbers, float32."""

    ints: Tensor  # [out, in] of any integer dtype, one number each
    scales: Tensor  # float [out, groups]
    zeros: Tensor | None  # [out, groups], integers or floats; None: 0
    group: int  # inputs that share a scale
    order: Tensor | None = None  # integer [in]: GPTQ's g_idx (act-order)

    def __post_init__(self) -> None:
        (rows, columns), num_groups = self.ints.shape, self.scales.shape[1]
        assert self.scales.shape == (rows, num_groups), "a scale for each group of each row"
        assert self.zeros is None or self.zeros.shape == self.scales.shape, "a zero for each scale"
        assert self.order is None or self.order.shape == (columns,), "a group for each input"
        assert self.order is not None or num_groups == -(-columns // self.group), "groups of inputs that lie together"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ints.shape)

    @property
    def groups(self) -> Tensor:
        """The group of each input, int64 [in]."""
        if self.order is not None:
            return self.order.long()
        return torch.arange(self.shape[1], device=self.ints.device) // self.group

    def __getitem__(self, rows: slice) -> Tensor:
        numbers = self.ints[rows].float()
        if self.zeros is not None:
            numbers -= self.of_inputs(self.zeros[rows])
        return numbers.mul_(self.of_inputs(self.scales[rows]))

    def of_inputs(self, values: Tensor) -> Tensor:
        """Of each group -> of each of its inputs, float32 [out, in], or [out, 1] where there is one group."""
        return values.float() if values.shape[1] == 1 else values.float().index_select(1, self.groups)


Weight = Tensor | Quantized  # of a checkpoint


@dataclass(frozen=True, slots=True)
class Lazy:
    """A weight that is read when it is indexed, and then by rows its numbers."""

    shape: tuple[int, ...]
    read: Callable[[], Weight]

    def __getitem__(self, rows: slice) -> Tensor:
        return self.read()[rows]


Source = Weight | Lazy  # of what is packed


def loaded(source: Source) -> Weight:
    return source.read() if isinstance(source, Lazy) else source


def by_rows(weights: Sequence[Weight], arrange: Callable[[list[Tensor]], Tensor]) -> Weight:
    """What `arrange` makes of the rows of several weights, [rows, any] each: of their integers and of what belongs to
    these where all have the same groups of inputs, else of their numbers."""
    first = weights[0]
    parts = [weight for weight in weights if isinstance(weight, Quantized)]
    if not isinstance(first, Quantized) or len(parts) < len(weights) or not all(_alike(first, each) for each in parts):
        return arrange([weight[:] for weight in weights])
    zeros = [torch.zeros_like(each.scales) if each.zeros is None else each.zeros for each in parts]
    return replace(
        first,
        ints=arrange([each.ints for each in parts]),
        scales=arrange([each.scales for each in parts]),
        zeros=None if all(each.zeros is None for each in parts) else arrange(zeros),
    )


def stacked(weights: Sequence[Weight]) -> Weight:
    """The rows of one after those of the other, a copy."""
    return by_rows(weights, torch.cat)


def reordered(weight: Weight, rows: Tensor | None) -> Weight:
    """Its rows as int64 `rows` lists them; itself where that is None."""
    return weight if rows is None else by_rows([weight], lambda parts: parts[0][rows])


def rows_of(weight: Weight, rows: slice | Tensor) -> Weight:
    """Some of its rows, a view where they are a slice."""
    if isinstance(weight, Tensor):
        return weight[rows]
    zeros = None if weight.zeros is None else weight.zeros[rows]
    return replace(weight, ints=weight.ints[rows], scales=weight.scales[rows], zeros=zeros)


def scaled(weight: Weight, times: float) -> Weight:
    """Its numbers, multiplied; itself where that changes none."""
    if times == 1.0:
        return weight
    if isinstance(weight, Tensor):
        return weight.float() * times
    return replace(weight, scales=weight.scales.float() * times)


def _alike(one: Quantized, other: Quantized) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order and one.group == other.group
    return torch.equal(one.order, other.order)


def cut(weight: Weight, axis: int, part: range) -> Weight:
    """Some consecutive rows of it (axis 0), which are outputs, or columns (axis 1), which are inputs; a bias has rows
    alone. A view, but for a cut through groups of inputs."""
    start, size = part.start, len(part)
    if isinstance(weight, Tensor):
        return weight.narrow(axis, start, size)
    own = slice(start, start + size)
    if axis == 0:
        return rows_of(weight, own)
    ints = weight.ints[:, own]
    if weight.order is not None or start % weight.group or size % weight.group:
        return replace(weight, ints=ints, order=weight.groups[own])
    groups = slice(start // weight.group, (start + size) // weight.group)
    zeros = None if weight.zeros is None else weight.zeros[:, groups]
    return replace(weight, ints=ints, scales=weight.scales[:, groups], zeros=zeros)


class PackedCache(Protocol):
    """Keeps packed weights from one process to the next, by name."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
        """What `pack` returns, of this shape and dtype, or what it returned earlier under this name."""


def uncached(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
    """A cache that keeps nothing."""
    return pack()


def below(cached: PackedCache, prefix: str) -> PackedCache:
    """The part of a cache whose names begin with `prefix` and a dot."""
    return lambda name, shape, dtype, pack: cached(f"{prefix}.{name}", shape, dtype, pack)
