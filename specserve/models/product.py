"""Linear layers of a model that are multiplied as one, with the adapters that rows have of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.ops import Ops, RowAdapters
from specserve.ops.packing import reordered


class LowRank(NamedTuple):
    """What an adapter adds to a layer: b a x of its input x."""

    a: Tensor  # float32 [rank, in]
    b: Tensor  # float32 [out, rank], times the adapter's scaling


class RowSlots(NamedTuple):
    """The slots of rows' adapters, negative where they have none."""

    rows: Tensor  # int64 [rows of the step]
    gathered: Tensor  # int64 [rows that are asked for]


class Product:
    """What was packed of the layers `names`, of so many outputs each and `inputs` inputs, whose outputs are multiplied
    by `times` and then as `order` lists them. A gated product has two layers, whose adapters enter before the
    activation."""

    def __init__(
        self,
        packed: Any,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        inputs: int,
        times: float = 1.0,
        order: Tensor | None = None,
        is_gated: bool = False,
    ) -> None:
        self.packed, self.names, self.inputs = packed, names, inputs
        self._sizes, self._times, self._order, self._is_gated = sizes, times, order, is_gated
        self._bank: Any = None

    def hold_adapters(self, ops: Ops, num_slots: int, max_rank: int) -> None:
        """Room for so many, of at most that rank in each layer."""
        self._bank = ops.adapter_bank(num_slots, self.inputs, sum(self._sizes), max_rank * len(self.names))

    def linear(self, ops: Ops, x: Any, slots: Tensor | None = None) -> Tensor:
        """As ops.linear. `slots` int64 [rows] are those of the rows' adapters, negative where they have none."""
        return ops.linear(x, self.packed, self.adapters(slots))

    def activated(self, ops: Ops, x: Any, activation: str, slots: Tensor | None = None) -> Any:
        """As ops.gated of a gated product, as ops.activated of another."""
        activate = ops.gated if self._is_gated else ops.activated
        return activate(x, self.packed, activation, self.adapters(slots))

    def adapters(self, slots: Tensor | None) -> RowAdapters | None:
        return None if slots is None or self._bank is None else RowAdapters(self._bank, slots)

    def pack_adapter(self, ops: Ops, weights: Mapping[str, LowRank]) -> Any:
        """An adapter's part in these layers, for `place_adapter`; None where it has none."""
        own = [weights.get(name) for name in self.names]
        found = [each for each in own if each is not None]
        if not found:
            return None
        a = torch.cat([each.a for each in found])
        blocks, first = [], 0
        for each, size in zip(own, self._sizes, strict=True):
            block = torch.zeros(size, len(a))
            if each is not None:
                block[:, first : first + len(each.a)] = each.b * self._times
                first += len(each.a)
            blocks.append(block)
        if self._is_gated:
            return ops.pack_gated_adapter(self.packed, a, *blocks)
        b = reordered(torch.cat(blocks), self._order)
        assert isinstance(b, Tensor), "an adapter is not quantised"
        return ops.pack_adapter(self.packed, a, b)

    def place_adapter(self, ops: Ops, slot: int, packed: Any) -> None:
        ops.place_adapter(self._bank, slot, packed)
