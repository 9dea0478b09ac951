"""Adapters for the Triton kernels: memory on the device that lives as long as the engine, so that a graph that was
captured before an adapter was placed reads it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.errors import CapacityError

RANKS = 16  # ranks are padded with zeros to a multiple: so many the tensor cores add up at once


class PackedAdapter(NamedTuple):
    """On the host: only those with a slot take memory of the device."""

    a: Tensor  # [rank, in], or of a table [vocab, rank]
    b: Tensor  # [out, rank]


class Bank(NamedTuple):
    """The adapters of one weight. Each lies at the beginning of its slot's memory, as long as its rank asks for."""

    ranks: Tensor  # int32 [slots], multiples of RANKS; 0: empty
    a: Tensor  # [slots, max_rank * in], of each the numbers of [rank, in], or of [vocab, rank]
    b: Tensor  # [slots, out * max_rank], of each the numbers of [out, rank]
    max_rank: int  # a multiple of RANKS


class Shrunk(NamedTuple):
    """a x of rows, to which the product that follows applies b."""

    bank: Bank
    slots: Tensor  # int64 [rows]; negative: no adapter
    sums: Tensor  # float32 [parts of x, rows, max_rank]: to be added up; of rows with an adapter, up to its rank


class Adapters:
    """The ops that keep adapters."""

    device: torch.device
    dtype: torch.dtype

    def adapter_bank(self, num_slots: int, inputs: int, outputs: int, max_rank: int) -> Bank:
        padded, device = max_rank + -max_rank % RANKS, self.device
        try:
            ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
            sizes = padded * inputs, padded * outputs
            a, b = (torch.zeros((num_slots, size), dtype=self.dtype, device=device) for size in sizes)
        except torch.OutOfMemoryError:
            raise CapacityError(
                f"{num_slots} LoRA adapters of this rank in each layer do not fit into the memory of {device}: lower "
                "--max-lora-rank or --max-loras."
            ) from None
        return Bank(ranks, a, b, padded)

    def pack_adapter(self, weight: object, a: Tensor, b: Tensor) -> PackedAdapter:
        missing = -len(a) % RANKS
        return PackedAdapter(F.pad(a, (0, 0, 0, missing)).to(self.dtype), F.pad(b, (0, missing)).to(self.dtype))

    def pack_gated_adapter(self, weight: object, a: Tensor, gate_b: Tensor, up_b: Tensor) -> PackedAdapter:
        return self.pack_adapter(weight, a, torch.cat((gate_b, up_b)))

    def pack_table_adapter(self, table: object, a: Tensor, b: Tensor) -> PackedAdapter:
        packed = self.pack_adapter(table, a, b)
        return packed._replace(a=packed.a.T.contiguous())

    def place_adapter(self, bank: Bank, slot: int, packed: PackedAdapter | None) -> None:
        if packed is None:
            bank.ranks[slot] = 0
            return
        rank = packed.b.shape[1]
        assert rank <= bank.max_rank, "the bank was made for lower ranks"
        for memory, numbers in ((bank.a, packed.a), (bank.b, packed.b)):
            memory[slot, : numbers.numel()].copy_(numbers.flatten())
        bank.ranks[slot] = rank
