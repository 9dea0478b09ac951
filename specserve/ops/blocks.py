"""Blocks of a KV cache as bytes, in a layout that is no backend's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specserve.ops import Ops

_WHOLE = "a block's bytes are those of whole layers"


def read_blocks(ops: Ops, layers: Sequence[Tensor], block_size: int, ids: Sequence[int]) -> list[bytes]:
    """What each block holds: for each layer [2, slots, kv_heads, d] the numbers [2, block_size, kv_heads, d]."""
    if not ids:
        return []
    slots, start = _slots(layers[0], block_size, ids), 0
    rows = torch.empty((len(ids), sum(_num_bytes(kv, block_size) for kv in layers)), dtype=torch.uint8)
    for kv in layers:
        numbers = ops.read_kv(kv, slots).view(2, len(ids), block_size, *kv.shape[2:])
        _layer_of(rows, start, kv, block_size).copy_(numbers.transpose(0, 1))
        start += _num_bytes(kv, block_size)
    return [row.tobytes() for row in rows.numpy()]


def write_blocks(
    ops: Ops, layers: Sequence[Tensor], block_size: int, ids: Sequence[int], data: Sequence[bytes]
) -> None:
    """Let each block hold what `read_blocks` read, or the first layers of that, as many for all; others are left as
    they are."""
    if not ids:
        return
    slots, start = _slots(layers[0], block_size, ids), 0
    rows = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8).view(len(ids), -1)
    for kv in layers:
        if start == rows.shape[1]:
            break
        numbers = _layer_of(rows, start, kv, block_size).transpose(0, 1).flatten(1, 2)
        ops.write_kv(kv, slots, numbers.to(kv.device))
        start += _num_bytes(kv, block_size)
    assert start == rows.shape[1], _WHOLE


def _num_bytes(kv: Tensor, block_size: int) -> int:
    """Of a block in one layer."""
    return 2 * block_size * math.prod(kv.shape[2:]) * kv.itemsize


def _layer_of(rows: Tensor, start: int, kv: Tensor, block_size: int) -> Tensor:
    """The numbers [blocks, 2, block_size, kv_heads, d] of a layer, a view of what begins there in each row of bytes."""
    stop = start + _num_bytes(kv, block_size)
    assert stop <= rows.shape[1], _WHOLE
    return rows[:, start:stop].view(kv.dtype).view(len(rows), 2, block_size, *kv.shape[2:])


def _slots(kv: Tensor, block_size: int, ids: Sequence[int]) -> Tensor:
    """Of these blocks, int64."""
    first = torch.tensor(ids, dtype=torch.int64, device=kv.device)[:, None] * block_size
    return (first + torch.arange(block_size, device=kv.device)).flatten()
