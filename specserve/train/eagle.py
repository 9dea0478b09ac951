"""EAGLE-3 with gradients, unrolled as it will draft (training-time test, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from specserve.models.heads.spec import EagleSpec
from specserve.models.spec import LayerSpec
from specserve.train.batches import Batch
from specserve.train.heads import Guesses, TrainedHead, frozen_head
from specserve.train.layers import DecoderLayer, RMSNorm, Rotary, attend_unrolled

_DECAY = 0.8  # of a depth's weight in the loss, as EAGLE-3's own code has it

Cache = list[list[tuple[Tensor, Tensor]]]  # by layer, then by step: keys and values


class _FirstLayer(DecoderLayer):
    """Reads [norm(embedding), norm(hidden)]."""

    def __init__(self, spec: LayerSpec, hidden: int, rotary: Rotary) -> None:
        super().__init__(spec, hidden, rotary, width=2 * hidden)
        self.hidden_norm = RMSNorm(hidden, spec.norm.eps)


class EagleHead(TrainedHead):
    """EagleSpec version 3. `embedding` [vocab, hidden] and `head` [vocab, hidden] are the target's and do not learn,
    `norm` [hidden] is where the final norm begins."""

    spec: EagleSpec

    def __init__(
        self, spec: EagleSpec, ids: NDArray[np.int64], embedding: Tensor, head: Tensor, norm: Tensor, depth: int
    ) -> None:
        assert spec.version == 3 and spec.has_head, "what is trained"
        super().__init__(ids, embedding)
        own, hidden = spec.layers, spec.layers.hidden_size
        first, *others = own.layers
        self.spec, self.hidden_layers = spec, spec.hidden_layers
        self.depth_weights = [_DECAY**step for step in range(depth)]
        self.rotary = Rotary(first, own.max_len + depth)
        self.fc = nn.Linear(len(spec.hidden_layers) * spec.target.hidden_size, hidden, spec.fc_bias)
        self.layers = nn.ModuleList([_FirstLayer(first, hidden, self.rotary)])
        self.layers.extend(DecoderLayer(each, hidden, self.rotary) for each in others)
        self.norm = RMSNorm(hidden, own.final_norm.eps)
        self.norm.weight.data.copy_(norm)
        self.lm_head = frozen_head(head, ids)

    def guesses(self, batch: Batch, generator: torch.Generator) -> Iterator[Guesses]:
        """Step k: row i guesses token i + k + 2 of token i + k + 1 and, at first, the target's hidden state of token i,
        then what it made of that in the step before. So it is what a draft behind token i + 1 does at depth k, as long
        as the tokens that it drafted are those that came."""
        batch_size, length = batch.tokens.shape
        hidden = self.fc(batch.hidden)
        cache: Cache = [[] for _ in self.layers]
        rows = torch.arange(length, device=batch.tokens.device)
        for step in range(len(self.depth_weights)):
            embedded = self.embed(F.pad(batch.tokens, (0, step + 1))[:, step + 1 :])
            hidden = self.step(embedded, hidden, step, cache)
            at = F.pad(batch.is_judged, (0, step + 1))[:, step + 1 :] & (rows >= batch.num_prompt[:, None] - 1)
            answer, row = at.nonzero(as_tuple=True)
            yield Guesses(
                logits=self.lm_head(self.norm(hidden[answer, row])),
                target=batch.target[answer, row + step + 1],
                truth=self.places(batch.tokens[answer, row + step + 2]),
                contexts=answer * length + row,
                num_contexts=batch_size * length,
            )

    def step(self, embedded: Tensor, hidden: Tensor, step: int, cache: Cache) -> Tensor:
        """One pass over all rows, [batch, rows, hidden] each -> what stands behind the last layer, before the norm."""
        positions = torch.arange(embedded.shape[1], device=embedded.device) + step
        for number, layer in enumerate(cast(list[DecoderLayer], self.layers)):
            if isinstance(layer, _FirstLayer):
                normed = layer.hidden_norm(hidden)
                x = torch.cat([layer.input_layernorm(embedded), normed], -1)
                residual = normed if self.spec.norm_before_residual else hidden
            else:
                x, residual = layer.input_layernorm(hidden), hidden
            cache[number].append(layer.self_attn.keys_values(x, positions))
            attended = attend_unrolled(layer.self_attn.queries(x, positions), cache[number])
            hidden = layer.finish(residual, attended)
        return hidden


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Early, middle and late: what enters layers 2, n / 2 and n - 3 of the target, as EAGLE-3 has it."""
    return tuple(sorted({min(max(0, layer), num_layers - 1) for layer in (1, num_layers // 2 - 1, num_layers - 4)}))
