"""Caches in torch: each slot's numbers lie where they are written."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Cache:
    """The ops that move what a cache holds."""

    def copy_kv(self, kvs: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
        for kv in kvs:
            kv.index_copy_(1, targets, kv.index_select(1, sources))

    def read_kv(self, kv: Tensor, slots: Tensor) -> Tensor:
        return kv.index_select(1, slots)

    def write_kv(self, kv: Tensor, slots: Tensor, values: Tensor) -> None:
        kv.index_copy_(1, slots, values)
