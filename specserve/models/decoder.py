"""Runs a pre-norm decoder described by a DecoderSpec on any backend of the op contract."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specserve.models.spec import DecoderSpec, Rope
from specserve.ops import HeadNorms, Ops, Rotation
from specserve.ops.packing import Lazy, PackedCache, below, uncached

__all__ = ["Decoder", "DecoderSpec", "Layer", "LayerStack", "WeightReader", "rotary_tables"]


@dataclass(frozen=True, slots=True)
class Layer:
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

    def run(
        self, ops: Ops, spec: DecoderSpec, x: Any, residual: Tensor, rotation: Rotation, kv: Tensor, plan: Any
    ) -> Tensor:
        """Attention over what `norm` made of the residual stream, x, and the MLP. Attention's output joins `residual`,
        in place; the MLP's is returned, to be added by what reads it next, through `post_mlp_norm`."""
        q = ops.rope_and_cache(ops.linear(x, self.qkv), self.head_norms, rotation, kv, plan)
        attended = ops.linear(ops.attention(q, kv, plan, spec.query_scale, self.window), self.out)
        x = ops.fused_add_rms_norm(residual, attended, self.post_norm, self.mlp_norm, spec.norm_eps)
        return ops.linear(ops.gated(x, self.gate_up, spec.activation), self.down)


class LayerStack:
    """Layers one after the other, whose tensors are named `prefix`layers.N.*, with the tables of their rotations."""

    def __init__(self, read: WeightReader, prefix: str) -> None:
        spec = self._spec = read.spec
        self.layers = [_read_layer(read, i, prefix) for i in range(spec.num_layers)]
        device = read.ops.device
        self.tables = {rope: rotary_tables(rope, spec.head_dim, spec.max_len, device) for rope in set(spec.ropes)}

    def run(
        self,
        ops: Ops,
        residual: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        x: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The residual stream through all layers, float32 [rows of the step, hidden], which is overwritten. Returns
        what stands after them in the `rows` asked for, float32 [n, hidden], and after each of `taps` in all rows. `x`
        is what the first layer's attention reads where that is not the layer's norm of the stream."""
        eps = self._spec.norm_eps
        rotations = {rope: Rotation(positions, *tables) for rope, tables in self.tables.items()}
        delta: Tensor | None = None  # of the layer before, yet to be added through its norm `post`
        post: Any = None
        tapped: dict[int, Tensor] = {}
        for i, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            if i or x is None:
                x = ops.fused_add_rms_norm(residual, delta, post, layer.norm, eps)
            delta = layer.run(ops, self._spec, x, residual, rotations[layer.rope], layer_kv, plan)
            post = layer.post_mlp_norm
            if i in taps:
                tapped[i] = ops.tap(i, residual, delta, post, eps)
        assert delta is not None, "there are layers"
        return ops.gather_rows(rows, residual, delta, post, eps), tuple(tapped[i] for i in taps)


class Decoder:
    """A native model. `weights` maps the names of spec.shapes() to tensors of those shapes, any float dtype; they are
    copied, and only those read that `cached` does not have in their packed form. The number of rows given to `forward`
    is a multiple of ops.row_multiple."""

    features_width = 0  # it reads tokens alone

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Tensor], ops: Ops, cached: PackedCache = uncached
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.num_mapped_bytes = 0  # of the weights, where they are mapped from a file: the system counts them as free
        read = WeightReader(spec, spec.shapes(), weights, ops, cached)
        self._embedding = ops.pack_table(*read.named("model.embed_tokens"))
        # Rounded as transformers rounds it: Gemma was trained with the scale in the compute dtype.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=ops.dtype))
        self._head = ops.pack_head(*read.named("model.embed_tokens" if spec.tied_embeddings else "lm_head"))
        self._norm = read.norm("model.norm")
        self._stack = LayerStack(read, "model.")

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """One step: token_ids, positions int64 [rows], one kv [2, slots, kv_heads, d] per layer, `plan` from ops.plan.

        Returns for the `rows` int64 [n] that are asked for the hidden states after the final norm, float32 [n, hidden],
        the LM head's scores, float32 [n, vocab], and the best token ids as ops.argmax has them, int64 [n]; then, for
        all rows and each layer of `taps`, the residual stream behind it, float32 [rows, hidden]. The keys and values of
        all rows are written to `kv`.
        """
        ops = self.ops
        assert len(token_ids) % ops.row_multiple == 0, "rows must be padded to a multiple of row_multiple"
        assert len(rows) % ops.row_multiple == 0, "rows must be padded to a multiple of row_multiple"
        residual, tapped = self._stack.run(ops, self.embed(token_ids), positions, rows, kv, plan, taps)
        hidden = ops.norm(residual, self._norm, self.spec.norm_eps)
        logits = self.lm_head(hidden)
        return hidden, logits, ops.argmax(logits), tapped

    def embed(self, token_ids: Tensor) -> Tensor:
        """The scaled embedding of int64 [n], float32 [n, hidden]."""
        return self.ops.embed(token_ids, self._embedding, self._embedding_scale)

    def head(self, residual: Tensor) -> Tensor:
        """The final norm and the LM head over the residual stream float32 [n, hidden] behind the last layer, float32
        [n, vocab]."""
        return self.lm_head(self.final_norm(residual))

    def final_norm(self, residual: Tensor) -> Tensor:
        """What the LM head reads of the residual stream behind the last layer, float32 [n, hidden] both."""
        return self.ops.norm(residual, self._norm, self.spec.norm_eps)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The scores of hidden states behind the final norm, float32 [n, hidden] -> [n, vocab]."""
        logits = self.ops.linear(self.ops.quantize_activation(hidden), self._head).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)


