"""Runs the decoder that a DecoderSpec describes on any backend of the op contract."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from specserve.models.adapted import TABLE, AdaptedModel
from specserve.models.layers import LayerStack
from specserve.models.product import Product, RowSlots
from specserve.models.reader import WeightReader
from specserve.models.sharding import Shard
from specserve.models.spec import DecoderSpec
from specserve.ops import Ops, Peers, Placed, RowAdapters
from specserve.ops.packing import PackedCache, Weight, uncached
from specserve.ops.peers import ExpertPeers

_EMBEDDED = -1  # as `tap` counts layers: what enters the first


class Decoder(AdaptedModel):
    """A native model. `weights` maps the names of spec.shapes() to tensors of those shapes, any float dtype, or to
    quantised matrices; they are copied, and only those read that `cached` does not have in their packed form. The
    number of rows given to `forward` is a multiple of ops.row_multiple.

    With `peers` it is one process's part of a model: `spec` and `weights` are what sharding.py leaves it of the layers,
    all run `forward` on the same rows, and get the same. Whatever else it is asked, it computes alone. With `layers` it
    has no others than these first ones: `run_first` and `scores` are what comes before and after those of other
    processes. With `expert_peers` it has its part of the experts, and `forward` waits for these, whose rows its experts
    compute, too."""

    features_width = 0  # it reads tokens alone

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Weight],
        ops: Ops,
        cached: PackedCache = uncached,
        peers: Peers | None = None,
        layers: range | None = None,
        expert_peers: ExpertPeers | None = None,
    ) -> None:
        read = WeightReader(spec.shapes(), weights, ops, cached, peers, expert_peers)
        self._embedding = ops.pack_table(*read.named(TABLE))
        # Rounded as transformers rounds it: Gemma was trained with the scale in the compute dtype.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=ops.dtype))
        self._positions = None if spec.positions is None else ops.pack_table(*read.named("model.embed_positions"))
        self._offset = 0 if spec.positions is None else spec.positions.offset
        self._embedding_norm = None
        if (norm := spec.embedding_norm) is not None:
            self._embedding_norm = read.norm("model.embed_norm", norm)
        head = TABLE if spec.tied_embeddings else "lm_head"
        make_head = partial(read.head, head, 1 / spec.logit_divisor, spec.normed_head)
        self._peers, self._make_head = peers, make_head
        if peers is None:
            self._head = make_head()
        else:
            parts = [Shard(rank, peers.count).features(spec.vocab_size) for rank in range(peers.count)]
            self._widths = [len(part) for part in parts]
            self._head = make_head(rows=parts[peers.rank])
        self._stack = LayerStack(read, spec, "model.", layers)
        self.layers = self._stack.numbers
        self._norm = read.norm(spec.final_norm_name, spec.final_norm)
        self._project_in = self._project_out = None
        if spec.embedding_size is not None:
            self._project_in, self._project_out = (read.linear(f"model.project_{each}") for each in ("in", "out"))
        is_adapted = spec.embedding_norm is None and spec.embedding_size is None
        # Products of now, and not the whole head, if it comes to be.
        super().__init__(spec, ops, read.products, self._embedding if is_adapted else None)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
        slots: RowSlots | None = None,
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
        own, gathered = (None, None) if slots is None else slots
        embedded = self._placed(token_ids, positions, own)
        residual, tapped = self._stack.run(ops, embedded, positions, rows, kv, plan, taps, slots=own)
        return *self.scores(residual, gathered), tapped

    def run_first(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...],
        slots: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """The layers that it has: what `forward` returns of `taps`."""
        embedded = self._placed(token_ids, positions, slots)
        return self._stack.run_through(self.ops, embedded, positions, kv, plan, taps, slots=slots)[1]

    def scores(self, residual: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows of the residual stream after the last layer, float32 [n, hidden], what `forward` returns of rows that
        are asked for."""
        hidden = self.final_norm(residual)
        logits = self._scores(self._head, hidden, slots)
        return hidden, logits, self.ops.argmax(logits)

    def _placed(self, token_ids: Tensor, positions: Tensor, slots: Tensor | None) -> Tensor:
        """What enters the first layer, float32 [rows, hidden]."""
        if self._project_in is not None:
            projected = self.embed(token_ids, slots)
            if self._positions is not None:
                self.ops.add(projected, self.ops.embed(positions, self._positions[self._offset :], 1.0))
            return projected
        table, norm = self._positions, self.spec.embedding_norm
        placed = None if table is None else Placed(positions, table[self._offset :])
        eps = 0.0 if norm is None else norm.eps
        scale = self._embedding_scale
        embedded = self.ops.embed(token_ids, self._embedding, scale, placed, self._embedding_norm, eps)
        if slots is not None and self._table_bank is not None:
            self.ops.embed_adapters(embedded, token_ids, RowAdapters(self._table_bank, slots), scale)
        return embedded

    def embed(self, token_ids: Tensor, slots: Tensor | None = None) -> Tensor:
        """The scaled embedding of int64 [n], float32 [n, hidden]."""
        embedded = self.ops.embed(token_ids, self._embedding, self._embedding_scale)
        if self._project_in is None:
            return embedded
        projected = self._project_in.linear(self.ops, self.ops.quantize_activation(embedded), slots).float()
        return self.ops.tap(_EMBEDDED, projected, None, None, 0.0)  # a copy that no other product overwrites

    def head(self, residual: Tensor) -> Tensor:
        """The final norm and the LM head over the residual stream float32 [n, hidden] behind the last layer, float32
        [n, vocab]."""
        return self.lm_head(self.final_norm(residual))

    def final_norm(self, residual: Tensor) -> Tensor:
        """What the LM head reads of the residual stream behind the last layer, float32 [n, hidden] both."""
        return self.ops.norm(residual, self._norm, self.spec.final_norm.eps)

    def lm_head(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """The scores of hidden states behind the final norm, float32 [n, hidden] -> [n, vocab]."""
        return self._scores(self._whole_head, hidden, slots)

    @cached_property
    def _whole_head(self) -> Product:
        """That a draft head shares, packed when it first does where there are other processes."""
        return self._head if self._peers is None else self._make_head()

    def _scores(self, head: Product, hidden: Tensor, slots: Tensor | None) -> Tensor:
        if self._project_out is not None:
            hidden = self._project_out.linear(self.ops, self.ops.quantize_activation(hidden), slots).float()
        logits = head.linear(self.ops, self.ops.quantize_activation(hidden), slots).float()
        if self._peers is not None and head is self._head:
            logits = self.ops.gather_peers(logits, self._widths, self._peers)
        cap = self.spec.logit_softcap
        return logits if cap is None else self.ops.softcap(logits, cap)
