"""Runs a model over packed steps, and over the KV of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.ops import Ops
from specserve.runtime.graph import Forward, Model, captured
from specserve.runtime.pack import StepInput
from specserve.types import Ids


@dataclass(slots=True)
class Output:
    """One row for each of the step's logit_rows; valid until the next step."""

    logits: Tensor  # float32 [logit rows, vocab]
    hidden: Tensor  # float32 [logit rows, hidden], behind the final norm
    best: Tensor  # int64 [logit rows], the best token of each row, -1 where the logits are broken
    broken: list[int] = field(default_factory=list)  # rows of the step whose KV is not what the model computed
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # by layer float32 [rows, hidden], the residual behind it
    top: Ids | None = None  # int32 [logit rows, k], the k best tokens of each row, -1 where the logits are broken


class Runner:
    """A model with the KV that it writes to, one tensor a layer. No step has more than `max_rows` rows, or logits for
    more than `max_logit_rows` of them. `taps` are layers whose outputs each step shows, `top_k` how many of the best
    tokens."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: list[Tensor],
        block_size: int,
        max_rows: int,
        max_logit_rows: int,
        taps: tuple[int, ...] = (),
        top_k: int = 0,
    ) -> None:
        self.model = model
        self.ops = ops
        self.block_size = block_size
        self.max_rows = max_rows
        self.max_logit_rows = max_logit_rows
        self.kv = kv
        self._plan: Any = None  # of the newest step
        self._logit_rows = np.zeros(0, np.int64)
        self.taps, self.top_k = taps, top_k
        self._forward: Forward = self._captured()

    def show(self, taps: tuple[int, ...], top_k: int) -> None:
        """Show the residual stream behind these layers, of all rows, and so many of the best tokens of each row of
        logits, with every step from now on. Between steps."""
        if (taps, top_k) != (self.taps, self.top_k):
            self.taps, self.top_k = taps, top_k
            self._forward = self._captured()

    def start(self, inputs: StepInput, features: Tensor | None = None) -> None:
        """Begin a forward pass; the LM head sees only the rows that are sampled or scored. `features` are those of the
        first rows, float32 [rows, model.features_width], for a model that reads any."""
        self._logit_rows = inputs.logit_rows
        self._plan = self.ops.plan(inputs.rows, self.block_size)
        self._forward.start(inputs, self._plan, features)

    def finish(self) -> Output:
        """What came of it. Whatever the host does before this call takes the device no time.

        A row whose keys or values are NaN or infinite has broken logits, whatever the model says of it: the KV that
        later rows would read is not what it computed.
        """
        hidden, logits, best, taps, top = self._forward.finish()
        broken = self.ops.broken_rows(self._plan)
        if broken:
            at = np.flatnonzero(np.isin(self._logit_rows, broken)).tolist()
            with torch.inference_mode():
                logits[at], best[at] = torch.nan, -1
                if top is not None:
                    top[at] = -1
        shown = dict(zip(self.taps, taps, strict=True))
        return Output(logits, hidden, best, broken, shown, None if top is None else top.cpu().numpy())

    def _captured(self) -> Forward:
        shown = self.taps, self.top_k
        return captured(self.model, self.ops, self.kv, *shown, self.max_rows, self.max_logit_rows)
