"""A block head with gradients: one pass over the last committed token and masks behind it (DFlash, arXiv 2602.06036),
with DSpark's bigram bias where BlockSpec has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specserve.models.heads.spec import BlockSpec
from specserve.train.batches import Batch
from specserve.train.heads import Judged, TrainedHead, frozen_head
from specserve.train.layers import DecoderLayer, RMSNorm, Rotary, attend


class BlockHead(TrainedHead):
    """`embedding` [vocab, hidden] and `head` [vocab, hidden] are the target's and do not learn, `norm` [hidden] is
    where the final norm begins."""

    spec: BlockSpec

    def __init__(self, spec: BlockSpec, ids: NDArray[np.int64], embedding: Tensor, head: Tensor, norm: Tensor) -> None:
        others = spec.has_embedding, spec.has_mask_embedding, spec.has_confidence
        assert spec.has_head and not any(others), "what is trained"
        super().__init__(ids, embedding)
        own, rows = spec.layers, spec.block_size
        self.spec, self.hidden_layers = spec, spec.hidden_layers
        # As DFlash has it: 7 for blocks of 16, 4 for blocks of 8.
        self.depth_weights = [math.exp(-2 * row / rows) for row in range(rows)]
        self.rotary = Rotary(own.layers[0], own.max_len + rows)
        self.fc = nn.Linear(len(spec.hidden_layers) * spec.target.hidden_size, own.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(own.hidden_size, own.final_norm.eps)
        self.layers = nn.ModuleList([DecoderLayer(each, own.hidden_size, self.rotary) for each in own.layers])
        self.norm = RMSNorm(own.hidden_size, own.final_norm.eps)
        self.norm.weight.data.copy_(norm)
        self.lm_head = frozen_head(head, ids)
        if spec.bigram_rank:
            self.bigram_in = nn.Embedding(spec.target.vocab_size, spec.bigram_rank)
            self.bigram_out = nn.Linear(spec.bigram_rank, own.vocab_size, bias=False)
            nn.init.zeros_(self.bigram_out.weight)
        if spec.has_anchor_inputs:
            self.anchor_norm = RMSNorm(own.hidden_size, own.final_norm.eps)
            self.anchor_inputs = nn.Linear(2 * own.hidden_size, rows * own.hidden_size, bias=False)

    def tables(self) -> set[str]:
        return {"bigram_in.weight", "bigram_out.weight"}

    def stacked(self) -> dict[str, int]:
        return {"anchor_inputs.weight": self.spec.block_size}

    def shown(self, batch: Batch) -> Iterator[tuple[Judged, Tensor]]:
        """Row i of the block that begins at token a guesses token a + i + 1."""
        hidden = self.forward(batch)
        for row in range(self.spec.block_size):
            answer, draft, place = batch.judged(row)
            of_it = hidden[answer, draft, row]  # [n, hidden]
            logits = self.lm_head(of_it)
            if self.spec.bigram_rank:
                logits = logits + self.bigram_out(self.bigram_in(batch.tokens[answer, place]))
            yield (answer, draft, place), logits

    def forward(self, batch: Batch) -> Tensor:
        """All blocks at once -> behind the final norm, float32 [batch, drafts, rows, hidden]."""
        starts = batch.starts.clamp_min(0)
        (num_answers, drafts), rows = starts.shape, self.spec.block_size
        length, device = batch.tokens.shape[1], batch.tokens.device
        offsets = torch.arange(rows, device=device)
        positions = (starts[:, :, None] + offsets).flatten(1)  # [batch, drafts * rows]
        ids = torch.full((num_answers, drafts, rows), self.spec.mask_token_id, device=device)
        ids[:, :, 0] = batch.tokens.gather(1, starts)
        entered = self.embed(ids)
        context = self.hidden_norm(self.fc(batch.hidden))
        if self.spec.has_anchor_inputs:
            before = (starts - 1).clamp_min(0)[:, :, None].expand(-1, -1, context.shape[-1])
            told = torch.cat([context.gather(1, before), self.anchor_norm(entered[:, :, 0])], -1)
            entered = entered + self.anchor_inputs(told).view_as(entered)
        x = entered.flatten(1, 2)
        places = torch.arange(length, device=device)
        mask = self.mask(starts, length)
        for layer in cast(list[DecoderLayer], self.layers):
            own = layer.input_layernorm(x)
            far = layer.self_attn.keys_values(context, places)
            near = layer.self_attn.keys_values(own, positions)
            keys, values = (torch.cat(pair, 2) for pair in zip(far, near, strict=True))
            x = layer.finish(x, attend(layer.self_attn.queries(own, positions), keys, values, mask))
        normed: Tensor = self.norm(x)
        return normed.view(num_answers, drafts, rows, -1)

    def mask(self, starts: Tensor, length: int) -> Tensor:
        """What each row sees, bool [batch, 1, drafts * rows, length + drafts * rows]: the tokens before its block,
        which the target has computed, and its block; of that only the rows up to its own if the head is causal."""
        drafts, rows, device = starts.shape[1], self.spec.block_size, starts.device
        begins = starts.repeat_interleave(rows, 1)
        far = torch.arange(length, device=device) < begins[:, :, None]
        block = torch.arange(drafts, device=device).repeat_interleave(rows)
        near = block[:, None] == block
        if self.spec.is_causal:
            near = near & torch.ones_like(near).tril()
        return torch.cat([far, near.expand(len(starts), -1, -1)], -1)[:, None]


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Five of the target, evenly, as DFlash has them: from the second to the third but last."""
    last = max(0, num_layers - 3)
    return tuple(sorted({round(place) for place in np.linspace(min(1, last), last, 5)}))
