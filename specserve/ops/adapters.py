"""The part of the op contract that is about adapters: low-rank changes of weights, of each row its own (LoRA, arXiv
2106.09685)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class RowAdapters(NamedTuple):
    """Which adapter each row of an op has."""

    bank: Any  # of the op's weight, as adapter_bank returned it
    slots: Tensor  # int64 [rows], of the bank; negative: none


class AdapterOps(Protocol):
    """Ops that keep adapters. Sums are float32; a and b are kept in float32 where that is `dtype`, else in bfloat16,
    and on a CPU a in int8 where what it reads is quantised. A row with an adapter has the same bits whatever the others
    have, and one without has those it has without a bank."""

    def adapter_bank(self, num_slots: int, inputs: int, outputs: int, max_rank: int) -> Any:
        """Room for so many adapters of one weight with so many inputs and outputs, all empty: of a table these are
        vocab and hidden, of a gated one those of gate and up together. `max_rank` is that of the a of its layers
        together."""

    def pack_adapter(self, weight: Any, a: Tensor, b: Tensor) -> Any:
        """a float32 [rank, in] and b float32 [out, rank] of what `pack` or `pack_head` returned, for `place_adapter`.
        Where layers are packed as one, each has columns of its own in b and zeros in those of the others."""

    def pack_gated_adapter(self, weight: Any, a: Tensor, gate_b: Tensor, up_b: Tensor) -> Any:
        """The same of what `pack_gated` returned, gate_b and up_b float32 [n, rank]."""

    def pack_table_adapter(self, table: Tensor, a: Tensor, b: Tensor) -> Any:
        """The same of what `pack_table` returned, a float32 [rank, vocab], b float32 [hidden, rank]."""

    def place_adapter(self, bank: Any, slot: int, packed: Any) -> None:
        """Let rows with that slot have this adapter from the next run on; None empties the slot. No run may be under
        way."""

    def embed_adapters(self, residual: Tensor, token_ids: Tensor, adapters: RowAdapters, scale: float) -> None:
        """residual += scale * b a[:, id], in place, float32 [rows, hidden], token_ids int64 [rows]."""
