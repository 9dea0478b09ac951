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


def read_slots(kv: Tensor, slots: Tensor) -> Tensor:
    """What slots [n] hold, [2, n, kv_heads, d] in this order."""
    groups = _groups_of(kv, slots)
    if groups is None:
        sides = zip(kv.view(2, -1), numbers_of(kv, slots), strict=True)
        return torch.stack([side[torch.from_numpy(own)] for side, own in sides]).view(2, len(slots), *kv.shape[2:])
    found = torch.empty((2, len(slots), *kv.shape[2:]), dtype=kv.dtype)
    for side in range(2):
        view = _in_order(_by_group(kv)[side].index_select(0, groups), side, *kv.shape[2:])
        found[side].view(view.shape).copy_(view)
    return found


def write_slots(kv: Tensor, slots: Tensor, values: Tensor) -> None:
    """Let them hold these values."""
    groups = _groups_of(kv, slots)
    if groups is None:
        for flat, own, new in zip(kv.view(2, -1), numbers_of(kv, slots), values.flatten(1), strict=True):
            flat[torch.from_numpy(own)] = new
        return
    for side in range(2):
        memory = torch.empty(len(groups), kv[0].numel() // (kv.shape[1] // _SLOT_GROUP), dtype=kv.dtype)
        view = _in_order(memory, side, *kv.shape[2:])
        view.copy_(values[side].reshape(view.shape))
        _by_group(kv)[side].index_copy_(0, groups, memory)


def _groups_of(kv: Tensor, slots: Tensor) -> Tensor | None:
    """The groups that these slots are, one after the other, whose numbers are moved faster than one by one; None where
    they are no whole groups."""
    if not layout_of(kv)[1] or len(slots) % _SLOT_GROUP:
        return None
    groups = slots[::_SLOT_GROUP] // _SLOT_GROUP
    whole = groups[:, None] * _SLOT_GROUP + torch.arange(_SLOT_GROUP)
    return groups if torch.equal(whole.flatten(), slots) else None


def _by_group(kv: Tensor) -> Tensor:
    return kv.view(2, kv.shape[1] // _SLOT_GROUP, -1)


def _in_order(memory: Tensor, side: int, kv_heads: int, d: int) -> Tensor:
    """Groups [n, numbers] of keys (side 0) or values as a view in which numbers lie by slot, head and place, whatever
    its shape; `places` says where they are in memory."""
    n, is_paired = len(memory), memory.dtype == torch.bfloat16
    if not is_paired:
        keys, values = (n, kv_heads, d, _SLOT_GROUP), (n, kv_heads, _SLOT_GROUP, d)
        return memory.view(values).transpose(1, 2) if side else memory.view(keys).permute(0, 3, 1, 2)
    if side:
        return memory.view(n, kv_heads, _SLOT_GROUP // 2, d, 2).permute(0, 2, 4, 1, 3)
    return memory.view(n, kv_heads, d // 2, _SLOT_GROUP, 2).permute(0, 3, 1, 2, 4)


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
