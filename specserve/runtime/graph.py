"""The target model's step behind one interface: run op by op, or recorded once and replayed with no Python inside.
Knows the model's inputs and outputs; knows no sequence."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from specserve.ops import Ops
from specserve.runtime.batch import Batch


class Model(Protocol):
    """A target model: see models.decoder.Decoder.forward."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, kv: list[Tensor], plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...


Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor]


class Step(Protocol):
    """One forward pass at a time, in two calls, between which the host may do something else."""

    def start(self, batch: Batch, plan: Any) -> None: ...

    def finish(self) -> Outputs:
        """Hidden states, logits and best tokens of the batch's logit_rows."""


class EagerStep:
    """Runs the model's ops one by one."""

    def __init__(self, model: Model, kv: list[Tensor]) -> None:
        self._model = model
        self._kv = kv
        self._device = kv[0].device
        self._outputs: Outputs | None = None

    @torch.inference_mode()
    def start(self, batch: Batch, plan: Any) -> None:
        ids, positions, rows = (
            torch.from_numpy(values).to(self._device) for values in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        self._outputs = self._model.forward(ids, positions, rows, self._kv, plan)

    def finish(self) -> Outputs:
        assert self._outputs is not None, "it was started"
        outputs, self._outputs = self._outputs, None
        return outputs


class RecordedStep:
    """Replays the model's ops on static tensors of `max_rows` rows, `max_logit_rows` with logits, on a CPU. What it
    returns is valid until the next step."""

    def __init__(self, model: Model, ops: Ops, kv: list[Tensor], max_rows: int, max_logit_rows: int) -> None:
        self._inputs = np.zeros((2, max_rows), np.int64)  # ids, positions
        self._logit_rows = np.zeros(max_logit_rows, np.int64)
        self._points_into = model, kv  # and nothing else keeps the weights
        with ops.recording() as self._recording:
            ids, positions = torch.from_numpy(self._inputs)
            self._outputs = model.forward(ids, positions, torch.from_numpy(self._logit_rows), kv, None)
        self._views: dict[int, Outputs] = {}  # of the outputs' first rows: slicing takes time
        self._num_collected = 0

    def start(self, batch: Batch, plan: Any) -> None:
        self._recording.finish()  # of a step that an exception left: its inputs are about to change
        rows, collected = batch.num_rows, len(batch.logit_rows)
        self._inputs[0, :rows] = batch.token_ids
        self._inputs[1, :rows] = batch.positions
        self._logit_rows[:collected] = batch.logit_rows
        self._recording.start(rows, collected, plan)
        self._num_collected = collected

    def finish(self) -> Outputs:
        self._recording.finish()
        collected = self._num_collected
        if collected not in self._views:
            hidden, logits, best = self._outputs
            self._views[collected] = hidden[:collected], logits[:collected], best[:collected]
        return self._views[collected]
