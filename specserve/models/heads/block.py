"""Runs block heads (BlockSpec) on the op contract."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.heads.draws import HeadDraws
from specserve.models.heads.spec import BlockSpec
from specserve.models.layers import LayerStack
from specserve.models.loader import AnyModel
from specserve.models.product import RowSlots
from specserve.models.reader import WeightReader
from specserve.ops import Input, Ops
from specserve.ops.capture import Captured


class BlockHead:
    """A head for `target`, with the tensors of spec.shapes(). What the target has computed is written to its KV by
    `write`; a pass of `forward` is over the last token and masks behind it, with what `anchor_inputs` says of them as
    features where the head has these. `ids` are those that its logits are of, int64 [draft vocabulary], ascending;
    None: all of the target's."""

    num_adapter_slots = 0  # it takes none

    def __init__(
        self, head: BlockSpec, weights: Mapping[str, Tensor], d2t: Tensor | None, ops: Ops, target: AnyModel
    ) -> None:
        self.head, self.spec, self.ops, self._target = head, head.layers, ops, target
        self.ids = None if d2t is None else (torch.arange(len(d2t)) + d2t.cpu()).to(ops.device)
        read, norm = WeightReader(head.shapes(), weights, ops), self.spec.final_norm
        self._stack = LayerStack(read, self.spec, "")
        self._context_kv = [  # a product of their own: what is written has no queries
            read.linear(f"layers.{i}.self_attn.k_proj", f"layers.{i}.self_attn.v_proj")
            for i in range(self.spec.num_layers)
        ]
        self._fc = read.linear("fc")
        self._hidden_norm = read.norm("hidden_norm", norm)
        self._norm = read.norm("norm", norm)
        self._embedding = ops.pack_table(_with_mask(head, weights)) if head.has_embedding else None
        self._lm_head = ops.pack_head(read.named("lm_head")[0]) if head.has_head else None
        if head.has_mask_embedding and not head.has_embedding:
            raise ModelError("This head has a mask_embedding and no embed_tokens, which is not supported.")
        self._written: Captured[Tensor] | None = None
        self.features_width = 0
        if head.has_anchor_inputs:
            self.features_width = width = self.spec.hidden_size
            self._anchor_norm, self._anchor_inputs = read.norm("anchor_norm", norm), read.linear("anchor_inputs")
            self._features = Captured(ops, self._make_features, [Input(torch.int64), Input(torch.float32, width)])
        self._bigram = None
        if head.bigram_rank:
            table = ops.pack_table(read.named("bigram_in")[0])
            self._bigram = table, read.linear("bigram_out")

    def write(
        self, hidden: list[Tensor], positions: NDArray[np.int64], kv: list[Tensor], plan: Any, most_rows: int
    ) -> Tensor:
        """Keys and values of rows that the target has computed, from the outputs of the layers that the head reads,
        float32 [rows, target's hidden] each, at `positions` [rows padded to ops.row_multiple]. They are never more than
        `most_rows`, and `kv` is always the same. Returns what the head makes of the outputs, float32 [rows, hidden],
        for `anchor_inputs`; valid until the next call."""
        if self._written is None:
            width, parts = hidden[0].shape[1], len(hidden)
            inputs = [Input(torch.int64), *[Input(torch.float32, width)] * parts]
            self._written = Captured(self.ops, partial(self._write, kv), inputs, most_rows, plan=plan)
        return self._written((positions, *hidden), len(positions), plan)[: len(hidden[0])]

    def _write(self, kv: list[Tensor], plan: Any, positions: Tensor, *hidden: Tensor) -> Tensor:
        ops, eps = self.ops, self.spec.final_norm.eps
        made = self._fc.linear(ops, ops.joined_norms([(part, None) for part in hidden], eps)).float()
        states = ops.tap(0, made, None, None, eps)  # which no other product overwrites
        x = ops.joined_norms([(states, self._hidden_norm)], eps)
        each = zip(self._stack.layers, self._stack.rotations(positions), self._context_kv, kv, strict=True)
        for layer, rotation, product, layer_kv in each:
            ops.rope_and_cache(product.linear(ops, x), layer.attention.head_norms, rotation, layer_kv, plan)
        return states

    @torch.inference_mode()
    def anchor_inputs(self, tokens: NDArray[np.int64], states: Tensor) -> Tensor:
        """The features of whole blocks, float32 [blocks, block_size, hidden]: `tokens` int64 [blocks] are their first
        ones, and `states` float32 [blocks, hidden] what `write` returned for those before. Valid until the next
        call."""
        found = self._features((tokens, states), len(tokens))[: len(tokens)]
        return found.view(len(tokens), self.head.block_size, -1)

    def _make_features(self, plan: None, tokens: Tensor, states: Tensor) -> Tensor:
        parts = [(states, self._hidden_norm), (self._embedded(tokens), self._anchor_norm)]
        x = self.ops.joined_norms(parts, self.spec.final_norm.eps)
        return self._anchor_inputs.linear(self.ops, x).float()

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
        """As Decoder.forward."""
        ops, entered = self.ops, self._embedded(token_ids)
        if features is not None:
            ops.add(entered, features)
        residual, _ = self._stack.run(ops, entered, positions, rows, kv, plan)
        hidden = ops.norm(residual, self._norm, self.spec.final_norm.eps)
        if self._lm_head is None:
            logits = self._target.lm_head(hidden)
        else:
            logits = ops.linear(ops.quantize_activation(hidden), self._lm_head).float()
        return hidden, logits, ops.argmax(logits), ()

    @torch.inference_mode()
    def bias(self, tokens: Tensor) -> Tensor | None:
        """What each of these tokens, int64 [a multiple of ops.row_multiple], adds to the logits of the one behind it,
        float32 [tokens, draft vocabulary]; None where the head has no such bias."""
        if self._bigram is None:
            return None
        ops, (table, out) = self.ops, self._bigram
        return out.linear(ops, ops.quantize_activation(ops.embed(tokens, table, 1.0))).float()

    def draws(self, hashed: Tensor) -> HeadDraws:
        """What draws its drafts; `hashed` are its ids as noise.hash_tokens has them."""
        return HeadDraws(self.bias, self.ids, hashed, self.ops)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self._embedding is None:
            return self._target.embed(token_ids)
        return self.ops.embed(token_ids, self._embedding, 1.0)


def _with_mask(head: BlockSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """The head's own embedding, where masks have theirs."""
    table = weights["embed_tokens.weight"]
    if head.has_mask_embedding:
        table = table.clone()
        table[head.mask_token_id] = weights["mask_embedding"]
    return table
