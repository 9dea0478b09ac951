"""Medusa-1 with gradients (arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from specserve.models.heads.spec import MedusaSpec
from specserve.train.batches import Batch
from specserve.train.heads import Judged, TrainedHead

_DECAY = 0.8  # of a head's weight in the loss, as Medusa has it


class _Block(nn.Module):
    """x + SiLU(W x + b), which begins as x."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(TrainedHead):
    """`norm` [hidden] and `eps` are the target's final norm, of which heads read; `head` [vocab, hidden] is where their
    own LM heads begin. `last_layer` is the target's, counted from 0."""

    spec: MedusaSpec

    def __init__(
        self, spec: MedusaSpec, ids: NDArray[np.int64], embedding: Tensor, head: Tensor, norm: Tensor, eps: float
    ) -> None:
        super().__init__(ids, embedding)
        self.spec, self.hidden_layers, self._eps = spec, (spec.target.num_layers - 1,), eps
        self.depth_weights = [_DECAY**number for number in range(spec.num_heads)]
        self.register_buffer("final_norm", norm, persistent=False)
        for number in range(spec.num_heads):
            blocks = [_Block(spec.target.hidden_size) for _ in range(spec.num_layers)]
            last = nn.Linear(spec.target.hidden_size, spec.draft_vocab_size, bias=False)
            last.weight.data.copy_(head[torch.from_numpy(ids)])
            self.add_module(str(number), nn.Sequential(*blocks, last))

    def tables(self) -> set[str]:
        return {f"{number}.{self.spec.num_layers}.weight" for number in range(self.spec.num_heads)}

    def shown(self, batch: Batch) -> Iterator[tuple[Judged, Tensor]]:
        """Head j guesses token i + j + 2 of the target's hidden state of token i."""
        norm = self.get_buffer("final_norm")
        for number in range(self.spec.num_heads):
            answer, draft, place = batch.judged(number)
            hidden = F.rms_norm(batch.hidden[answer, place - number - 1], norm.shape, norm, self._eps)
            yield (answer, draft, place), self.get_submodule(str(number))(hidden)
