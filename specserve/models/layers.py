"""Runs the layers that LayerSpecs describe on any backend of the op contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.models.experts import Experts
from specserve.models.positions import Alibi, Position
from specserve.models.reader import WeightReader
from specserve.models.rotary import feature_order, rotary_tables
from specserve.models.spec import AttentionSpec, DecoderSpec, ExpertsMlp, GatedMlp, LayerSpec, Parallel, PostNorm
from specserve.ops import HeadNorms, Ops, Rotation


class Attention:
    """Grouped heads over the cached KV. Queries, keys and values are one product."""

    def __init__(self, read: WeightReader, name: str, layer: LayerSpec) -> None:
        spec = layer.attention
        self._scale, self._window = spec.scale, spec.window
        order = feature_order(layer.position, spec.head_dim)
        self.head_norms: HeadNorms | None = None  # of every head, or of all together
        self._joint = None if spec.joint_norm is None else (spec.q_size, spec.kv_size)
        if (norm := spec.head_norm or spec.joint_norm) is not None:
            q, k = (read.norm(f"{name}.{each}_norm", norm, order) for each in "qk")
            self.head_norms = HeadNorms(q, k, norm.eps)
        rows = None if order is None else _with_values(spec, order)
        self.qkv = read.linear(*(f"{name}.{each}_proj" for each in "qkv"), order=rows)
        self.out = read.linear(f"{name}.o_proj", times=layer.residual.multiplier)

    def run(self, ops: Ops, x: Any, rotation: Rotation, kv: Tensor, plan: Any, slots: Tensor | None) -> Tensor:
        """Of what a linear layer reads, float32 [rows, hidden]."""
        qkv, norms = self.qkv.linear(ops, x, slots), self.head_norms
        if self._joint is not None and norms is not None:
            qkv, norms = ops.norm_projections(qkv, norms, self._joint), None
        q = ops.rope_and_cache(qkv, norms, rotation, kv, plan)
        attended = ops.attention(q, kv, plan, self._scale, self._window, rotation.slopes)
        return self.out.linear(ops, attended, slots)


def _with_values(spec: AttentionSpec, order: Tensor) -> Tensor:
    """The order of a head's features -> that of all queries, keys and values; these stay as they are."""
    rows = torch.arange(spec.q_size + 2 * spec.kv_size).view(-1, spec.head_dim)
    return torch.cat((rows[: -spec.num_kv_heads, order], rows[-spec.num_kv_heads :])).flatten()


class Mlp:
    """A gated MLP, whose gate and up are one product, or one that is not gated."""

    def __init__(self, read: WeightReader, name: str, layer: LayerSpec) -> None:
        assert not isinstance(layer.mlp, ExpertsMlp)
        self._activation = layer.mlp.activation
        parts = [f"{name}.{part}" for part in layer.mlp.parts]
        self.up = read.gated(*parts) if isinstance(layer.mlp, GatedMlp) else read.linear(*parts)
        self.down = read.linear(f"{name}.down_proj", times=layer.residual.multiplier)

    def run(self, ops: Ops, x: Any, normed: Callable[[], Tensor], slots: Tensor | None) -> Tensor:
        """Of what a linear layer reads, float32 [rows, hidden]."""
        return self.down.linear(ops, self.up.activated(ops, x, self._activation, slots), slots)


def make_mlp(read: WeightReader, name: str, layer: LayerSpec) -> Mlp | Experts:
    """The MLP that `layer` describes."""
    if not isinstance(layer.mlp, ExpertsMlp):
        return Mlp(read, name, layer)
    spec = layer.mlp.shared
    shared = None if spec is None else Mlp(read, f"{name}.shared_expert", replace(layer, mlp=spec))
    return Experts(read, name, layer, shared)


