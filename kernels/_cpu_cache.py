"""Memory of the native kernels: aligned, and how a cache holds keys and values in it, as kernels/cpu/context.h does."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NUMBERS = torch.float32, torch.bfloat16, torch.float16  # as Number in kernels/cpu/args.h
_SLOT_GROUP = 16  # slots interleaved in memory
_TILE = 32
_ALIGNMENT = 64


def layout_of(kv: Tensor) -> tuple[int, bool]:
    """Which numbers a cache [2, slots, kv_heads, d] holds, and whether in groups."""
    return _NUMBERS.index(kv.dtype), not (kv.shape[1] % _SLOT_GROUP or kv.shape[3] % _TILE)


def places(kv: Tensor, slots: Tensor) -> Tensor:
    """Where the keys and the values of slots [n] lie in kv[0] and kv[1], int64 [2, n, kv_heads, d]."""
    kv_heads, d = kv.shape[2:]
    slot, head, i = slots[:, None, None], torch.arange(kv_heads)[:, None], torch.arange(d)
    if not layout_of(kv)[1]:
        return ((slot * kv_heads + head) * d + i).expand(2, -1, -1, -1)
    start, place = (slot // _SLOT_GROUP * kv_heads + head) * d * _SLOT_GROUP, slot % _SLOT_GROUP
    if kv.dtype != torch.bfloat16:
        return start + torch.stack((i * _SLOT_GROUP + place, place * d + i))
    return start + torch.stack((i // 2 * 2 * _SLOT_GROUP + 2 * place + i % 2, place // 2 * 2 * d + 2 * i + place % 2))


def numbers_of(kv: Tensor, slots: Tensor) -> NDArray[np.int64]:
    """The same, int64 [2, n * kv_heads * d]: groups of slots look alike, and one is known."""
    first = _first_group(kv.dtype, kv.shape[1] % _SLOT_GROUP, *kv.shape[2:])
    group, place = np.divmod(slots.numpy(), _SLOT_GROUP)
    found: NDArray[np.int64] = first[:, place] + (group * first.shape[1] * first.shape[2])[:, None]
    return found.reshape(2, -1)


@lru_cache
def _first_group(dtype: torch.dtype, odd: int, kv_heads: int, d: int) -> NDArray[np.int64]:
    """Places of slots 0 to 15, int64 [2, 16, kv_heads * d], in a cache of that many slots beyond whole groups."""
    kv = torch.empty((2, _SLOT_GROUP + odd, kv_heads, d), dtype=dtype, device="meta")
    found: NDArray[np.int64] = places(kv, torch.arange(_SLOT_GROUP)).flatten(2).numpy()
    return found


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Aligned zeros, whose pages the system provides when they are first written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)


def filled(shape: tuple[int, ...], dtype: torch.dtype, values: Tensor) -> Tensor:
    """Aligned `values`, with zeros after the last of them."""
    whole = zeros(shape, dtype)
    whole[: len(values)].copy_(values)
    return whole
