"""Adapters in torch: each adapter that rows have is computed for all rows, and added to its own.

Ranks are padded to a multiple of 32 with zeros, as products of narrower matrices do not give every row the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.ops.adapters import RowAdapters
from specserve.ops.packing import Source

_RANKS = 32


@dataclass(frozen=True, slots=True)
class _Adapter:
    """As `product` wants them, float32; a table's a is [vocab, rank]."""

    a: Any
    b: Any


class Adapters(ABC):
    """The ops of adapters, made of others."""

    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def packed_as(self, weight: Source, bias: Source | None, dtype: torch.dtype) -> Any: ...
    @abstractmethod
    def product(self, x: Tensor, weight: Any) -> Tensor: ...

    def adapter_bank(self, num_slots: int, inputs: int, outputs: int, max_rank: int) -> list[_Adapter | None]:
        return [None] * num_slots

    def pack_adapter(self, weight: Any, a: Tensor, b: Tensor) -> _Adapter:
        missing = -len(a) % _RANKS
        a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        return _Adapter(*(self.packed_as(self._rounded(part), None, torch.float32) for part in (a, b)))

    def pack_gated_adapter(self, weight: Any, a: Tensor, gate_b: Tensor, up_b: Tensor) -> _Adapter:
        return self.pack_adapter(weight, a, torch.cat((gate_b, up_b)))

    def pack_table_adapter(self, table: Tensor, a: Tensor, b: Tensor) -> _Adapter:
        missing = -len(a) % _RANKS
        rows = self._rounded(F.pad(a, (0, 0, 0, missing))).T.contiguous().to(self.device)
        return _Adapter(rows, self.packed_as(self._rounded(F.pad(b, (0, missing))), None, torch.float32))

    def place_adapter(self, bank: list[_Adapter | None], slot: int, packed: _Adapter | None) -> None:
        bank[slot] = packed

    def embed_adapters(self, residual: Tensor, token_ids: Tensor, adapters: RowAdapters, scale: float) -> None:
        for adapter, rows in _in_use(adapters):
            residual[rows] += scale * self.product(adapter.a[token_ids], adapter.b)[rows]

    def adapted(self, out: Tensor, x: Tensor, adapters: RowAdapters | None) -> Tensor:
        """A product of x [rows, in], with what the rows' adapters add to it."""
        if adapters is None:
            return out
        for adapter, rows in _in_use(adapters):
            added = self.product(self.product(x.float(), adapter.a), adapter.b)
            out[rows] = (out[rows].float() + added[rows]).to(out.dtype)
        return out

    def _rounded(self, part: Tensor) -> Tensor:
        return part.to(self.dtype).float()


def _in_use(adapters: RowAdapters) -> list[tuple[_Adapter, Tensor]]:
    """The adapters that rows have, and int64 [n] which rows each."""
    slots = sorted({*adapters.slots.tolist()})
    found = [(adapters.bank[slot], (adapters.slots == slot).nonzero()[:, 0]) for slot in slots if slot >= 0]
    return [(adapter, rows) for adapter, rows in found if adapter is not None]
