"""Runs a pre-norm decoder described by a DecoderSpec on any backend of the op contract. Knows no model family, no file
and no scheduling; the KV cache and the attention plan are handed in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specserve.models.spec import DecoderSpec, Rope
from specserve.ops import Ops

__all__ = ["Decoder", "DecoderSpec", "rotary_tables"]


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Any  # as ops.pack returned it
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights, fused where one product can do the work of several. Norm weights are float32."""

    norm: Tensor  # [hidden], before attention
    qkv: _Linear  # [(heads + 2 kv_heads) * d, hidden]
    q_norm: Tensor | None  # [d]
    k_norm: Tensor | None  # [d]
    out: _Linear  # [hidden, heads * d]
    post_norm: Tensor | None  # [hidden], after attention
    mlp_norm: Tensor  # [hidden], before the MLP
    gate_up: _Linear  # [2 intermediate, hidden]
    down: _Linear  # [hidden, intermediate]
    post_mlp_norm: Tensor | None  # [hidden], after the MLP
    rope: Rope
    window: int | None


class Decoder:
    """A native model. `weights` maps the names of spec.shapes() to tensors of those shapes, any float dtype; each is
    read once and copied. The number of rows given to any method is a multiple of ops.row_multiple."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self._embedding = weights["model.embed_tokens.weight"].to(ops.device, ops.dtype, copy=True)
        # Rounded as transformers rounds it: Gemma was trained with the scale in the compute dtype.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=ops.dtype))
        head = self._embedding if spec.tied_embeddings else weights["lm_head.weight"]
        self._head = ops.pack(head.to(ops.device, ops.dtype))
        self._norm = _norm(spec, weights, ops, "model.norm")
        self._layers = [_layer(spec, weights, ops, i) for i in range(spec.num_layers)]
        self._tables = {rope: rotary_tables(rope, spec.head_dim, spec.max_len, ops.device) for rope in set(spec.ropes)}

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids int64 [rows] -> the residual stream entering layer 0, float32 [rows, hidden]."""
        embedded = self._embedding[token_ids].float()
        return embedded if self._embedding_scale == 1.0 else embedded.mul_(self._embedding_scale)

    def hidden(self, token_ids: Tensor, positions: Tensor, kv: list[Tensor], plan: Any) -> Tensor:
        """One step: token_ids, positions int64 [rows], one kv [2, slots, kv_heads, d] per layer, `plan` from ops.plan.

        Returns float32 [rows, hidden], after the final norm: exactly what the LM head reads, so its values are
        representable in the compute dtype. The rows' keys and values are written to `kv`.
        """
        assert len(token_ids) % self.ops.row_multiple == 0, "rows must be padded to a multiple of row_multiple"
        rotations = {rope: (cos[positions], sin[positions]) for rope, (cos, sin) in self._tables.items()}
        residual = self.embed(token_ids)  # [rows, hidden], float32 through all layers
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            residual += self._attention(layer, residual, rotations[layer.rope], layer_kv, plan)
            residual += self._mlp(layer, residual)
        return self.ops.rms_norm(residual, self._norm, self.spec.norm_eps).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of hidden() -> the LM head's scores, float32 [rows, vocab]."""
        assert len(hidden) % self.ops.row_multiple == 0, "rows must be padded to a multiple of row_multiple"
        logits = self.ops.linear(hidden.to(self.ops.dtype), self._head).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _attention(
        self, layer: _Layer, residual: Tensor, rotation: tuple[Tensor, Tensor], kv: Tensor, plan: Any
    ) -> Tensor:
        ops, spec = self.ops, self.spec
        x = ops.rms_norm(residual, layer.norm, spec.norm_eps)
        qkv = ops.linear(x, layer.qkv.weight, layer.qkv.bias).view(len(x), -1, spec.head_dim)
        q, k = self._rotated(layer, qkv, *rotation)
        ops.write_kv(kv, k, qkv[:, -spec.num_kv_heads :], plan)
        x = ops.attention(q, kv, plan, spec.query_scale, layer.window)
        x = ops.linear(x, layer.out.weight, layer.out.bias)
        return x if layer.post_norm is None else ops.rms_norm(x, layer.post_norm, spec.norm_eps)

    def _rotated(self, layer: _Layer, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q float32 [rows, heads, d] and k float32 [rows, kv_heads, d], views of one tensor unless they are normed."""
        ops, heads = self.ops, self.spec.num_heads
        if layer.q_norm is None or layer.k_norm is None:
            qk = ops.rotary(qkv[:, : -self.spec.num_kv_heads], cos, sin)
            return qk[:, :heads], qk[:, heads:]
        q = ops.rms_norm(qkv[:, :heads], layer.q_norm, self.spec.norm_eps)
        k = ops.rms_norm(qkv[:, heads : -self.spec.num_kv_heads], layer.k_norm, self.spec.norm_eps)
        return ops.rotary(q, cos, sin), ops.rotary(k, cos, sin)

    def _mlp(self, layer: _Layer, residual: Tensor) -> Tensor:
        ops, eps = self.ops, self.spec.norm_eps
        x = ops.rms_norm(residual, layer.mlp_norm, eps)
        x = ops.gated(ops.linear(x, layer.gate_up.weight, layer.gate_up.bias), self.spec.activation)
        x = ops.linear(x, layer.down.weight, layer.down.bias)
        return x if layer.post_mlp_norm is None else ops.rms_norm(x, layer.post_mlp_norm, eps)


def _layer(spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, index: int) -> _Layer:
    def norm(name: str, present: bool) -> Tensor | None:
        return _norm(spec, weights, ops, f"model.layers.{index}.{name}") if present else None

    def linear(part: str, *names: str, bias: bool) -> _Linear:
        return _linear(weights, ops, [f"model.layers.{index}.{part}.{name}" for name in names], bias)

    # Where a layer has four norms, the one named post_attention follows attention; where it has two, it opens the MLP.
    mlp_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    return _Layer(
        norm=_norm(spec, weights, ops, f"model.layers.{index}.input_layernorm"),
        qkv=linear("self_attn", "q_proj", "k_proj", "v_proj", bias=spec.qkv_bias),
        q_norm=norm("self_attn.q_norm", spec.qk_norm),
        k_norm=norm("self_attn.k_norm", spec.qk_norm),
        out=linear("self_attn", "o_proj", bias=spec.o_bias),
        post_norm=norm("post_attention_layernorm", spec.post_norms),
        mlp_norm=_norm(spec, weights, ops, f"model.layers.{index}.{mlp_norm}"),
        gate_up=linear("mlp", "gate_proj", "up_proj", bias=spec.mlp_bias),
        down=linear("mlp", "down_proj", bias=spec.mlp_bias),
        post_mlp_norm=norm("post_feedforward_layernorm", spec.post_norms),
        rope=spec.ropes[index],
        window=spec.windows[index],
    )


def _norm(spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, name: str) -> Tensor:
    return weights[f"{name}.weight"].to(ops.device, torch.float32, copy=True) + spec.norm_offset


def _linear(weights: Mapping[str, Tensor], ops: Ops, names: list[str], bias: bool) -> _Linear:
    def stacked(kind: str) -> Tensor:
        # cat copies even a single tensor: file mappings are not aligned as kernels like it, and may be closed.
        return torch.cat([weights[f"{name}.{kind}"].to(ops.device, ops.dtype) for name in names])

    return _Linear(ops.pack(stacked("weight")), stacked("bias") if bias else None)


def rotary_tables(rope: Rope, head_dim: int, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim / 2] each, of position times frequency.

    Frequencies and angles are float32, as models were trained; cosines go through float64 so that their bits do not
    depend on the table's length or on the machine's vector width.
    """
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _frequencies(rope, head_dim)).double()
    return angles.cos().float().to(device), angles.sin().float().to(device)


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per token, float32 [head_dim / 2], after the scaling."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.scaling != "llama3":
        return plain / rope.factor
    trained = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain  # tokens per turn
    # 1: more than high_freq_factor turns in the original context, kept; 0: fewer than low_freq_factor, slowed down.
    blend = (trained / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain
