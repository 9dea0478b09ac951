"""Blocks of a KV cache as bytes, in a layout that is no backend's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specserve.ops import Ops


def read_blocks(ops: Ops, layers: Sequence[Tensor], block_size: int, ids: Sequence[int]) -> list[bytes]:
    """What each block holds: for each layer [2, slots, kv_heads, d] the numbers [2, block_size, kv_heads, d]."""
    if not ids:
        return []
    slots = _slots(layers[0], block_size, ids)
    by_layer = []
    for kv in layers:
        numbers = ops.read_kv(kv, slots).view(2, len(ids), block_size, *kv.shape[2:]).transpose(0, 1)
        by_layer.append(numbers.contiguous().cpu().view(torch.uint8).flatten(1))
    return [row.tobytes() for row in torch.cat(by_layer, 1).numpy()]


def write_blocks(
    ops: Ops, layers: Sequence[Tensor], block_size: int, ids: Sequence[int], data: Sequence[bytes]
) -> None:
    """Let each block hold what `read_blocks` read, or the first layers of that, as many for all; others are left as
    they are."""
    if not ids:
        return
    slots, start = _slots(layers[0], block_size, ids), 0
    rows = np.frombuffer(b"".join(data), np.uint8).reshape(len(ids), -1)
    for kv in layers:
        if start == rows.shape[1]:
            break
        size = 2, block_size, *kv.shape[2:]
        stop = start + math.prod(size) * kv.itemsize
        numbers = torch.from_numpy(rows[:, start:stop].copy()).view(kv.dtype).view(len(ids), *size)
        ops.write_kv(kv, slots, numbers.transpose(0, 1).flatten(1, 2).to(kv.device))
        start = stop
    assert start == rows.shape[1], "a block's bytes are those of whole layers"


def _slots(kv: Tensor, block_size: int, ids: Sequence[int]) -> Tensor:
    """Of these blocks, int64."""
    first = torch.tensor(ids, dtype=torch.int64, device=kv.device)[:, None] * block_size
    return (first + torch.arange(block_size, device=kv.device)).flatten()
