"""Rows of numbers as the native kernels want them: padded with zeros to whole tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.kernels._cpu_cache import zeros

TILE = 32  # outputs computed together; rows are padded to a multiple, weights too


def pad(n: int) -> int:
    return -(-n // TILE) * TILE


def at(x: Tensor | None) -> int:
    assert x is None or x.dim() == 1 or is_padded(x), "rows come from an op"
    return 0 if x is None else x.data_ptr()


def is_padded(x: Tensor) -> bool:
    """Whether the rows of x are a view of padded ones."""
    return x.dtype == torch.float32 and x.stride() == (pad(x.shape[1]), 1)


def padded(x: Tensor) -> Tensor:
    """Rows float32 [rows, n] as ops want them; those that an op returned are passed on."""
    if is_padded(x):
        return x
    out: Tensor = zeros((len(x), pad(x.shape[1])), torch.float32)
    out[:, : x.shape[1]] = x
    return out


def alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Tiles of gate and up in turn, each filled up with zeros: [2 * padded n, columns]."""
    n, columns = gate.shape
    out = torch.zeros((pad(n) // TILE, 2, TILE, columns), device=gate.device)
    for i, part in enumerate((gate, up)):
        out[:, i] = torch.nn.functional.pad(part.float(), (0, 0, 0, pad(n) - n)).view(-1, TILE, columns)
    return out.view(-1, columns)
