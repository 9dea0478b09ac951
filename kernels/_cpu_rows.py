"""Rows of numbers as the native kernels want them: padded with zeros to whole tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.kernels._cpu_cache import zeros

TILE = 32  # outputs computed together; rows are padded to a multiple, weights too


class LayerNorm(NamedTuple):
    """Weights of a LayerNorm, padded float32 [n], in the place of the weight of an RMS norm."""

    weight: Tensor
    bias: Tensor | None


Norm = Tensor | LayerNorm


def norm_at(norm: Norm | None) -> tuple[int, int, bool]:
    """Addresses of a norm's weight and bias, 0 where there is none, and whether it is a LayerNorm."""
    if isinstance(norm, LayerNorm):
        return at(norm.weight), at(norm.bias), True
    return at(norm), 0, False


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


def alternating(parts: Sequence[Tensor]) -> Tensor:
    """Tiles of gate and up, [n, columns] each, in turn, each filled up with zeros: [2 * padded n, columns]."""
    n, columns = parts[0].shape
    tiles = [torch.nn.functional.pad(part, (0, 0, 0, pad(n) - n)).view(-1, 1, TILE, columns) for part in parts]
    return torch.cat(tiles, 1).view(-1, columns)
