"""What native models of all layers, or of some, have in common: products that take adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.product import LowRank, Product
from specserve.models.spec import DecoderSpec
from specserve.ops import Ops

TABLE = "model.embed_tokens"


class PackedAdapter(NamedTuple):
    """An adapter as a model keeps it."""

    products: list[Any]  # in their order; None: it leaves this one alone
    table: Any  # or None
    num_bytes: int


class AdaptedModel:
    """A model of `products`, and of a `table` of embeddings that takes adapters or None."""

    num_adapter_slots = max_adapter_rank = 0

    def __init__(self, spec: DecoderSpec, ops: Ops, products: list[Product], table: Tensor | None) -> None:
        self.spec, self.ops = spec, ops
        self.origin = ""  # how a checkpoint that is quantised has its weights, and what became of them, for people
        self.num_mapped_bytes = 0  # of the weights, where they are mapped from a file: the system counts them as free
        self._products, self._table = list(products), table
        self._table_bank: Any = None

    @property
    def adapted(self) -> frozenset[str]:
        """The layers that take adapters, by their names in spec.shapes() without ".weight", or "lm_head"."""
        names = {name for product in self._products for name in product.names}
        names -= {"lm_head"} if self.spec.normed_head else set()
        return frozenset(names if self._table is None else {*names, TABLE})

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        """Room for so many adapters of at most that rank; once, before the first step."""
        self.num_adapter_slots, self.max_adapter_rank = num_slots, max_rank
        for product in self._products:
            product.hold_adapters(self.ops, num_slots, max_rank)
        if self._table is not None:
            sizes = self.spec.vocab_size, self.spec.hidden_size
            self._table_bank = self.ops.adapter_bank(num_slots, *sizes, max_rank)

    @torch.inference_mode()
    def pack_adapter(self, weights: Mapping[str, LowRank]) -> PackedAdapter:
        """What an adapter adds to layers of `adapted`, for `place_adapter`. Beside steps, on whatever thread. Raises
        ModelError for a layer that takes no adapters."""
        check_adapted(weights, self.adapted)
        packed = None
        if self._table is not None and (table := weights.get(TABLE)) is not None:
            packed = self.ops.pack_table_adapter(self._table, *table)
        products = [product.pack_adapter(self.ops, weights) for product in self._products]
        return PackedAdapter(products, packed, adapter_bytes(weights, self.ops.dtype))

    def place_adapter(self, slot: int, packed: PackedAdapter | None) -> None:
        """Let rows of that slot have this adapter from the next step on, or none. Between steps."""
        if packed is None:
            packed = PackedAdapter([None] * len(self._products), None, 0)
        for product, own in zip(self._products, packed.products, strict=True):
            product.place_adapter(self.ops, slot, own)
        if self._table_bank is not None:
            self.ops.place_adapter(self._table_bank, slot, packed.table)


def check_adapted(weights: Mapping[str, LowRank], served: Collection[str]) -> None:
    """Raises ModelError for a layer of an adapter that is not among those `served`."""
    if refused := [name for name in weights if name not in served]:
        raise ModelError(
            f"The adapter changes {refused[0]}, which takes no adapters in this model: experts, their routers and "
            "gates, norms, embeddings that are normed or projected, and heads that are normed take none."
        )


def adapter_bytes(weights: Mapping[str, LowRank], dtype: torch.dtype) -> int:
    """Bytes that it takes packed, for a model of that compute dtype."""
    size = torch.float32.itemsize if dtype == torch.float32 else torch.bfloat16.itemsize
    return sum(each.a.numel() + each.b.numel() for each in weights.values()) * size