class Layer:
    """Attention and an MLP one after the other or side by side, each with the norms around it that its residual form
    has. `norm`, before attention, is None where the tensors have none."""

    def __init__(self, read: WeightReader, name: str, spec: LayerSpec) -> None:
        before, after, mlp, after_mlp = (each and f"{name}.{each}" for each in spec.norm_names)
        self.norm = read.norm(before, spec.norm)
        self.attention = Attention(read, f"{name}.self_attn", spec)
        self.post_norm = read.norm(after, spec.norm)
        self.mlp_norm = read.norm(mlp, spec.norm)
        self.mlp = make_mlp(read, f"{name}.mlp", spec)
        last = read.norm(after_mlp, spec.norm)
        self.stream_norm = last if isinstance(spec.residual, PostNorm) else None
        self.post_mlp_norm = None if isinstance(spec.residual, PostNorm) else last
        self._eps = spec.norm.eps
        self._is_parallel = isinstance(spec.residual, Parallel)
        self._peers = read.peers

    def run(
        self, ops: Ops, x: Any, residual: Tensor, rotation: Rotation, kv: Tensor, plan: Any, slots: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Attention over what `norm` made of the residual stream, x, and the MLP. Attention's output joins `residual`,
        in place. Returns the stream, which is another tensor in layers with a `stream_norm`, and the MLP's output, to
        be added by what reads it next, through `post_mlp_norm`."""
        attended = self._whole(ops, self.attention.run(ops, x, rotation, kv, plan, slots))
        normed = partial(ops.norm, residual, self.mlp_norm, self._eps)  # experts call it, which are never parallel
        if self.stream_norm is not None:
            residual, x = norm_stream(ops, residual, attended, self.mlp_norm, self._eps)
        elif not self._is_parallel:
            x = ops.fused_add_norm(residual, attended, self.post_norm, self.mlp_norm, self._eps)
        else:
            if self.mlp_norm is not None:
                x = ops.fused_add_norm(residual, None, None, self.mlp_norm, self._eps)
            ops.add(residual, attended)
        return residual, self._whole(ops, self.mlp.run(ops, x, normed, slots))

    def _whole(self, ops: Ops, part: Tensor) -> Tensor:
        """What all processes of the model have computed of it."""
        return part if self._peers is None else ops.sum_peers(part, self._peers)


def norm_stream(ops: Ops, residual: Tensor, delta: Tensor, norm: Any, eps: float) -> tuple[Tensor, Any]:
    """The norm of residual + delta, which takes the residual stream's place, and the same for a linear layer to read.
    `residual` is overwritten."""
    ops.add(residual, delta)
    stream = ops.norm(residual, norm, eps)
    return stream, ops.quantize_activation(stream)


class Stream(NamedTuple):
    """The residual stream after some layers, as ops.gather_rows and ops.tap take it."""

    residual: Tensor  # float32 [rows, hidden]
    delta: Tensor | None  # of the last layer, yet to be added through its norm `post`
    post: Any


class LayerStack:
    """Layers of `spec` one after the other, all or those of some consecutive `numbers`, whose tensors are named
    `prefix`layers.N.*, with the tables of their rotations."""

    def __init__(self, read: WeightReader, spec: DecoderSpec, prefix: str, numbers: range | None = None) -> None:
        self.numbers = range(spec.num_layers) if numbers is None else numbers
        own = [spec.layers[i] for i in self.numbers]
        self.layers = [Layer(read, f"{prefix}layers.{i}", spec.layers[i]) for i in self.numbers]
        self._eps, self._peers, self._last = spec.final_norm.eps, read.peers, spec.num_layers - 1
        self._rotated = [(layer.position, layer.attention.head_dim) for layer in own]
        self.tables = {each: rotary_tables(*each, spec.max_len, read.ops.device) for each in set(self._rotated)}
        found = {layer.position for layer in own if isinstance(layer.position, Alibi)}
        self._slopes: dict[Position, Any] = {each: read.ops.pack_vector(torch.tensor(each.slopes)) for each in found}

    def rotations(self, positions: Tensor) -> Sequence[Rotation]:
        """Of rows at these positions, int64 [rows], one for each layer; layers that rotate alike share theirs."""
        found = {each: Rotation(positions, *at, slopes=self._slopes.get(each[0])) for each, at in self.tables.items()}
        return [found[each] for each in self._rotated]

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
        slots: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The residual stream through all layers, float32 [rows of the step, hidden], which is overwritten. Returns
        what stands after them in the `rows` asked for, float32 [n, hidden], and after each of `taps` in all rows. `x`
        is what the first layer's attention reads where that is not the layer's norm of the stream, and `slots` those of
        the rows' adapters, int64 [rows of the step], negative where they have none."""
        stream, tapped = self.run_through(ops, residual, positions, kv, plan, taps, x, slots)
        residual, delta, post = stream
        assert delta is not None, "only layers before the last norm the stream itself"
        return ops.gather_rows(rows, residual, delta, post, self._eps), tapped

    def run_through(
        self,
        ops: Ops,
        residual: Tensor,
        positions: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        x: Any = None,
        slots: Tensor | None = None,
    ) -> tuple[Stream, tuple[Tensor, ...]]:
        """As `run`, to where all rows are."""
        eps = self._eps
        delta: Tensor | None = None
        post: Any = None
        tapped: dict[int, Tensor] = {}
        each = zip(self.numbers, self.layers, self.rotations(positions), kv, strict=True)
        for i, layer, rotation, layer_kv in each:
            if x is None:
                x = ops.fused_add_norm(residual, delta, post, layer.norm, eps)
            residual, delta = layer.run(ops, x, residual, rotation, layer_kv, plan, slots)
            x, post = None, layer.post_mlp_norm
            if layer.stream_norm is not None and i != self._last:  # whose is the final norm
                residual, x = norm_stream(ops, residual, delta, layer.stream_norm, eps)
                delta = None
            if i in taps:
                tapped[i] = ops.tap(i, residual, delta, post, eps)
        if self._peers is not None:
            ops.share_broken(len(residual), plan, self._peers)
        return Stream(residual, delta, post), tuple(tapped[i] for i in taps)
