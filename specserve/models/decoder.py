"""Runs a pre-norm decoder described by a DecoderSpec on any backend of the op contract. Knows no model family, no file
and no scheduling; the KV cache and the attention plan are handed in."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specserve.models.spec import DecoderSpec, Rope
from specserve.ops import HeadNorms, Ops, Rotation

__all__ = ["Decoder", "DecoderSpec", "rotary_tables"]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights as the ops packed them, fused where one product can do the work of several."""

    norm: Any  # [hidden], before attention
    qkv: Any  # [(heads + 2 kv_heads) * d, hidden]
    head_norms: HeadNorms | None
    out: Any  # [hidden, heads * d]
    post_norm: Any  # [hidden], after attention, or None
    mlp_norm: Any  # [hidden], before the MLP
    gate_up: Any  # twice [intermediate, hidden]
    down: Any  # [hidden, intermediate]
    post_mlp_norm: Any  # [hidden], after the MLP, or None
    rope: Rope
    window: int | None


class Decoder:
    """A native model. `weights` maps the names of spec.shapes() to tensors of those shapes, any float dtype; each is
    read in an order that the spec fixes, and copied. The number of rows given to `forward` is a multiple of
    ops.row_multiple."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self.spec = spec
        self.ops = ops
        self.num_mapped_bytes = 0  # of the weights, where they are mapped from a file: the system counts them as free
        self._embedding = ops.pack_table(weights["model.embed_tokens.weight"])
        # Rounded as transformers rounds it: Gemma was trained with the scale in the compute dtype.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=ops.dtype))
        head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        self._head = ops.pack_head(weights[head])
        self._norm = _Reader(spec, weights, ops, "model").norm("norm")
        self._layers = [_layer(_Reader(spec, weights, ops, f"model.layers.{i}"), i) for i in range(spec.num_layers)]
        self._tables = {rope: rotary_tables(rope, spec.head_dim, spec.max_len, ops.device) for rope in set(spec.ropes)}

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, kv: list[Tensor], plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step: token_ids, positions int64 [rows], one kv [2, slots, kv_heads, d] per layer, `plan` from ops.plan.

        Returns for the `rows` int64 [n] that are asked for the hidden states after the final norm, float32 [n, hidden],
        the LM head's scores, float32 [n, vocab], and the best token ids as ops.argmax has them, int64 [n]. The keys and
        values of all rows are written to `kv`.
        """
        ops, spec = self.ops, self.spec
        assert len(token_ids) % ops.row_multiple == 0, "rows must be padded to a multiple of row_multiple"
        assert len(rows) % ops.row_multiple == 0, "rows must be padded to a multiple of row_multiple"
        rotations = {rope: Rotation(positions, *tables) for rope, tables in self._tables.items()}
        residual = ops.embed(token_ids, self._embedding, self._embedding_scale)  # [rows, hidden], through all layers
        delta: Tensor | None = None
        post: Any = None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x = ops.fused_add_rms_norm(residual, delta, post, layer.norm, spec.norm_eps)
            q = ops.rope_and_cache(ops.linear(x, layer.qkv), layer.head_norms, rotations[layer.rope], layer_kv, plan)
            x = ops.attention(q, layer_kv, plan, spec.query_scale, layer.window)
            x = ops.fused_add_rms_norm(
                residual, ops.linear(x, layer.out), layer.post_norm, layer.mlp_norm, spec.norm_eps
            )
            delta, post = ops.linear(ops.gated(x, layer.gate_up, spec.activation), layer.down), layer.post_mlp_norm
        assert delta is not None, "a decoder has layers"
        hidden = ops.norm(ops.gather_rows(rows, residual, delta, post, spec.norm_eps), self._norm, spec.norm_eps)
        logits = self._logits(hidden)
        return hidden, logits, ops.argmax(logits)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.ops.linear(self.ops.quantize_activation(hidden), self._head).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)


class _Reader:
    """Packs the tensors below one name."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, prefix: str) -> None:
        self.spec = spec
        self.ops = ops
        self._weights = weights
        self._prefix = prefix

    def norm(self, name: str, present: bool = True) -> Any:
        if not present:
            return None
        weight = self._weights[f"{self._prefix}.{name}.weight"].float() + self.spec.norm_offset
        return self.ops.pack_vector(weight)

    def linear(self, bias: bool, *names: str) -> Any:
        """One product for several layers that read the same input."""
        return self.ops.pack(*(self._stacked(kind, names) for kind in (("weight", "bias") if bias else ("weight",))))

    def gated(self, bias: bool, gate: str, up: str) -> Any:
        biases = [self._stacked("bias", (name,)) if bias else None for name in (gate, up)]
        return self.ops.pack_gated(self._stacked("weight", (gate,)), self._stacked("weight", (up,)), *biases)

    def _stacked(self, kind: str, names: tuple[str, ...]) -> Tensor:
        """A copy even of a single tensor: file mappings are not aligned as kernels like it, and may be closed. Not by
        torch.cat, which on the meta device first imports half of torch."""
        parts = [self._weights[f"{self._prefix}.{name}.{kind}"] for name in names]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        lengths = [len(part) for part in parts]
        stacked = torch.empty(sum(lengths), *parts[0].shape[1:], dtype=dtype, device=parts[0].device)
        for place, part in zip(torch.split(stacked, lengths), parts, strict=True):
            place.copy_(part)
        return stacked


def _layer(read: _Reader, index: int) -> _Layer:
    spec = read.spec
    # Where a layer has four norms, the one named post_attention follows attention; where it has two, it opens the MLP.
    mlp_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    q_norm, k_norm = (read.norm(f"self_attn.{name}", spec.qk_norm) for name in ("q_norm", "k_norm"))
    return _Layer(
        norm=read.norm("input_layernorm"),
        qkv=read.linear(spec.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        head_norms=HeadNorms(q_norm, k_norm, spec.norm_eps) if spec.qk_norm else None,
        out=read.linear(spec.o_bias, "self_attn.o_proj"),
        post_norm=read.norm("post_attention_layernorm", spec.post_norms),
        mlp_norm=read.norm(mlp_norm),
        gate_up=read.gated(spec.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=read.linear(spec.mlp_bias, "mlp.down_proj"),
        post_mlp_norm=read.norm("post_feedforward_layernorm", spec.post_norms),
        rope=spec.ropes[index],
        window=spec.windows[index],
    )


def rotary_tables(rope: Rope, head_dim: int, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim] each, of position times frequency: x * cos + swap(x) * sin rotates by
    halves, where swap exchanges the halves. So sin is negative in the first half.

    Frequencies and angles are float32, as models were trained; cosines go through float64 so that their bits do not
    depend on the table's length or on the machine's vector width.
    """
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _frequencies(rope, head_dim)).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


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