class WeightReader:
    """Packs tensors, named as in `shapes`, or takes them from the cache: there what is fused has the names of all its
    parts. `spec` is that of the layers."""

    def __init__(
        self,
        spec: DecoderSpec,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, Tensor],
        ops: Ops,
        cached: PackedCache = uncached,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self._weights = weights
        self._shapes = shapes
        self._cached = cached

    def named(self, name: str) -> tuple[Lazy, PackedCache]:
        weight = f"{name}.weight"
        return Lazy(self._shapes[weight], lambda: self._weights[weight]), below(self._cached, name)

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._shapes

    def norm(self, name: str, present: bool = True) -> Any:
        if not present:
            return None
        weight, cached = self.named(name)
        return self.ops.pack_vector(Lazy(weight.shape, lambda: weight[:].float() + self.spec.norm_offset), cached)

    def linear(self, bias: bool, *names: str) -> Any:
        """One product for several layers that read the same input."""
        biases = self._stacked("bias", *names) if bias else None
        return self.ops.pack(self._stacked("weight", *names), biases, below(self._cached, "+".join(names)))

    def gated(self, bias: bool, gate: str, up: str) -> Any:
        weights = self._stacked("weight", gate), self._stacked("weight", up)
        gate_bias, up_bias = (self._stacked("bias", name) if bias else None for name in (gate, up))
        return self.ops.pack_gated(*weights, gate_bias, up_bias, below(self._cached, f"{gate}+{up}"))

    def _stacked(self, kind: str, *names: str) -> Lazy:
        """A copy even of a single tensor: file mappings are not aligned as kernels like it, and may be closed."""
        full = [f"{name}.{kind}" for name in names]
        shape = (sum(self._shapes[name][0] for name in full), *self._shapes[full[0]][1:])
        return Lazy(shape, lambda: torch.cat([self._weights[name] for name in full]))


def _read_layer(read: WeightReader, index: int, prefix: str) -> Layer:
    """`norm` is None where attention has no norm before."""
    spec, layer = read.spec, f"{prefix}layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    # Where a layer has four norms, the one named post_attention follows attention; where it has two, it opens the MLP.
    mlp_norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    q_norm, k_norm = (read.norm(f"{attention}.{name}", spec.qk_norm) for name in ("q_norm", "k_norm"))
    return Layer(
        norm=read.norm(f"{layer}.input_layernorm", read.has(f"{layer}.input_layernorm")),
        qkv=read.linear(spec.qkv_bias, f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        head_norms=HeadNorms(q_norm, k_norm, spec.norm_eps) if spec.qk_norm else None,
        out=read.linear(spec.o_bias, f"{attention}.o_proj"),
        post_norm=read.norm(f"{layer}.post_attention_layernorm", spec.post_norms),
        mlp_norm=read.norm(f"{layer}.{mlp_norm}"),
        gate_up=read.gated(spec.mlp_bias, f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=read.linear(spec.mlp_bias, f"{mlp}.down_proj"),
        post_mlp_norm=read.norm(f"{layer}.post_feedforward_layernorm", spec.post_norms),
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
