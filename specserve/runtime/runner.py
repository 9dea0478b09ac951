"""Runs the target model over one packed step. Knows the model, its kernels and its KV; knows no sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specserve.cache.storage import KVStorage
from specserve.ops import Ops
from specserve.runtime.batch import Batch


class Model(Protocol):
    """A target model: hidden states over paged KV, and logits of chosen rows."""

    def hidden(self, token_ids: Tensor, positions: Tensor, kv: list[Tensor], plan: object) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(slots=True)
class Output:
    """`logits` float32 and `hidden` float32, one row for each of the batch's logit_rows."""

    logits: Tensor  # [logit rows, vocab]
    hidden: Tensor  # [logit rows, hidden]


class Runner:
    """The target model with the cache it writes to."""

    def __init__(self, model: Model, ops: Ops, storage: KVStorage) -> None:
        self.model = model
        self.ops = ops
        self.storage = storage

    @torch.inference_mode()
    def run(self, batch: Batch) -> Output:
        """One forward pass; the LM head sees only the rows that are judged or scored."""
        plan = self.ops.plan(batch, self.storage.block_size)
        hidden = self.model.hidden(batch.token_ids, batch.positions, self.storage.layers, plan)
        hidden = hidden.index_select(0, batch.logit_rows)
        if not len(hidden):
            return Output(hidden, hidden)
        return Output(self.model.logits(hidden), hidden)
