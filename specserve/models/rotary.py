"""The tables of rotary position embedding, and the order of features in which ops rotate by halves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specserve.models.positions import Position, Rope


def rotary_tables(rope: Position, head_dim: int, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim] each, of position times frequency: x * cos + swap(x) * sin rotates by
    halves, where swap exchanges the halves. So sin is negative in the first half. Those of what does not
    rotate leave x as it is.

    Frequencies and angles are float32, as models were trained; cosines go through float64 so that their bits do not
    depend on the table's length or on the machine's vector width. Features are in feature_order. max_len chooses the
    frequencies where a scaling has several.
    """
    if not isinstance(rope, Rope):
        shape = max_len, head_dim
        return torch.ones(shape, device=device), torch.zeros(shape, device=device)
    rotated = rope.rotated(head_dim) // 2
    frequencies = torch.zeros(head_dim // 2)  # radians per token; 0 for what does not rotate
    frequencies[:rotated] = _frequencies(rope, 2 * rotated, max_len)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    cos[:, :rotated] *= rope.attention_factor
    sin[:, :rotated] *= rope.attention_factor
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def feature_order(rope: Position, head_dim: int) -> Tensor | None:
    """The order of a head's features, int64 [head_dim], in which those that rotate together are half a head apart, as
    ops rotate; None where they are anyway. Queries and keys in the same order have the same products."""
    if not isinstance(rope, Rope) or rope.is_plain:
        return None
    rotated, rest = torch.arange(head_dim).tensor_split([rope.rotated(head_dim)])
    pairs = rotated.view(-1, 2).T if rope.interleaved else rotated.view(2, -1)
    return torch.cat((pairs, rest.view(2, -1)), 1).flatten()


def _frequencies(rope: Rope, count: int, max_len: int) -> Tensor:
    """Of `count` features that rotate, float32 [count / 2], after the scaling."""
    exponents = torch.arange(0, count, 2).float() / count
    theta, original = rope.theta, rope.original_max_position_embeddings
    if rope.scaling == "longrope":
        factors = rope.short_factor if max_len <= original else rope.long_factor
        return 1.0 / (torch.tensor(factors) * theta**exponents)
    if rope.scaling == "dynamic":
        stretch = rope.factor * max(max_len, original) / original - (rope.factor - 1)
        theta *= stretch ** (count / (count - 2))
    plain: Tensor = 1.0 / theta**exponents
    if rope.scaling == "yarn":
        kept = 1 - _yarn_ramp(rope, count)
        return 1.0 / (rope.factor * theta**exponents) * (1 - kept) + plain * kept
    if rope.scaling == "llama3":
        wavelengths = 2 * math.pi / plain  # tokens per turn
        # 1: more than high_freq_factor turns in the original context, kept; 0: fewer than low_freq_factor, slowed down.
        blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * plain / rope.factor + blend * plain
    return plain if rope.scaling == "dynamic" else plain / rope.factor


def _yarn_ramp(rope: Rope, count: int) -> Tensor:
    """How much of each frequency is divided, float32 [count / 2]: nothing of what makes more than beta_fast turns in
    the original context, all of what makes fewer than beta_slow (arXiv 2309.00071, section 3.2)."""

    def feature(turns: float) -> float:
        trained = rope.original_max_position_embeddings
        return count * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, count - 1)
    high += 0.001 * (low == high)
    return ((torch.arange(count // 2).float() - low) / (high - low)).clamp(0, 1)
