"""The device memory behind the KV cache: one tensor a layer, addressed by slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

MIN_BLOCKS = 2  # the null block, and one to hand out


class CopyKV(Protocol):
    """What ops.copy_kv does."""

    def __call__(self, kvs: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None: ...


def copy_kv(kvs: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    """As ops.copy_kv, for layers that hold at each slot what was written there."""
    for kv in kvs:
        kv.index_copy_(1, targets, kv.index_select(1, sources))


class KVShape(NamedTuple):
    """Of the keys, and of the values, that a layer keeps of a token."""

    num_kv_heads: int
    head_dim: int


class KVStorage:
    """Keys and values of every layer: `layers[l]` is [2, num_blocks * block_size, num_kv_heads, head_dim], zeroed. The
    target's layers come first, then those of a drafter's model, which lives in the same slots.

    Slot `block * block_size + offset` holds one token. Block 0 is the null block: padding rows write there and nobody
    reads it. `copy_kv` is the kernels' own way from slot to slot. On a CPU the pages are committed by
    the system when first written, so an idle cache costs no memory. A huge page takes the system up to milliseconds, so
    the slots at which layers begin one are spread evenly: a step waits for a few pages, not for those of all layers.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        copy_kv: CopyKV = copy_kv,
    ) -> None:
        assert num_blocks >= MIN_BLOCKS
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self._copy_kv = copy_kv
        size = 2, num_blocks * block_size
        self.layers = [_zeros((*size, *shape), dtype, self.device, i / len(shapes)) for i, shape in enumerate(shapes)]
        self._alike = [
            [layer for layer, shape in zip(self.layers, shapes, strict=True) if shape == each]
            for each in dict.fromkeys(shapes)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        """Copy the tokens at `sources` to `targets` in every layer; all are read before any is written."""
        assert len(sources) == len(targets) == len(set(targets)), "each target is written once"
        read = torch.tensor(sources, dtype=torch.int64, device=self.device)
        written = torch.tensor(targets, dtype=torch.int64, device=self.device)
        for layers in self._alike:
            self._copy_kv(layers, read, written)

    @staticmethod
    def bytes_per_block(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
        """What one block costs over all layers, keys and values."""
        return sum(2 * block_size * heads * width * dtype.itemsize for heads, width in shapes)


_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register of a CPU
_HUGE_PAGE = 2**21  # bytes, of x86 and of most ARM systems; numpy asks for them for whatever has 4 MiB or more


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, into_page: float) -> Tensor:
    """Zeros of `shape`, which begin so far into a huge page, from 0 to 1, where they are larger than one. torch.zeros
    writes every page on a CPU; numpy's are mapped and left to the system."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    page = _HUGE_PAGE if num_bytes > _HUGE_PAGE else _ALIGNMENT
    memory = np.zeros(num_bytes + page, np.uint8)
    start = (int(into_page * _HUGE_PAGE) // _ALIGNMENT * _ALIGNMENT - memory.ctypes.data) % page
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)
