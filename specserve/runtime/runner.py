"""Runs the target model over one packed step. Knows the model, its kernels and its KV; knows no sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
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
    broken: list[int] = field(default_factory=list)  # rows of the batch whose KV is not what the model computed


class Runner:
    """The target model with the cache it writes to. No step has more than `max_rows` rows, or logits for more than
    `max_logit_rows` of them."""

    def __init__(self, model: Model, ops: Ops, storage: KVStorage, max_rows: int, max_logit_rows: int) -> None:
        self.model = model
        self.ops = ops
        self.storage = storage
        self.max_logit_rows = max_logit_rows
        self._plan: Any = None  # of the newest step
        self._logit_rows = np.zeros(0, np.int64)
        self._step: Step = (
            RecordedStep(model, ops, storage.layers, max_rows, max_logit_rows)
            if ops.can_record
            else EagerStep(model, storage.layers)
        )

    def start(self, batch: Batch) -> None:
        """Begin a forward pass; the LM head sees only the rows that are judged or scored."""
        self._logit_rows = batch.logit_rows
        self._plan = self.ops.plan(batch, self.storage.block_size)
        self._step.start(batch, self._plan)

    def finish(self) -> Output:
        """What came of it. Whatever the host does before this call takes the device no time.

        A row whose keys or values are NaN or infinite has broken logits, whatever the model says of it: the KV that
        later rows would read is not what it computed.
        """
        hidden, logits, best = self._step.finish()
        broken = self.ops.broken_rows(self._plan)
        if broken:
            at = np.flatnonzero(np.isin(self._logit_rows, broken)).tolist()
            with torch.inference_mode():
                logits[at], best[at] = torch.nan, -1
        return Output(logits, hidden, best, broken)
