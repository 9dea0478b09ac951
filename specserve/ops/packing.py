"""What a backend packs weights from, and the cache that it takes packed weights from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is read when it is indexed."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def __getitem__(self, index: slice) -> Tensor:
        return self.read()[index]


Source = Tensor | Lazy  # of what is packed


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
