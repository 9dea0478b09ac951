"""The tables of rotary position embedding, and the order of features in which ops rotate by halves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specserve.models.spec import Rope


def rotary_tables(rope: Rope | None, head_dim: int, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim] each, of position times frequency: x * cos + swap(x) * sin rotates by
    halves, where swap exchanges the halves. So sin is negative in the first half. Those of None leave x as it is.

    Frequencies and angles are float32, as models were trained; cosines go through float64 so that their bits do not
    depend on the table's length or on the machine's vector width. Features are in feature_order.
    """
    if rope is None:
        shape = max_len, head_dim
        return torch.ones(shape, device=device), torch.zeros(shape, device=device)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _frequencies(rope, head_dim)).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def feature_order(rope: Rope | None, head_dim: int) -> Tensor | None:
    """The order of a head's features, int64 [head_dim], in which those that rotate together are half a head apart, as
    ops rotate; None where they are anyway. Queries and keys in the same order have the same products."""
    if rope is None or rope.is_plain:
        return None
    rotated, rest = torch.arange(head_dim).tensor_split([rope.rotated(head_dim)])
    pairs = rotated.view(-1, 2).T if rope.interleaved else rotated.view(2, -1)
    return torch.cat((pairs, rest.view(2, -1)), 1).flatten()


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per token, float32 [head_dim / 2], after the scaling; 0 for what does not rotate."""
    count = rope.rotated(head_dim)
    return torch.nn.functional.pad(_scaled(rope, count), (0, (head_dim - count) // 2))


def _scaled(rope: Rope, count: int) -> Tensor:
    plain = 1.0 / rope.theta ** (torch.arange(0, count, 2).float() / count)
    if rope.scaling != "llama3":
        return plain / rope.factor
    trained = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain  # tokens per turn
    # 1: more than high_freq_factor turns in the original context, kept; 0: fewer than low_freq_factor, slowed down.
    blend = (trained / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain
