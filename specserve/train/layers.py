"""A decoder layer as torch modules with gradients, named as checkpoints name its tensors; heads are made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specserve.models.rotary import rotary_tables
from specserve.models.spec import AttentionSpec, GatedMlp, LayerSpec

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class RMSNorm(nn.Module):
    """x over its root mean square, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class Rotary(nn.Module):
    """Rotates heads by halves (GPT-NeoX layout), as ops.rope_and_cache does."""

    def __init__(self, layer: LayerSpec, max_len: int) -> None:
        super().__init__()
        cos, sin = rotary_tables(layer.position, layer.attention.head_dim, max_len, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [batch, heads, rows, d], positions int64 [rows] or [batch, rows]."""
        cos, sin = self.get_buffer("cos")[positions], self.get_buffer("sin")[positions]
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return x * cos + torch.cat(x.chunk(2, -1)[::-1], -1) * sin


class Attention(nn.Module):
    """Grouped heads over keys and values that the caller keeps; `width` is that of what q, k and v read."""

    def __init__(self, spec: AttentionSpec, width: int, hidden: int, rotary: Rotary) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, spec.q_size, spec.qkv_bias)
        self.k_proj = nn.Linear(width, spec.kv_size, spec.qkv_bias)
        self.v_proj = nn.Linear(width, spec.kv_size, spec.qkv_bias)
        self.o_proj = nn.Linear(spec.q_size, hidden, spec.out_bias)
        norm = spec.head_norm
        self.q_norm = None if norm is None else RMSNorm(spec.head_dim, norm.eps)
        self.k_norm = None if norm is None else RMSNorm(spec.head_dim, norm.eps)
        self._rotary = [rotary]  # in a list: it is shared, and no part of this module
        self._groups = spec.num_heads // spec.num_kv_heads
        self._dim = spec.head_dim
        self._scale = spec.scale

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [batch, rows, width] -> [batch, heads, rows, d], scaled."""
        q = self._split(self.q_proj(x))
        rotated: Tensor = self._rotary[0](q if self.q_norm is None else self.q_norm(q), positions)
        return rotated * self._scale

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [batch, rows, width] -> twice [batch, heads, rows, d]: a head of its own for each of the queries'."""
        k, v = self._split(self.k_proj(x)), self._split(self.v_proj(x))
        k = self._rotary[0](k if self.k_norm is None else self.k_norm(k), positions)
        return k.repeat_interleave(self._groups, 1), v.repeat_interleave(self._groups, 1)

    def merge(self, x: Tensor) -> Tensor:
        """[batch, heads, rows, d] -> [batch, rows, hidden]."""
        merged: Tensor = self.o_proj(x.transpose(1, 2).flatten(2))
        return merged

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._dim).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, spec: GatedMlp, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, spec.size, spec.bias)
        self.up_proj = nn.Linear(hidden, spec.size, spec.bias)
        self.down_proj = nn.Linear(spec.size, hidden, spec.bias)
        self._activation = _ACTIVATIONS[spec.activation]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return found


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms; whoever uses it puts them together."""

    def __init__(self, spec: LayerSpec, hidden: int, rotary: Rotary, width: int | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden, spec.norm.eps)
        self.self_attn = Attention(spec.attention, width or hidden, hidden, rotary)
        self.post_attention_layernorm = RMSNorm(hidden, spec.norm.eps)
        assert isinstance(spec.mlp, GatedMlp), "heads have Llama's layers"
        self.mlp = Mlp(spec.mlp, hidden)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What stands behind the layer, [batch, rows, hidden], of its input and its attention."""
        residual = residual + self.self_attn.merge(attended)
        change: Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + change


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [batch, heads, rows, d] over k and v [batch, heads, keys, d], where mask bool [.., rows, keys] is set."""
    return F.scaled_dot_product_attention(q, k, v, mask, scale=1.0)


def attend_unrolled(q: Tensor, rows: Tensor, cache: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of the training-time test (EAGLE-3, arXiv 2503.01840, figure 6): row i of step k sees rows 0 to i of
    step 0, which read the target's hidden states, and of each later step up to k its own row i alone. q is step k's,
    [batch, heads, n, d], of rows int64 [batch, n]. `cache` has keys and values: of step 0 [batch, heads, tokens, d] of
    all rows, of steps 1 to k as q."""
    keys, values = cache[0]
    length = keys.shape[2]
    later = torch.arange(length, device=q.device) > rows[:, None, :, None]
    scores = (q @ keys.transpose(-1, -2)).masked_fill(later, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) for k, _ in cache[1:]]
    shares = torch.cat([scores, *own], -1).softmax(-1)  # [batch, heads, n, tokens + k]
    found = shares[..., :length] @ values
    for step, (_, v) in enumerate(cache[1:]):
        found = found + shares[..., length + step, None] * v
    return found
