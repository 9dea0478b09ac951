"""Runs EAGLE heads (EagleSpec) on the op contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specserve.models.heads.draws import HeadDraws
from specserve.models.heads.spec import EagleSpec
from specserve.models.layers import LayerStack
from specserve.models.loader import AnyModel
from specserve.models.product import RowSlots
from specserve.models.reader import WeightReader
from specserve.ops import Input, Ops
from specserve.ops.capture import Captured


class EagleHead:
    """A head for `target`, with the tensors of spec.shapes(). Row i of a pass reads token i + 1 and, as its features,
    the hidden state i, [spec.hidden_size]: what `states` makes of the target's, or what the pass before returned in its
    place. `ids` are those that its logits are of, int64 [draft vocabulary], ascending; None: all of the target's."""

    num_adapter_slots = 0  # it takes none

    def __init__(
        self, head: EagleSpec, weights: Mapping[str, Tensor], d2t: Tensor | None, ops: Ops, target: AnyModel
    ) -> None:
        self.head, self.spec, self.ops, self._target = head, head.layers, ops, target
        self.ids = None if d2t is None else (torch.arange(len(d2t)) + d2t.cpu()).to(ops.device)
        self.features_width = self.spec.hidden_size
        read, norm = WeightReader(head.shapes(), weights, ops), self.spec.final_norm
        self._stack = LayerStack(read, self.spec, "")
        self._fc = read.linear("fc")
        width, parts = head.target.hidden_size, len(head.hidden_layers) or 1
        widths = [width * parts] if head.norm_before_fc else [width] * parts
        self._states = Captured(ops, self._make_states, [Input(torch.float32, each) for each in widths])
        self._embedding = ops.pack_table(read.named("embed_tokens")[0]) if head.has_embedding else None
        self._lm_head = ops.pack_head(read.named("lm_head")[0]) if head.has_head else None
        self._hidden_norm = read.norm("layers.0.hidden_norm" if head.version == 3 else "hidden_norm", norm)
        self._embed_norm = read.norm("embed_norm", norm)
        self._norm = read.norm("norm", norm)
        self._input_norm = read.norm("input_norm", norm)
        self._fc_norms = [read.norm(f"fc_norm.{i}", norm) for i in range(len(head.hidden_layers))]

    @torch.inference_mode()
    def states(self, hidden: list[Tensor]) -> Tensor:
        """The head's hidden states of rows, float32 [rows, hidden], from what it reads of the target, float32 [rows,
        target's hidden] each: the outputs of the layers that it names, or for version 1 what is behind the final norm,
        as it is. Valid until the next call."""
        if self.head.version == 1:
            return hidden[0]
        rows = len(hidden[0])
        return self._states(hidden if self._input_norm is None else [torch.cat(hidden, -1)], rows)[:rows]

    def _make_states(self, plan: None, *parts: Tensor) -> Tensor:
        norms = self._fc_norms if self._input_norm is None else [self._input_norm]
        x = self.ops.joined_norms(list(zip(parts, norms, strict=True)), self.spec.final_norm.eps)
        return self._fc.linear(self.ops, x).float()

    def draws(self, hashed: Tensor) -> HeadDraws:
        """What draws the first tokens of its drafts; `hashed` are its ids as noise.hash_tokens has them."""
        return HeadDraws(lambda tokens: None, self.ids, hashed, self.ops)

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
        """As Decoder.forward, over `features` float32 [rows, hidden], which are overwritten. In place of the hidden
        states behind the final norm it returns those that the next pass reads."""
        assert features is not None and not taps, "a head reads hidden states, and nobody reads those of its layers"
        ops = self.ops
        residual, x = self._entered(self._embedded(token_ids), features)
        hidden, _ = self._stack.run(ops, residual, positions, rows, kv, plan, x=x)
        normed = hidden if self._norm is None else ops.norm(hidden, self._norm, self.spec.final_norm.eps)
        if self._lm_head is None:
            logits = self._target.lm_head(normed)
        else:
            logits = ops.linear(ops.quantize_activation(normed), self._lm_head).float()
        return normed if self.head.norm_output else hidden, logits, ops.argmax(logits), ()

    def _entered(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Any]:
        """The residual stream that enters the first layer, and what its attention reads."""
        ops, eps, first = self.ops, self.spec.final_norm.eps, self._stack.layers[0]
        if self.head.version == 3:
            x = ops.joined_norms([(embedded, first.norm), (features, self._hidden_norm)], eps)
            if self.head.norm_before_residual:
                features = ops.norm(features, self._hidden_norm, eps)
            return features, x
        parts = [(embedded, self._embed_norm), (features, self._hidden_norm)]
        if self.head.fc_input_norms:
            parts.reverse()
        joined = self._fc.linear(ops, ops.joined_norms(parts, eps)).float()
        residual = ops.tap(0, joined, None, None, eps)
        if first.norm is None:
            return residual, ops.quantize_activation(residual)
        return residual, ops.fused_add_norm(residual, None, None, first.norm, eps)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self._embedding is None:
            return self._target.embed(token_ids)
        return self.ops.embed(token_ids, self._embedding, 1.0)
