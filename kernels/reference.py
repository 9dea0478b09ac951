"""Reference kernels in torch, for CPU and CUDA, float32 and bfloat16: every op, none optimised beyond what is simple.
Faster backends are tested against this file.

Row invariance, the promise of specserve.ops, rests on rules that were measured bit for bit on MKL and oneDNN:
- a GEMM gives each row the same bits for any multiple of 4 rows, so callers pad rows and attention its queries;
- with AMX oneDNN cuts sums of bfloat16 otherwise beyond 32 rows, so there a linear GEMM has at most `_AMX_TILE` rows;
- cuBLAS chooses its kernel by the number of rows, so on CUDA every linear GEMM has exactly `_CUDA_TILE` rows;
- attention on a CPU reduces over the context in blocks of 512 tokens; where the context is a multiple of that, what is
  masked adds exact zeros, so a row does not notice how far the padding reaches;
- torch's silu, sigmoid and gelu round differently in the last elements of a tensor, exp, tanh and erf do not;
- where oneDNN cannot multiply bfloat16 (a CPU without AVX-512), numbers are bfloat16 and products are float32's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

import specserve.kernels._torch_adapters as _adapters
import specserve.kernels._torch_cache as _cache
import specserve.kernels._torch_experts as _experts
import specserve.kernels._torch_sampling as _sampling
import specserve.kernels._torch_verify as _verify
from specserve.kernels._torch_attention import Group as _Group, attend as _attend
from specserve.kernels._torch_groups import Groups as _Groups, groups_of as _groups_of, product as _product
from specserve.kernels._torch_rows import (
    ACTIVATIONS as _ACTIVATIONS,
    LayerNorm as _LayerNorm,
    Norm as _Norm,
    norm as _norm,
)
from specserve.kernels._torch_runs import Run as _Run, runs as _runs
from specserve.machine.pulse import Pulse
from specserve.ops import (
    AttentionRows,
    DraftArrays,
    DrawArrays,
    Drawn,
    HeadNorms,
    Placed,
    Rotation,
    RowAdapters,
    RowScores,
    Verified,
)
from specserve.ops.backend import KernelOptions
from specserve.ops.flash import NoFlash
from specserve.ops.isa import choose_isa
from specserve.ops.packing import PackedCache, Source, loaded, stacked, uncached
from specserve.ops.peers import NoPeers
from specserve.types import Ids

PRIORITY = 0  # it serves where no other does

_CONTEXT_MULTIPLE = 512  # torch's own block of keys in flash attention on a CPU
_CUDA_TILE = 64
_AMX_TILE = 32
_GATED_ROWS = 64  # the intermediate results of so many rows stay in the cache
_PACKED_ROWS = 8  # the number of rows oneDNN is told to lay weights out for; others work as well


@dataclass(slots=True)
class _Plan:
    groups: list[_Group]
    order: Tensor  # int64 [rows], where each row's result lies among the groups' concatenated entries
    write_slots: Tensor  # int64 [rows without padding]: the null block, which fills up contexts, stays zero
    broken: Tensor  # bool [rows without padding]


@dataclass(frozen=True, slots=True)
class _Weight:
    matrix: Tensor  # [out, in], blocked where is_mkldnn
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Integers:
    groups: _Groups
    bias: Tensor | None  # float32


def instruction_sets() -> list[str]:
    """What torch's own code for CPUs runs with; the environment variable ATEN_CPU_CAPABILITY lowers it."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return [capability if capability in ("avx512", "avx2") else "portable"]


