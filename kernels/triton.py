"""Kernels in Triton for GPUs, weights in float32, bfloat16, int8 or int4: a step is one copy in, a graph that is
replayed, small copies out.

Every kernel sums in an order that the row alone fixes, so no padding of rows is needed: row_multiple is 1. What is not
worth a kernel of its own is torch's, as kernels/reference.py has it, captured with the rest.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import specserve.kernels._torch_verify as _verify
import specserve.kernels._triton_adapters as _adapters
import specserve.kernels._triton_attention as _attention
import specserve.kernels._triton_bank as _bank
import specserve.kernels._triton_experts as _experts
import specserve.kernels._triton_flash as _flash
import specserve.kernels._triton_groups as _groups
import specserve.kernels._triton_integer_experts as _integer_experts
import specserve.kernels._triton_integers as _integers
import specserve.kernels._triton_linear as _linear
import specserve.kernels._triton_rows as _rows
import specserve.kernels._triton_sampling as _sampling
import specserve.kernels.reference as _reference
from specserve.kernels._torch_peers import DevicePeerOps
from specserve.kernels._torch_rows import LayerNorm as _LayerNorm, norm as _norm
from specserve.kernels._triton_graph import GraphRecording, Staging
from specserve.kernels._triton_plan import Plan, PlanTensors
from specserve.ops import AttentionRows, DraftArrays, HeadNorms, Input, Placed, Rotation, RowAdapters, T, Verified
from specserve.ops.backend import KernelOptions
from specserve.ops.packing import PackedCache, Source, uncached
from specserve.types import Ids

PRIORITY = 5  # before the reference; the kernels for CPUs are looked at first, as these take a second to import
DEVICES = ("cuda",)

_LEAST_CAPABILITY = 8  # Triton's own


@dataclass(frozen=True, slots=True)
class _Head:
    """An LM head [vocab, hidden], whose products are not rounded."""

    weight: Any


class Kernels(_bank.Adapters, DevicePeerOps, _reference.Kernels):
    """The op contract on a GPU. `dtype` is the dtype of weights that are no integers, of the KV cache and of linear
    inputs and outputs; where weights are integers, linear layers read integers."""

    name = "triton"
    row_multiple = 1
    records = True
    buckets: Sequence[int] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)

    @classmethod
    def supports(cls, asked: KernelOptions) -> str | None:
        if asked.device.type != "cuda":
            return "serves GPUs alone: use --device cuda."
        if asked.dtype == "float16":
            return "has no float16: use --dtype bfloat16 or float32."
        major, minor = torch.cuda.get_device_capability(asked.device)
        if major < _LEAST_CAPABILITY:
            return f"serves GPUs of compute capability {_LEAST_CAPABILITY}.0 or more, and this one has {major}.{minor}."
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            return (
                "needs a C compiler, with which Triton builds what launches its kernels: gcc or clang, or CC names one."
            )
        if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
            return "needs Python's headers, as Triton compiles against them: install python3-dev."
        return super().supports(asked)

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self.device)

    def record(
        self,
        function: Callable[..., T],
        inputs: Sequence[Input],
        num_rows: int,
        num_gathered: int,
        plan: Plan | None,
    ) -> GraphRecording[T]:
        block_size, has_flash = 1 if plan is None else plan.block_size, self._flash_attention is not None
        return GraphRecording(self._staging, function, inputs, num_rows, num_gathered, block_size, has_flash)

    def plan(self, rows: AttentionRows, block_size: int) -> Plan:
        """Triton launches on the current device, which every thread has of its own: the one that steps asks for a plan
        first."""
        torch.cuda.set_device(self.device)
        self._pulse.beat()
        return Plan(rows, block_size)

    def broken_rows(self, plan: Plan) -> list[int]:
        return plan.broken_rows()

    def pack_head(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> _Head:
        return _Head(super().pack_head(weight, bias))

    def packed_groups(self, form: str, weight: Source, bias: Source | None) -> Any:
        return _groups.pack(form, weight, bias, self.device)

    @property
    def _is_quantized(self) -> bool:
        return self.quantization != "none"

    def quantize_activation(self, x: Tensor) -> Any:
        x = x.contiguous()
        return _integers.quantize(x) if self._is_quantized else x.to(self.dtype)

    def joined_norms(self, parts: Sequence[tuple[Tensor, Tensor | None]], eps: float) -> Any:
        return self.quantize_activation(super().joined_norms(parts, eps))

    def pack_experts(
        self, gates: Sequence[Source], ups: Sequence[Source], downs: Sequence[Source], cached: PackedCache = uncached
    ) -> Any:
        packed = (self.pack_gated(gate, up, None, None) for gate, up in zip(gates, ups, strict=True))
        gate_up, down = list(packed), [self.pack(each) for each in downs]
        if self._is_quantized:
            return _groups.IntegerExperts(_groups.stacked(gate_up), _groups.stacked(down))
        return _groups.Experts(*(torch.stack([each.matrix for each in some]) for some in (gate_up, down)))

    def experts(self, x: Any, weights: Any, routing: Any, activation: str, shared: Tensor | None) -> Tensor:
        if shared is not None:
            shared = shared.float() if routing.share is None else shared.float() * routing.share
        run = _integer_experts.experts if self._is_quantized else _experts.experts
        found: Tensor = run(x, weights, routing.experts, routing.weights, activation, shared)
        return found

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor,
        scale: float,
        placed: Placed | None = None,
        norm: Any = None,
        eps: float = 0.0,
    ) -> Tensor:
        embedded = _rows.embed(token_ids, table, scale)
        if placed is not None:
            embedded += placed.table[placed.positions]
        return embedded if norm is None else _norm(embedded, norm, eps)

    def fused_add_norm(
        self, residual: Tensor, delta: Tensor | None, post: Tensor | None, weight: Any, eps: float
    ) -> Any:
        if weight is None:
            return self.quantize_activation(self._added(residual, delta, post, eps))
        if isinstance(weight, _LayerNorm):
            return self.quantize_activation(_norm(self._added(residual, delta, post, eps), weight, eps))
        if self._is_quantized:
            return _rows.add_rms_norm_quantized(residual, delta, post, weight, eps)
        return _rows.add_rms_norm(residual, delta, post, weight, eps, self.dtype)

    def norm_projections(self, qkv: Tensor, norms: HeadNorms, sizes: tuple[int, int]) -> Tensor:
        *parts, v = qkv.tensor_split((sizes[0], sum(sizes)), -1)
        weights = zip(parts, (norms.q, norms.k), strict=True)
        normed = [_rows.add_rms_norm(x.float().contiguous(), None, None, w, norms.eps, self.dtype) for x, w in weights]
        return torch.cat((*normed, v), -1)

    def gather_rows(self, rows: Tensor, residual: Tensor, delta: Tensor, post: Tensor | None, eps: float) -> Tensor:
        return self._added(residual[rows], delta[rows], post, eps)

    def tap(self, layer: int, residual: Tensor, delta: Tensor | None, post: Tensor | None, eps: float) -> Tensor:
        return self._added(residual.clone(), delta, post, eps)

    def _added(self, residual: Tensor, delta: Tensor | None, post: Tensor | None, eps: float) -> Tensor:
        """residual += delta, as `fused_add_norm` adds, in place."""
        if delta is None:
            return residual
        if post is None:
            return residual.add_(delta)
        _rows.add_rms_norm(residual, delta, post, post, eps, self.dtype)  # for what it adds: its norm is nobody's
        return residual

    def norm(self, x: Tensor, weight: Any, eps: float) -> Tensor:
        if isinstance(weight, _LayerNorm):
            return super().norm(x, weight, eps)
        return _rows.add_rms_norm(x, None, None, weight, eps, self.row_dtype).float()

    def linear(self, x: Any, weight: Any, adapters: RowAdapters | None = None) -> Tensor:
        own = None if adapters is None else _adapters.shrink(x, *adapters)
        dtype = self.dtype
        if isinstance(weight, _Head):
            weight, dtype = weight.weight, torch.float32
        if isinstance(weight, _groups.Integers):
            return _integers.linear(x, weight, dtype, own)
        return _linear.linear(x, weight.matrix, weight.bias, dtype, own)

    def gated(self, x: Any, weight: Any, activation: str, adapters: RowAdapters | None = None) -> Any:
        own = None if adapters is None else _adapters.shrink(x, *adapters)
        if self._is_quantized:
            return _integers.gated(x, weight, activation, own)
        return _linear.gated(x, weight.matrix, weight.bias, activation, own)

    def activated(self, x: Any, weight: Any, activation: str, adapters: RowAdapters | None = None) -> Any:
        if not self._is_quantized:
            return super().activated(x, weight, activation, adapters)
        own = None if adapters is None else _adapters.shrink(x, *adapters)
        return _integers.activated(x, weight, activation, own)

    def embed_adapters(self, residual: Tensor, token_ids: Tensor, adapters: RowAdapters, scale: float) -> None:
        _adapters.embed(residual, token_ids, *adapters, scale)

    def argmax(self, logits: Tensor) -> Tensor:
        return _rows.argmax(logits)

    def verify(
        self, scores: Tensor, best: Tensor, drafts: DraftArrays, hashed: Tensor, masks: Ids | None, verification: str
    ) -> Verified:
        verified: Verified = _verify.verify(scores, best, drafts, hashed, masks, verification, _sampling.sample)
        return verified

    def rope_and_cache(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation, kv: Tensor, plan: Plan | PlanTensors
    ) -> Tensor:
        tensors = self._tensors(plan)
        tensors.reach(len(rotation.cos))
        head_norms = None if norms is None else _rows.Norms(norms.q, norms.k, norms.eps)
        tables = rotation.cos, rotation.sin
        where = tensors.write_slots, tensors.broken
        return _rows.rope_and_cache(qkv, head_norms, rotation.positions, *tables, kv, *where)

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        plan: Plan | PlanTensors,
        scale: float,
        window: int | None,
        slopes: Tensor | None = None,
    ) -> Any:
        return self.quantize_activation(self._attended(q, kv, plan, scale, window, slopes, self.row_dtype))

    def attention_floats(
        self, q: Tensor, kv: Tensor, plan: Plan | PlanTensors, scale: float, window: int | None
    ) -> Tensor:
        return self._attended(q, kv, plan, scale, window, None, torch.float32)

    def _attended(
        self,
        q: Tensor,
        kv: Tensor,
        plan: Plan | PlanTensors,
        scale: float,
        window: int | None,
        slopes: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        tensors = self._tensors(plan)
        if self._flash_attention is None or not tensors.is_chain or slopes is not None:
            return _attention.attention(q, kv, tensors, scale, window, slopes, dtype)
        tensors.sequences = tensors.sequences or _flash.Sequences.of(tensors)
        return self._flash_attention.attention(q, kv, tensors.sequences, tensors.block_size, scale, window).to(dtype)

    _flash_attention: _flash.Flash | None = None

    @property
    def flash(self) -> str:
        return "" if self._flash_attention is None else self._flash_attention.name

    def flash_attentions(self, block_size: int) -> dict[str, str | None]:
        found = _flash.candidates(self.dtype, block_size)
        return {name: each if isinstance(each, str) else None for name, each in found.items()}

    def use_flash(self, name: str, block_size: int) -> None:
        chosen = _flash.candidates(self.dtype, block_size)[name] if name else None
        assert not isinstance(chosen, str), "it can be used"
        self._flash_attention = chosen

    def _tensors(self, plan: Plan | PlanTensors) -> PlanTensors:
        return plan.tensors(self.device) if isinstance(plan, Plan) else plan
