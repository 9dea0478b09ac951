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
from specserve.train.heads import Judged, TrainedHead, frozen_head
from specserve.train.layers import DecoderLayer, RMSNorm, Rotary, attend_unrolled

_DECAY = 0.8  # of a depth's weight in the loss, as EAGLE-3's own code has it

Cache = list[list[tuple[Tensor, Tensor]]]  # by layer, then by step: keys and values, of all rows, then of drafts' own


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

    def shown(self, batch: Batch) -> Iterator[tuple[Judged, Tensor]]:
        """Step k: row i guesses token i + k + 2 of token i + k + 1 and, at first, the target's hidden state of token i,
        then what it made of that in the step before. So it is what a draft behind token i + 1 does at depth k, as long
        as the tokens that it drafted are those that came. Rows are those before starts; of all others only what these
        see is computed."""
        last = batch.tokens.shape[1] - 1
        rows = (batch.starts - 1).clamp_min(0)  # [batch, drafts]
        cache: Cache = [[] for _ in self.layers]
        hidden = self.fc(batch.hidden)
        for step in range(len(self.depth_weights)):
            if step == 0:
                hidden = self.first_step(self.embed(F.pad(batch.tokens, (0, 1))[:, 1:]), hidden, rows, cache)
            else:
                embedded = self.embed(batch.tokens.gather(1, (rows + step + 1).clamp_max(last)))
                hidden = self.later_step(embedded, hidden, rows, step, cache)
            answer, draft, place = batch.judged(step)
            yield (answer, draft, place), self.lm_head(self.norm(hidden[answer, draft]))

    def first_step(self, embedded: Tensor, hidden: Tensor, rows: Tensor, cache: Cache) -> Tensor:
        """Of all rows, [batch, tokens, hidden] each -> what stands behind the last layer of `rows`, int64 [batch, n],
        before the norm, [batch, n, hidden]."""
        places = torch.arange(hidden.shape[1], device=hidden.device)
        everywhere = places.expand(len(hidden), -1)
        for number, layer in enumerate(cast(list[DecoderLayer], self.layers)):
            x, residual = self._input(layer, embedded, hidden)
            cache[number].append(layer.self_attn.keys_values(x, places))
            shown = everywhere
            if number == len(self.layers) - 1:
                shown, x, residual = rows, _at(x, rows), _at(residual, rows)
            attended = attend_unrolled(layer.self_attn.queries(x, shown), shown, cache[number])
            hidden = layer.finish(residual, attended)
        return hidden

    def later_step(self, embedded: Tensor, hidden: Tensor, rows: Tensor, step: int, cache: Cache) -> Tensor:
        """Of `rows`, [batch, n, hidden] each -> the same behind the last layer, before the norm."""
        positions = rows + step
        for number, layer in enumerate(cast(list[DecoderLayer], self.layers)):
            x, residual = self._input(layer, embedded, hidden)
            cache[number].append(layer.self_attn.keys_values(x, positions))
            attended = attend_unrolled(layer.self_attn.queries(x, positions), rows, cache[number])
            hidden = layer.finish(residual, attended)
        return hidden

    def _input(self, layer: DecoderLayer, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer's attention reads, and what is added to what it says."""
        if not isinstance(layer, _FirstLayer):
            return layer.input_layernorm(hidden), hidden
        normed = layer.hidden_norm(hidden)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        return x, normed if self.spec.norm_before_residual else hidden


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """x [batch, tokens, width] at rows int64 [batch, n] -> [batch, n, width]."""
    return x.gather(1, rows[:, :, None].expand(-1, -1, x.shape[-1]))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Early, middle and late: what enters layers 2, n / 2 and n - 3 of the target, as EAGLE-3 has it."""
    return tuple(sorted({min(max(0, layer), num_layers - 1) for layer in (1, num_layers // 2 - 1, num_layers - 4)}))
