"""Native kernels for CPUs: weights in float32, bfloat16, int8 or int4, and whole steps recorded and replayed without
Python. The arithmetic is in kernels/cpu/, built as specserve.kernels._native.

Every kernel sums in an order that the row alone fixes, so no padding of rows is needed: row_multiple is 1. Float rows
are padded to a multiple of 32 columns with zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specserve.kernels._cpu_sampling as _sampling
import specserve.kernels._native as _native
from specserve.kernels._cpu_adapters import Adapters
from specserve.kernels._cpu_base import ACTIVATIONS, Activation, instruction_sets
from specserve.kernels._cpu_cache import (
    filled as _filled,
    layout_of,
    numbers_of,
    read_slots,
    write_slots,
    zeros as _zeros,
)
from specserve.kernels._cpu_experts import Experts
from specserve.kernels._cpu_peers import PeerKernels
from specserve.kernels._cpu_rows import TILE, LayerNorm, Norm, alternating, at, norm_at, pad, padded
from specserve.kernels._cpu_weights import FLOAT32, INT8, PackedWeight, pack_tiles
from specserve.ops import (
    MOST_TOP_K,
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
from specserve.ops.packing import Lazy, PackedCache, Quantized, Source, below, by_rows, loaded, uncached
from specserve.types import Ids

PRIORITY = 10
DEVICES = ("cpu",)
_BANDWIDTH_BYTES, _BANDWIDTH_PASSES = 2**28, 7  # no cache holds so much
_MIN_ROWS_TOGETHER = 3  # attention of fewer rows costs little more than reading their context


class Kernels(Adapters, Experts, NoFlash, PeerKernels):
    """The op contract on a CPU. `dtype` is that of the embeddings, and of weights and KV cache that have no other."""

    row_multiple = 1
    has_own_threads = records = True
    buckets = ()
    device = torch.device("cpu")

    @classmethod
    def supports(cls, asked: KernelOptions) -> str | None:
        return None if asked.device.type == "cpu" else "serves CPUs alone: use --device cpu."

    @classmethod
    def create(cls, asked: KernelOptions) -> Kernels:
        dtype, isa = asked.on_cpu(instruction_sets(), cls.name)
        kv = torch.float16 if asked.dtype == "auto" and isa in ("avx_vnni", "avx2") else dtype  # widened when read
        automatic = "int8" if asked.dtype == "auto" else "none"
        return cls(dtype, automatic if asked.quantization == "auto" else asked.quantization, asked.threads, isa, kv)

    # Weights

    @property
    def layout(self) -> str:
        """Ends with a digest of a few numbers, packed: it changes with any code that packs, as no version number would
        by itself. Half of them lie on a grid, which int4 keeps."""
        numbers = (torch.arange(45 * 70) * 7919 % 2003 / 1001.5 - 1).view(45, 70)
        grid, vector = (numbers * 8).round() / 8, numbers[:, 0]
        gated = self.pack_gated(numbers, grid, vector, vector)
        integers = Quantized((grid * 7).to(torch.int8)[:, :64], vector[:, None].abs(), None, 64)
        weights = self.pack(numbers, vector), self.pack(grid), gated, self.pack_head(numbers), self.pack(integers)
        parts = [part for weight in weights for part in (weight.memory, weight.bias) if part is not None]
        experts = self.pack_experts([numbers, grid], [grid, numbers], [numbers.T, grid.T]).memory
        parts += [*experts, self.pack_router(numbers).memory]
        digest = hashlib.sha256()
        for part in (*parts, self.pack_vector(vector), self.pack_table(numbers)):
            digest.update(part.view(torch.uint8).numpy().data)
        return f"{self.name}-{self.quantization}-{str(self.dtype).removeprefix('torch.')}-{digest.hexdigest()[:16]}"

    def pack(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> PackedWeight:
        """int8 and int4 keep a quantised weight's integers where they fit, and round the numbers of all others."""
        return self._pack("linear", self._format, weight, bias, cached)

    def pack_head(self, weight: Source, bias: Source | None = None, cached: PackedCache = uncached) -> PackedWeight:
        return self._pack("head", min(self._format, INT8), weight, bias, cached)

    def _pack(self, kind: str, form: int, weight: Source, bias: Source | None, cached: PackedCache) -> PackedWeight:
        outputs, inputs = weight.shape
        shape = (pad(outputs) // TILE * _native.tile_bytes(form, inputs),)

        def packed() -> Tensor:
            tiles: Tensor = _zeros(shape, torch.uint8)
            pack_tiles(form, loaded(weight), tiles)
            return tiles

        memory = cached(kind, shape, torch.uint8, packed)
        native = _native.weight(form, outputs, inputs, memory.data_ptr())
        padded_bias = None if bias is None else self.pack_vector(bias, below(cached, f"{kind}.bias"))
        return PackedWeight(native, memory, padded_bias, outputs)

    def pack_gated(
        self, gate: Source, up: Source, gate_bias: Source | None, up_bias: Source | None, cached: PackedCache = uncached
    ) -> PackedWeight:
        assert (gate_bias is None) == (up_bias is None), "both have a bias or neither"
        n, inputs = gate.shape
        weight = Lazy((2 * pad(n), inputs), lambda: by_rows((loaded(gate), loaded(up)), alternating))
        bias = None
        if gate_bias is not None and up_bias is not None:
            biases = gate_bias, up_bias
            bias = Lazy((2 * pad(n),), lambda: alternating([values[:][:, None] for values in biases])[:, 0])
        return replace(self._pack("gated", self._format, weight, bias, cached), outputs=n)

    def pack_vector(self, values: Source, cached: PackedCache = uncached) -> Tensor:
        (n,) = values.shape
        return cached("vector", (pad(n),), torch.float32, lambda: _filled((pad(n),), torch.float32, values[:]))

    def pack_layer_norm(self, weight: Source, bias: Source | None, cached: PackedCache = uncached) -> LayerNorm:
        packed_bias = None if bias is None else self.pack_vector(bias, below(cached, "bias"))
        return LayerNorm(self.pack_vector(weight, cached), packed_bias)

    def pack_table(self, table: Source, cached: PackedCache = uncached) -> Tensor:
        shape = tuple(table.shape)
        return cached("table", shape, self.dtype, lambda: _filled(shape, self.dtype, table[:]))

    # Ops

    def embed(
        self,
        token_ids: Tensor,
        table: Tensor,
        scale: float,
        placed: Placed | None = None,
        norm: Norm | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        rows, hidden = len(token_ids), table.shape[1]
        out = self._floats("embed", rows, hidden)
        positions, learned = (0, 0) if placed is None else (placed.positions.data_ptr(), placed.table.data_ptr())
        with self._program(rows, token_ids, table, placed, norm) as program:
            program.embed(
                token_ids.data_ptr(), table.data_ptr(), table.dtype == torch.bfloat16, hidden, scale,
                positions, learned, norm_at(norm), eps, out.data_ptr(),
            )  # fmt: skip
        return out[:, :hidden]

    def fused_add_norm(
        self, residual: Tensor, delta: Tensor | None, post: Tensor | None, weight: Norm, eps: float
    ) -> Activation:
        rows, hidden = residual.shape
        out = self._activation("fused_add_norm", rows, hidden, self._kind)
        with self._program(rows, residual, delta, post, weight) as program:
            program.fused_add_norm(at(residual), at(delta), at(post), norm_at(weight), eps, hidden, out.native)
        return out

    def add(self, residual: Tensor, delta: Tensor) -> None:
        rows, hidden = residual.shape
        each = torch.arange(rows)
        with self._program(rows, each, residual, delta) as program:
            program.tap(at(each), at(residual), at(delta), 0, 0.0, hidden, at(residual))

    def gather_rows(self, rows: Tensor, residual: Tensor, delta: Tensor, post: Tensor | None, eps: float) -> Tensor:
        hidden = residual.shape[1]
        out = self._floats("gather_rows", len(rows), hidden)
        with self._program(0, rows, residual, delta, post, gathered=len(rows)) as program:
            program.gather_rows(at(rows), at(residual), at(delta), at(post), eps, hidden, at(out))
        return out[:, :hidden]

    def tap(self, layer: int, residual: Tensor, delta: Tensor | None, post: Tensor | None, eps: float) -> Tensor:
        rows, hidden = residual.shape
        out, each = self._floats(f"tap {layer}", rows, hidden), torch.arange(rows)
        with self._program(rows, each, residual, delta, post) as program:
            program.tap(at(each), at(residual), at(delta), at(post), eps, hidden, at(out))
        return out[:, :hidden]

    def norm(self, x: Tensor, weight: Norm, eps: float) -> Tensor:
        rows, hidden = x.shape
        out = self._activation("norm", rows, hidden, FLOAT32)
        x = padded(x)
        with self._program(rows, x, weight) as program:
            program.fused_add_norm(x.data_ptr(), 0, 0, norm_at(weight), eps, hidden, out.native)
        return out.parts[0][:, :hidden]

    def joined_norms(self, parts: Sequence[tuple[Tensor, Tensor | None]], eps: float) -> Activation:
        widths, xs = [x.shape[1] for x, _ in parts], [padded(x) for x, _ in parts]
        out = self._activation("joined_norms", len(xs[0]), sum(widths), self._kind)
        given = [(x.data_ptr(), at(w), n) for x, (_, w), n in zip(xs, parts, widths, strict=True)]
        with self._program(len(xs[0]), xs, parts) as program:
            program.joined_norms(given, eps, out.native)
        return out

    def quantize_activation(self, x: Tensor) -> Activation:
        return self._activated(padded(x), x.shape[1])

    def _activated(self, x: Tensor, width: int) -> Activation:
        out = self._activation("quantize_activation", len(x), width, self._kind)
        with self._program(len(x), x) as program:
            program.quantize_activation(x.data_ptr(), out.native)
        return out

    def linear(self, x: Activation, weight: PackedWeight, adapters: RowAdapters | None = None) -> Tensor:
        out = self._floats("linear", x.rows, weight.outputs)
        with self._program(x.rows, x, weight, adapters) as program:
            own = self._shrunk(program, x, adapters)
            program.linear(weight.native, x.native, at(weight.bias), out.data_ptr(), own.native)
        return out[:, : weight.outputs]

    def gated(
        self, x: Activation, weight: PackedWeight, activation: str, adapters: RowAdapters | None = None
    ) -> Activation:
        out = self._activation("gated", x.rows, weight.outputs, self._kind)
        with self._program(x.rows, x, weight, adapters) as program:
            own = self._shrunk(program, x, adapters)
            program.gated(
                weight.native, x.native, at(weight.bias), ACTIVATIONS[activation], True, out.native, own.native
            )
        return out

    def activated(
        self, x: Activation, weight: PackedWeight, activation: str, adapters: RowAdapters | None = None
    ) -> Activation:
        out = self._activation("activated", x.rows, weight.outputs, self._kind)
        with self._program(x.rows, x, weight, adapters) as program:
            own = self._shrunk(program, x, adapters)
            program.gated(
                weight.native, x.native, at(weight.bias), ACTIVATIONS[activation], False, out.native, own.native
            )
        return out

    def softcap(self, logits: Tensor, cap: float) -> Tensor:
        with self._program(len(logits), logits) as program:
            program.softcap(at(logits), logits.shape[1], cap)
        return logits

    def argmax(self, logits: Tensor) -> Tensor:
        best = self._buffer("argmax", len(logits), 1, torch.int64)
        with self._program(len(logits), logits) as program:
            program.argmax(at(logits), logits.shape[1], best.data_ptr())
        return best[:, 0]

    def top_k(self, logits: Tensor, best: Tensor, k: int) -> Tensor:
        assert k <= min(MOST_TOP_K, logits.shape[1])
        tokens = self._buffer("top_k", len(logits), k, torch.int32)
        with self._program(len(logits), logits, best) as program:
            program.top_k(at(logits), logits.shape[1], k, at(best), tokens.data_ptr())
        return tokens

    def draw(
        self, depth: int, logits: Tensor, bias: Tensor | None, how: DrawArrays, ids: Tensor | None, hashed: Tensor
    ) -> Drawn:
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and hashed.is_contiguous()
        rows, n = len(how.rows), logits.shape[1]
        names = (f"draw {depth}", f"draw {depth}, second")
        tokens, second = (self._buffer(name, rows, 1, torch.int64) for name in names)
        share, second_share = (self._buffer(name, rows, 1, torch.float32) for name in names)
        with self._program(rows, logits, bias, how, ids, hashed) as program:
            program.draw(
                logits.data_ptr(), logits.stride(0), at(how.rows), at(bias), n, at(ids), at(hashed),
                at(how.temperature), at(how.keys), *(each.data_ptr() for each in (tokens, second, share, second_share)),
            )  # fmt: skip
        return Drawn(tokens[:, 0], share[:, 0], second[:, 0], second_share[:, 0])

    def verify(
        self, scores: Tensor, best: Tensor, drafts: DraftArrays, hashed: Tensor, masks: Ids | None, verification: str
    ) -> Verified:
        verified: Verified = _sampling.verify(self._verifier, scores, best, drafts, hashed, masks, verification)
        return verified

    def score(self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int) -> RowScores:
        scores: RowScores = _sampling.score(self._verifier, logits, rows, tokens, k)
        return scores

    def norm_projections(self, qkv: Tensor, norms: HeadNorms, sizes: tuple[int, int]) -> Tensor:
        with self._program(len(qkv), qkv, norms) as program:
            program.norm_projections(at(qkv), qkv.stride(0), *sizes, at(norms.q), at(norms.k), norms.eps)
        return qkv

    def rope_and_cache(
        self, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation, kv: Tensor, plan: _native.Plan | None
    ) -> Tensor:
        kv_heads, d = kv.shape[2:]
        heads = qkv.shape[1] // d - 2 * kv_heads
        q = self._floats("rope_and_cache", len(qkv), heads * d)
        q_norm, k_norm, eps = (0, 0, 0.0) if norms is None else (norms.q.data_ptr(), norms.k.data_ptr(), norms.eps)
        positions, cos, sin = rotation.positions.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr()
        with self._program(len(qkv), qkv, norms, rotation, kv, plan=plan) as program:
            program.rope_and_cache(
                at(qkv), heads, kv_heads, d, q_norm, k_norm, eps, positions, cos, sin, q.data_ptr(), *self._cache(kv),
            )  # fmt: skip
        return q[:, : heads * d]

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        plan: _native.Plan | None,
        scale: float,
        window: int | None,
        slopes: Tensor | None = None,
    ) -> Activation:
        width = q.shape[1]
        is_split = width // kv.shape[2] % TILE != 0  # two kv heads would write one group
        out = self._attended(FLOAT32 if is_split else self._kind, q, kv, plan, scale, window, slopes)
        return self._activated(out.parts[0], width) if is_split and self._kind != FLOAT32 else out

    def attention_floats(
        self, q: Tensor, kv: Tensor, plan: _native.Plan | None, scale: float, window: int | None
    ) -> Tensor:
        return self._attended(FLOAT32, q, kv, plan, scale, window, None).parts[0][:, : q.shape[1]]

    def _attended(
        self,
        kind: int,
        q: Tensor,
        kv: Tensor,
        plan: _native.Plan | None,
        scale: float,
        window: int | None,
        slopes: Tensor | None,
    ) -> Activation:
        kv_heads, d = kv.shape[2:]
        rows, width = q.shape
        out = self._activation("attention", rows, width, kind)
        sizes, cache = (width // d, kv_heads, d), self._cache(kv)
        with self._program(rows, q, kv, slopes, plan=plan) as program:
            program.attention(at(q), *sizes, *cache, scale, at(slopes), window or 0, out.native)
        return out

    def plan(self, rows: AttentionRows, block_size: int) -> _native.Plan:
        # So few rows of a sequence at once that even one kv head's work is shared by all threads.
        together = max(_MIN_ROWS_TOGETHER, len(rows.parents) // self._thread_pool.threads)
        return _native.Plan(rows.query_starts, rows.cached, rows.block_tables, rows.parents, block_size, together)

    def broken_rows(self, plan: _native.Plan) -> list[int]:
        return plan.broken_rows()

    # Memory

    def read_bandwidth(self) -> float:
        """Bytes a second at which all threads together read memory, at best."""
        memory = _zeros((_BANDWIDTH_BYTES,), torch.uint8)
        return _native.read_bandwidth(self._thread_pool, memory.data_ptr(), len(memory), _BANDWIDTH_PASSES)

    def copy_kv(self, kvs: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
        sides = zip(numbers_of(kvs[0], sources), numbers_of(kvs[0], targets), strict=True)
        for side, (own, to) in enumerate(sides):  # keys, values
            arrays = [kv.data_ptr() + side * kv.nbytes // 2 for kv in kvs]
            _native.copy_numbers(arrays, own, to, kvs[0].itemsize)

    def read_kv(self, kv: Tensor, slots: Tensor) -> Tensor:
        return read_slots(kv, slots)

    def write_kv(self, kv: Tensor, slots: Tensor, values: Tensor) -> None:
        write_slots(kv, slots, values)

    def _cache(self, kv: Tensor) -> tuple[int, bool, int, int]:
        assert kv.is_contiguous() and kv.dtype == self.kv_dtype, "the cache holds the kernels' kv_dtype"
        return *layout_of(kv), kv[0].data_ptr(), kv[1].data_ptr()