class Kernels(_adapters.Adapters, _experts.Experts, _cache.Cache, NoFlash, NoPeers):
    """The op contract in torch. `dtype` is the dtype of weights and of linear inputs and outputs, `row_dtype`; where
    weights are integers these are float32, and a linear layer rounds what it reads to integers, too."""

    name = "reference"
    row_multiple = 4
    has_own_threads = False
    records = False
    buckets: Sequence[int] = ()
    layout = None

    @classmethod
    def supports(cls, asked: KernelOptions) -> str | None:
        if asked.quantization in ("auto", "none") or asked.device.type != "cpu":
            return None
        return f"has no {asked.quantization} weights: use --quantization none."

    @classmethod
    def create(cls, asked: KernelOptions) -> Kernels:
        if asked.device.type == "cpu":
            return cls(asked.device, *asked.on_cpu(instruction_sets(), cls.name))
        torch.cuda.set_device(asked.device)  # of this thread
        automatic = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
        dtype = automatic if asked.dtype == "auto" else getattr(torch, asked.dtype)
        return cls(asked.device, dtype, asked.isa, "none" if asked.quantization == "auto" else asked.quantization)

    def __init__(self, device: torch.device, dtype: torch.dtype, isa: str = "auto", quantization: str = "none") -> None:
        self.device, self.quantization = device, quantization
        self.dtype = self.kv_dtype = dtype
        self.row_dtype = dtype if quantization == "none" else torch.float32
        self.instruction_set = choose_isa(isa, () if device.type == "cuda" else instruction_sets(), self.name)
        self.weight_dtype = dtype if device.type == "cuda" or _multiplies(dtype) else torch.float32
        on_amx = self.weight_dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
        self.tile = _CUDA_TILE if device.type == "cuda" else _AMX_TILE if on_amx else 0
        self._pulse = Pulse()

    def watch(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def pack(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> _Weight | _Integers:
        """Without `quantization` what is quantised becomes the numbers it stands for. On a CPU they lie in oneDNN's
        blocked layout: read without repacking, 8 rows cost 40 to 55 % less time."""
        if self.quantization == "none":
            return self.packed_as(weight, bias, self.dtype)
        return self.packed_groups(self.quantization, weight, bias)

    def packed_groups(self, form: str, weight: Source, bias: Source | None) -> Any:
        """As "int8" or "int4"."""
        packed = None if bias is None else self.pack_vector(bias)
        return _Integers(_groups_of(form, loaded(weight), self.device), packed)

    def packed_as(self, weight: Source, bias: Source | None, dtype: torch.dtype) -> _Weight:
        multiplied = dtype if dtype == torch.float32 else self.weight_dtype
        packed = weight[:].to(self.device, dtype).to(multiplied).contiguous()
        if self.device.type == "cpu" and torch._C._has_mkldnn:
            packed = torch.ops.mkldnn._reorder_linear_weight(packed, _PACKED_ROWS)
        return _Weight(packed, None if bias is None else bias[:].to(self.device, dtype).to(multiplied))

    def pack_head(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> Any:
        return self.pack(weight, bias) if self.quantization == "none" else self.packed_groups("int8", weight, bias)

    def pack_gated(
        self, gate: Source, up: Source, gate_bias: Source | None, up_bias: Source | None, cached: PackedCache = uncached
    ) -> Any:
        assert (gate_bias is None) == (up_bias is None), "both have a bias or neither"
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias[:], up_bias[:]))
        return self.pack(stacked((loaded(gate), loaded(up))), bias)

    def pack_vector(self, values: Source, cached: PackedCache = uncached) -> Tensor:
        return values[:].to(self.device, torch.float32)

    def pack_layer_norm(self, weight: Source, bias: Source | None, cached: PackedCache = uncached) -> _LayerNorm:
        return _LayerNorm(self.pack_vector(weight), None if bias is None else self.pack_vector(bias))

    def pack_table(self, table: Source, cached: PackedCache = uncached) -> Tensor:
        return table[:].to(self.device, self.dtype, copy=True).contiguous()

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor,
        scale: float,
        placed: Placed | None = None,
        norm: _Norm | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        embedded = table[token_ids].float().mul_(scale)
        if placed is not None:
            embedded += placed.table[placed.positions]
        return embedded if norm is None else _norm(embedded, norm, eps)

    def fused_add_norm(
        self, residual: Tensor, delta: Tensor | None, post: Tensor | None, weight: _Norm, eps: float
    ) -> Tensor:
        if delta is not None:
            residual += delta if post is None else _norm(delta, post, eps).to(self.row_dtype)
        normed: Tensor = residual if weight is None else _norm(residual, weight, eps)
        return normed.to(self.row_dtype)

    def add(self, residual: Tensor, delta: Tensor) -> None:
        residual += delta

    def norm_projections(self, qkv: Tensor, norms: HeadNorms, sizes: tuple[int, int]) -> Tensor:
        q, k, v = qkv.tensor_split((sizes[0], sum(sizes)), -1)
        parts = _norm(q, norms.q, norms.eps), _norm(k, norms.k, norms.eps)
        return torch.cat((*(part.to(qkv.dtype) for part in parts), v), -1)

    def gather_rows(self, rows: Tensor, residual: Tensor, delta: Tensor, post: Tensor | None, eps: float) -> Tensor:
        """All rows are added before some are taken: one row of a sum alone may come out otherwise."""
        return self.tap(0, residual, delta, post, eps)[rows]

    def tap(self, layer: int, residual: Tensor, delta: Tensor | None, post: Tensor | None, eps: float) -> Tensor:
        if delta is None:
            return residual.clone()
        return residual + (delta if post is None else _norm(delta, post, eps).to(self.row_dtype))

    def norm(self, x: Tensor, weight: _Norm, eps: float) -> Tensor:
        normed: Tensor = _norm(x, weight, eps)
        return normed.to(self.row_dtype).float()  # no more than the LM head will read

    def joined_norms(self, parts: Sequence[tuple[Tensor, Tensor | None]], eps: float) -> Tensor:
        return torch.cat([x if w is None else _norm(x, w, eps) for x, w in parts], -1).to(self.row_dtype)

    def input_rows(self, rows: int, columns: int) -> Tensor:
        return torch.zeros((rows, columns), device=self.device)

    def quantize_activation(self, x: Tensor) -> Tensor:
        return x.to(self.row_dtype)

    def linear(self, x: Tensor, weight: _Weight | _Integers, adapters: RowAdapters | None = None) -> Tensor:
        self._pulse.beat()
        given = x if isinstance(weight, _Integers) else x.to(self.weight_dtype)
        return self.adapted(self.product(given, weight), x, adapters).to(self.row_dtype)

    def product(self, x: Tensor, weight: _Weight | _Integers) -> Tensor:
        if isinstance(weight, _Integers):
            return _product(x, weight.groups, weight.bias)
        matrix, bias = weight.matrix, weight.bias
        if not len(x):
            return x.new_empty(0, matrix.shape[0])
        if matrix.is_mkldnn:
            parts = torch.split(x, self.tile or len(x))
            out = [torch.ops.mkldnn._linear_pointwise(part, matrix, bias, "none", [], "") for part in parts]
            return out[0] if len(out) == 1 else torch.cat(out)
        if not self.tile:
            return F.linear(x, matrix, bias)
        rows = len(x)
        x = F.pad(x, (0, 0, 0, -rows % self.tile))
        return torch.cat([F.linear(part, matrix, bias) for part in torch.split(x, self.tile)])[:rows]

    def gated(self, x: Tensor, weight: Any, activation: str, adapters: RowAdapters | None = None) -> Tensor:
        parts = []
        for part in torch.split(self.linear(x, weight, adapters), _GATED_ROWS):
            gate, up = part.float().chunk(2, -1)
            parts.append(_ACTIVATIONS[activation](gate).mul_(up).to(self.row_dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def activated(self, x: Tensor, weight: Any, activation: str, adapters: RowAdapters | None = None) -> Tensor:
        parts = torch.split(self.linear(x, weight, adapters), _GATED_ROWS)
        return torch.cat([_ACTIVATIONS[activation](part.float()).to(self.row_dtype) for part in parts])

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        return logits.div_(cap).tanh_().mul_(cap)

    def argmax(self, logits: Tensor) -> Tensor:
        if not len(logits):
            return logits.new_empty(0, dtype=torch.int64)
        top, best = logits.max(-1)  # of equals the first; a NaN is above all
        return best.masked_fill_(~top.isfinite(), -1)

    def top_k(self, logits: Tensor, best: Tensor, k: int) -> Tensor:
        tokens: Tensor = _sampling.best_ids(logits, k)
        return tokens.masked_fill_(best[:, None] < 0, -1).int()

    def draw(
        self, depth: int, logits: Tensor, bias: Tensor | None, how: DrawArrays, ids: Tensor | None, hashed: Tensor
    ) -> Drawn:
        found: Drawn = _sampling.draw(logits, bias, how, ids, hashed)
        return found

    def verify(
        self, scores: Tensor, best: Tensor, drafts: DraftArrays, hashed: Tensor, masks: Ids | None, verification: str
    ) -> Verified:
        verified: Verified = _verify.verify(scores, best, drafts, hashed, masks, verification)
        return verified

    def score(self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int) -> RowScores:
        scores: RowScores = _sampling.score(logits, rows, tokens, k)
        return scores

    def rope_and_cache(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation, kv: Tensor, plan: _Plan
    ) -> Tensor:
        kv_heads, d = kv.shape[2:]
        qkv = qkv.view(len(qkv), -1, d)
        qk = qkv[:, :-kv_heads].float()  # [rows, heads + kv_heads, d]
        if norms is not None:
            q = _norm(qk[:, :-kv_heads], norms.q, norms.eps)
            k = _norm(qk[:, -kv_heads:], norms.k, norms.eps)
            qk = torch.cat((q, k), 1).to(self.dtype).float()
        if rotation.rows is None:
            rotation.rows = rotation.cos[rotation.positions][:, None], rotation.sin[rotation.positions][:, None]
        cos, sin = rotation.rows
        qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin)
        rows = len(plan.write_slots)
        written = torch.stack((qk[:rows, -kv_heads:].to(kv.dtype), qkv[:rows, -kv_heads:].to(kv.dtype)))
        finite = written.isfinite()
        plan.broken |= ~finite.all(3).all(2).all(0)
        # Attention multiplies what a row does not see by 0, which would be NaN.
        kv.index_copy_(1, plan.write_slots, written.masked_fill_(~finite, 0))
        return qk[:, :-kv_heads]

    def record(self, *asked: Any) -> Any:
        raise NotImplementedError("torch runs op by op")

    pieces = record

    def plan(self, rows: AttentionRows, block_size: int) -> _Plan:
        runs = [run for s in range(len(rows.cached)) for run in _runs(rows, s, block_size)]
        write_slots = [0] * len(rows.parents)
        for run in runs:
            for i, own in enumerate(run.own or run.last):
                write_slots[run.first_row + i] = run.slots[own]
        broken = torch.zeros(len(write_slots), dtype=torch.bool, device=self.device)
        return _Plan(*self._grouped(runs, rows.num_rows), self._ids(write_slots), broken)

    def broken_rows(self, plan: _Plan) -> list[int]:
        return plan.broken.nonzero()[:, 0].tolist()

    def _grouped(self, runs: list[_Run], num_rows: int) -> tuple[list[_Group], Tensor]:
        """Runs of like length and context are computed together; padding costs less than a loop over sequences."""
        alike: dict[tuple[int, int], list[_Run]] = defaultdict(list)
        for run in runs:
            alike[len(run.last), (len(run.slots) // _CONTEXT_MULTIPLE).bit_length()].append(run)
        groups: list[_Group] = []
        order = [0] * num_rows
        offset = 0
        for (length, _), members in alike.items():
            groups.append(self._group(members))
            for run in members:
                order[run.first_row : run.first_row + len(run.last)] = range(offset, offset + len(run.last))
                offset += length
        return groups, self._ids(order)

    def _group(self, runs: list[_Run]) -> _Group:
        context = -(-max(len(run.slots) for run in runs) // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE
        rows = [run.first_row + i for run in runs for i in range(len(run.last))]
        slots = [slot for run in runs for slot in run.slots + [0] * (context - len(run.slots))]
        last = torch.tensor([run.last for run in runs], device=self.device)
        return _Group(self._ids(rows), self._ids(slots), last)

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def attention(
        self, q: Tensor, kv: Tensor, plan: _Plan, scale: float, window: int | None, slopes: Tensor | None = None
    ) -> Tensor:
        self._pulse.beat()
        parts = [_attend(q, kv, group, scale, window, slopes, self.weight_dtype) for group in plan.groups]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return flat.index_select(0, plan.order).to(self.row_dtype)

    def attention_floats(self, *asked: Any) -> Tensor:
        return self.attention(*asked).float()


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether torch has products of this dtype on this CPU that are oneDNN's: it refuses to lay weights out otherwise,
    and what torch does in their place differs from machine to machine."""
    is_supported = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype != torch.bfloat16 or bool(is_supported)
