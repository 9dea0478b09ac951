"""The op contract: names, shapes and dtypes of everything a model may ask of a device. Knows no backend's code; a
backend is one file in kernels/ that has a class `Kernels`.

Every op is row-invariant: row i of the result depends on row i of the input alone, bit for bit, whatever the number of
rows. Callers pad rows to a multiple of `row_multiple`; that padding is what lets a library GEMM keep the promise.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from specserve.types import Ids


class AttentionRows(Protocol):
    """What a backend needs to know about the rows of one step, on the host. Slots are block * block_size + offset."""

    num_rows: int  # padded to row_multiple; rows from query_starts[-1] on are padding
    query_starts: list[int]  # [seqs + 1]; sequence s owns rows [query_starts[s], query_starts[s + 1])
    cached: list[int]  # [seqs] tokens with valid KV before this step; its row r lies at logical index cached + r
    block_tables: list[list[int]]  # [seqs] block ids; row r's KV is written at logical index cached + r
    parents: list[Ids | None]  # [seqs] None: row r sees rows <= r. Else parents[r] (-1: none in this step) is a tree:
    # row r sees the cached tokens, its ancestors and itself, and its position is that of its depth


class Ops(Protocol):
    """One device's kernels. `dtype` is the compute dtype of linear inputs and outputs (float32 or bfloat16); the
    residual stream, norms and rotary embedding are float32, and so are the sums inside products and attention."""

    name: str
    row_multiple: int
    device: torch.device
    dtype: torch.dtype

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] times packed weight [out, in]^T -> [rows, out], in `dtype`."""

    def pack(self, weight: Tensor) -> Any:
        """A weight [out, in] as `linear` wants it; called once at load."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., n], any float dtype, normalised over n in float32, times weight float32 [n] -> `dtype`."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [rows, heads, d] rotated by halves (GPT-NeoX layout) with cos, sin float32 [rows, d / 2] -> float32."""

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """gate_up [rows, 2 n] -> activation(gate) * up, [rows, n], in `dtype`; activation is "silu" or "gelu_tanh"."""

    def plan(self, rows: AttentionRows, block_size: int) -> Any:
        """Everything attention needs that does not depend on the layer; once per step."""

    def write_kv(self, kv: Tensor, k: Tensor, v: Tensor, plan: Any) -> None:
        """Store k, v [rows, kv_heads, d] in kv [2, slots, kv_heads, d] at the rows' slots, but for padding rows."""

    def attention(self, q: Tensor, kv: Tensor, plan: Any, scale: float, window: int | None) -> Tensor:
        """q float32 [rows, heads, d] over the cached KV -> [rows, heads * d] in `dtype`. Grouped heads: query head h
        reads kv head h // (heads / kv_heads). `window`: a row sees at most that many latest logical positions."""
