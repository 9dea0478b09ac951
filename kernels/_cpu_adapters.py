"""Adapters of the native kernels: the tables that recordings read, and the bytes that these point to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import specserve.kernels._native as _native
from specserve.kernels._cpu_base import Activation, Base
from specserve.kernels._cpu_cache import zeros
from specserve.kernels._cpu_recording import Recording
from specserve.kernels._cpu_rows import TILE, alternating, at, pad
from specserve.kernels._cpu_weights import FLOAT32, INT8, PackedWeight
from specserve.ops import RowAdapters

_POINTERS = 4  # numbers of a slot: its padded rank, addresses of a, of the tiles of b, and of b


class Bound(NamedTuple):
    """What an op is told of its rows' adapters, with the memory that it points to."""

    native: _native.Adapters = _native.Adapters()
    found: Tensor | None = None  # int64 [1], whether any row has one
    shrunk: Tensor | None = None  # float32 [rows, stride], a x


NO_ADAPTERS = Bound()


class PackedAdapter(NamedTuple):
    """As struct Adapter in kernels/cpu/args.h."""

    rank: int
    a: Tensor  # uint8, as a weight is packed; of a table numbers [vocab, rank]
    tiles: Tensor  # int64 [tiles of outputs, 3]
    b: Tensor


@dataclass(slots=True)
class Bank:
    """The adapters of one weight, and the table of them that recordings point to."""

    table: Tensor  # int64 [slots, _POINTERS]
    stride: int  # of a x
    placed: dict[int, PackedAdapter] = field(default_factory=dict)


class Adapters(Base):  # type: ignore[misc]  # the kernels' package is found at run time
    """The ops of adapters. `a` is packed as weights are that read the same inputs, int8 where these are quantised."""

    def adapter_bank(self, num_slots: int, inputs: int, outputs: int, max_rank: int) -> Bank:
        return Bank(torch.zeros((num_slots, _POINTERS), dtype=torch.int64), pad(max_rank))

    def pack_adapter(self, weight: PackedWeight, a: Tensor, b: Tensor) -> PackedAdapter:
        return PackedAdapter(pad(len(a)), self._pack_a(a), *self._pack_b(F.pad(b, (0, 0, 0, -len(b) % TILE))))

    def pack_gated_adapter(self, weight: PackedWeight, a: Tensor, gate_b: Tensor, up_b: Tensor) -> PackedAdapter:
        return PackedAdapter(pad(len(a)), self._pack_a(a), *self._pack_b(alternating((gate_b, up_b))))

    def pack_table_adapter(self, table: Tensor, a: Tensor, b: Tensor) -> PackedAdapter:
        numbers = F.pad(a, (0, 0, 0, -len(a) % TILE)).T.to(self._number).contiguous()
        return PackedAdapter(pad(len(a)), numbers, *self._pack_b(F.pad(b, (0, 0, 0, -len(b) % TILE))))

    def place_adapter(self, bank: Bank, slot: int, packed: PackedAdapter | None) -> None:
        if packed is None:
            bank.table.numpy()[slot] = 0  # a step waits for this, of each product: torch would take ten times as long
            bank.placed.pop(slot, None)
            return
        assert packed.rank <= bank.stride, "the bank was made for lower ranks"
        bank.table.numpy()[slot] = packed.rank, packed.a.data_ptr(), packed.tiles.data_ptr(), packed.b.data_ptr()
        bank.placed[slot] = packed

    def embed_adapters(self, residual: Tensor, token_ids: Tensor, adapters: RowAdapters, scale: float) -> None:
        rows, hidden = residual.shape
        with self._program(rows, residual, token_ids, adapters) as program:
            own = self._bound(program, rows, adapters)
            program.embed_adapters(at(token_ids), at(residual), hidden, scale, own.native, at(own.found))

    def _shrunk(self, program: _native.Program, x: Activation, adapters: RowAdapters | None) -> Bound:
        """What the op that follows in the program adds to its product of x."""
        if adapters is None:
            return NO_ADAPTERS
        own = self._bound(program, x.rows, adapters)
        program.shrink(min(self._format, INT8), x.native, own.native, at(own.found))
        return own

    def _bound(self, program: _native.Program, rows: int, adapters: RowAdapters) -> Bound:
        """Whether rows have any is found once for all ops of a recording with the same slots."""
        bank, slots = adapters
        recording = self._recording
        known = recording.has_adapters if isinstance(recording, Recording) else {}
        found = known.get(slots.data_ptr())
        if found is None:
            found = known[slots.data_ptr()] = torch.zeros(1, dtype=torch.int64)
            program.find_adapters(at(slots), at(found))
        shrunk = self._buffer("shrink", rows, bank.stride, torch.float32)
        is_bfloat16 = self._number == torch.bfloat16
        native = _native.adapters(bank.table.data_ptr(), at(slots), shrunk.data_ptr(), bank.stride, is_bfloat16)
        return Bound(native, found, shrunk)

    @property
    def _number(self) -> torch.dtype:
        return torch.float32 if self._format == FLOAT32 else torch.bfloat16

    def _pack_a(self, a: Tensor) -> Tensor:
        form, inputs = min(self._format, INT8), a.shape[1]
        tiles: Tensor = zeros((pad(len(a)) // TILE * _native.tile_bytes(form, inputs),), torch.uint8)
        rows = a.contiguous()
        _native.pack(form, rows.data_ptr(), len(rows), inputs, tiles.data_ptr())
        return tiles

    def _pack_b(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """b float32 [tiles of outputs, rank] -> each tile's first rank, how many, and where their numbers begin; these,
        [ranks, TILE] a tile."""
        tiles = b.numpy().reshape(-1, TILE, b.shape[1])
        is_read = (tiles != 0).any(1)
        first = is_read.argmax(1)
        count = np.where(is_read.any(1), b.shape[1] - is_read[:, ::-1].argmax(1) - first, 0)
        starts = (count.cumsum() - count) * TILE
        parts = [tile[:, f : f + n].T.ravel() for tile, f, n in zip(tiles, first, count, strict=True)]
        parts.append(np.zeros(TILE, np.float32))  # never empty
        numbers = zeros((sum(map(len, parts)),), self._number)
        numbers.copy_(torch.from_numpy(np.concatenate(parts)))
        return torch.from_numpy(np.stack((first, count, starts), 1).astype(np.int64)), numbers
