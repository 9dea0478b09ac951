"""Runs the target model over one packed step. Knows the model, its kernels and its KV; knows no sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specserve.cache.storage import KVStorage
from specserve.ops import Ops
from specserve.runtime.batch import Batch
from specserve.runtime.graph import EagerStep, Model, RecordedStep, Step


@dataclass(slots=True)
class Output:
    """One row for each of the batch's logit_rows; valid until the next step."""

    logits: Tensor  # float32 [logit rows, vocab]
    hidden: Tensor  # float32 [logit rows, hidden]
    best: Tensor  # int64 [logit rows], the best token of each row, -1 where the logits are broken


class Runner:
    """The target model with the cache it writes to. No step has more than `max_rows` rows, or logits for more than
    `max_logit_rows` of them."""

    def __init__(self, model: Model, ops: Ops, storage: KVStorage, max_rows: int, max_logit_rows: int) -> None:
        self.model = model
        self.ops = ops
        self.storage = storage
        self.max_logit_rows = max_logit_rows
        self._step: Step = (
            RecordedStep(model, ops, storage.layers, max_rows, max_logit_rows)
            if ops.can_record
            else EagerStep(model, storage.layers)
        )

    def start(self, batch: Batch) -> None:
        """Begin a forward pass; the LM head sees only the rows that are judged or scored."""
        self._step.start(batch, self.ops.plan(batch, self.storage.block_size))

    def finish(self) -> Output:
        """What came of it. Whatever the host does before this call takes the device no time."""
        hidden, logits, best = self._step.finish()
        return Output(logits, hidden, best)
