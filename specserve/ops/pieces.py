"""Ops of a model that other code runs between, noted piece by piece, so that they run again without Python's calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Piece(Protocol):
    """Ops one after the other, all of as many rows."""

    def run(self, plan: Any) -> None:
        """Run them on what their tensors hold; `plan` is one of ops.plan with as many rows as they were noted with."""


class Pieces(Protocol):
    """Ops of this thread are noted, and not run, while this is open."""

    def take(self) -> Sequence[Piece]:
        """Those that were noted since this was last called, in order."""


class Memory:
    """Tensors that live as long as this. What nobody refers to any more, but by its place, is handed out again for work
    that comes later."""

    def __init__(self) -> None:
        self._bases: dict[Hashable, list[tuple[Tensor, int]]] = {}  # with the references that are its own
        self._places: dict[int, Tensor] = {}  # by address
        self.num_bytes = 0

    def take(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that `make` returned for that key, now or before."""
        bases = self._bases.setdefault(key, [])
        for base, own in bases:
            if _references(base) == own:
                return base.detach()
        base = make()
        bases.append((base, _references(base)))
        self._places[base.untyped_storage().data_ptr()] = base
        self.num_bytes += base.untyped_storage().nbytes()
        return base.detach()

    def base(self, tensor: Tensor) -> Tensor | None:
        """The tensor of this memory that one is a part of, if any."""
        return self._places.get(tensor.untyped_storage().data_ptr())


def _references(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
