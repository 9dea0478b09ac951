"""Draft heads in plain torch, written from their papers: no paged cache, no ops, differentiable."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.models.heads.spec import EagleSpec
from specserve.models.spec import DecoderSpec

Weights = Mapping[str, Tensor]


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [rows, heads, d] by halves."""
    d = x.shape[-1]
    angles = positions[:, None] * (1.0 / theta ** (torch.arange(0, d, 2) / d))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attend(spec: DecoderSpec, q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """q [rows, heads, d], k, v [context, kv_heads, d], sees bool [rows, context] -> [rows, heads * d]."""
    share = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("rhd,chd->hrc", q, k) * spec.query_scale
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hrc,chd->rhd", weights, v).flatten(1)


def layer(spec: DecoderSpec, weights: Weights, name: str, x: Tensor, residual: Tensor) -> Tensor:
    """A decoder layer whose attention reads x [rows, any], of a chain that begins at position 0."""
    at = f"{name}.self_attn"
    positions = torch.arange(len(x)).float()
    q, k, v = ((x @ weights[f"{at}.{p}_proj.weight"].T).unflatten(1, (-1, spec.head_dim)) for p in "qkv")
    if spec.qk_norm:
        q = norm(q, weights[f"{at}.q_norm.weight"], spec.norm_eps)
        k = norm(k, weights[f"{at}.k_norm.weight"], spec.norm_eps)
    theta = spec.ropes[0].theta
    q, k = rotated(q, positions, theta), rotated(k, positions, theta)
    sees = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    residual = residual + attend(spec, q, k, v, sees) @ weights[f"{at}.o_proj.weight"].T
    x = norm(residual, weights[f"{name}.post_attention_layernorm.weight"], spec.norm_eps)
    gate, up = (x @ weights[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
    return residual + (F.silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T


def eagle_states(head: EagleSpec, weights: Weights, hidden: list[Tensor]) -> Tensor:
    """What version 3 makes of the target's hidden states [rows, target's hidden] each."""
    if head.version == 1:
        return hidden[0]
    if head.fc_norms:
        hidden = [norm(x, weights[f"fc_norm.{i}.weight"], head.layers.norm_eps) for i, x in enumerate(hidden)]
    x = norm(torch.cat(hidden, -1), weights.get("input_norm.weight"), head.layers.norm_eps)
    return F.linear(x, weights["fc.weight"], weights.get("fc.bias"))


def eagle(
    head: EagleSpec,
    weights: Weights,
    embedding: Tensor,
    lm_head: Tensor,
    tokens: Tensor,
    states: Tensor,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """Over a chain of rows from position `start` on, of which row i reads token i + 1 and hidden state i: logits [rows,
    draft vocabulary] and what the next pass reads in place of hidden states."""
    spec, eps = head.layers, head.layers.norm_eps
    embedded = weights.get("embed_tokens.weight", embedding)[tokens]
    first = weights.get("layers.0.input_layernorm.weight")
    if head.version == 3:
        normed = norm(states, weights["layers.0.hidden_norm.weight"], eps)
        x = torch.cat((norm(embedded, first, eps), normed), -1)
        residual = normed if head.norm_before_residual else states
    else:
        residual = F.linear(torch.cat((embedded, states), -1), weights["fc.weight"], weights.get("fc.bias"))
        x = norm(residual, first, eps)
    residual = layer(spec, weights, "layers.0", x, residual)
    for i in range(1, spec.num_layers):
        x = norm(residual, weights[f"layers.{i}.input_layernorm.weight"], eps)
        residual = layer(spec, weights, f"layers.{i}", x, residual)
    out = norm(residual, weights.get("norm.weight"), eps)
    return out @ weights.get("lm_head.weight", lm_head).T, out if head.norm_output else residual
