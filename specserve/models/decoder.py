"""Runs the decoder that a DecoderSpec describes on any backend of the op contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specserve.models.layers import LayerStack
from specserve.models.reader import WeightReader
from specserve.models.spec import DecoderSpec
from specserve.ops import Ops, Placed
from specserve.ops.packing import PackedCache, Weight, uncached

_EMBEDDED = -1  # as `tap` counts layers: what enters the first


class Decoder:
    """A native model. `weights` maps the names of spec.shapes() to tensors of those shapes, any float dtype, or to
    quantised matrices; they are copied, and only those read that `cached` does not have in their packed form. The
    number of rows given to `forward` is a multiple of ops.row_multiple."""

    features_width = 0  # it reads tokens alone

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Weight], ops: Ops, cached: PackedCache = uncached
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.origin = ""  # how a checkpoint that is quantised has its weights, and what became of them, for people
        self.num_mapped_bytes = 0  # of the weights, where they are mapped from a file: the system counts them as free
        read = WeightReader(spec.shapes(), weights, ops, cached)
        self._embedding = ops.pack_table(*read.named("model.embed_tokens"))
        # Rounded as transformers rounds it: Gemma was trained with the scale in the compute dtype.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=ops.dtype))
        self._positions = None if spec.positions is None else ops.pack_table(*read.named("model.embed_positions"))
        self._offset = 0 if spec.positions is None else spec.positions.offset
        self._embedding_norm = None
        if (norm := spec.embedding_norm) is not None:
            self._embedding_norm = read.norm("model.embed_norm", norm)
        head = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
        self._head = read.head(head, 1 / spec.logit_divisor, spec.normed_head)
        norm = read.norm("model.norm", spec.final_norm)
        self._stack = LayerStack(read, spec, "model.")
        self._norm = self._stack.layers[-1].stream_norm if norm is None else norm
        self._project_in = self._project_out = None
        if spec.embedding_size is not None:
            self._project_in, self._project_out = (read.linear(f"model.project_{each}") for each in ("in", "out"))

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
        embedded = self._placed(token_ids, positions)
        residual, tapped = self._stack.run(ops, embedded, positions, rows, kv, plan, taps)
        hidden = ops.norm(residual, self._norm, self.spec.final_norm.eps)
        logits = self.lm_head(hidden)
        return hidden, logits, ops.argmax(logits), tapped

    def _placed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """What enters the first layer, float32 [rows, hidden]."""
        if self._project_in is not None:
            projected = self.embed(token_ids)
            if self._positions is not None:
                self.ops.add(projected, self.ops.embed(positions, self._positions[self._offset :], 1.0))
            return projected
        table, norm = self._positions, self.spec.embedding_norm
        placed = None if table is None else Placed(positions, table[self._offset :])
        eps = 0.0 if norm is None else norm.eps
        scale = self._embedding_scale
        return self.ops.embed(token_ids, self._embedding, scale, placed, self._embedding_norm, eps)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The scaled embedding of int64 [n], float32 [n, hidden]."""
        embedded = self.ops.embed(token_ids, self._embedding, self._embedding_scale)
        if self._project_in is None:
            return embedded
        projected = self.ops.linear(self.ops.quantize_activation(embedded), self._project_in).float()
        return self.ops.tap(_EMBEDDED, projected, None, None, 0.0)  # a copy that no other product overwrites

    def head(self, residual: Tensor) -> Tensor:
        """The final norm and the LM head over the residual stream float32 [n, hidden] behind the last layer, float32
        [n, vocab]."""
        return self.lm_head(self.final_norm(residual))

    def final_norm(self, residual: Tensor) -> Tensor:
        """What the LM head reads of the residual stream behind the last layer, float32 [n, hidden] both."""
        return self.ops.norm(residual, self._norm, self.spec.final_norm.eps)

    def lm_head(self, hidden: Tensor) -> Tensor:
        """The scores of hidden states behind the final norm, float32 [n, hidden] -> [n, vocab]."""
        if self._project_out is not None:
            hidden = self.ops.linear(self.ops.quantize_activation(hidden), self._project_out).float()
        logits = self.ops.linear(self.ops.quantize_activation(hidden), self._head).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)
