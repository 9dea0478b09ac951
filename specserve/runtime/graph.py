"""The target model's step behind one interface: run op by op, or recorded once and replayed with no Python inside.
Knows the model's inputs and outputs; knows no sequence."""

from __future__ import annotations

from typing import Any, Protocol

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


class Step(Protocol):
    """One forward pass: hidden states, logits and best tokens of the batch's logit_rows."""

    def __call__(self, batch: Batch, plan: Any) -> tuple[Tensor, Tensor, Tensor]: ...


class EagerStep:
    """Runs the model's ops one by one."""

    def __init__(self, model: Model, kv: list[Tensor]) -> None:
        self._model = model
        self._kv = kv
        self._device = kv[0].device

    @torch.inference_mode()
    def __call__(self, batch: Batch, plan: Any) -> tuple[Tensor, Tensor, Tensor]:
        ids, positions, rows = (
            torch.from_numpy(values).to(self._device) for values in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        return self._model.forward(ids, positions, rows, self._kv, plan)


class RecordedStep:
    """Replays the model's ops on static tensors of `max_rows` rows, on a CPU. What it returns is valid until the next
    step."""

    def __init__(self, model: Model, ops: Ops, kv: list[Tensor], max_rows: int) -> None:
        self._inputs = np.zeros((3, max_rows), np.int64)  # ids, positions, rows
        self._points_into = model, kv  # and nothing else keeps the weights
        with ops.recording() as self._recording:
            ids, positions, rows = torch.from_numpy(self._inputs)
            self._outputs = model.forward(ids, positions, rows, kv, None)
        self._views: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # of the outputs' first rows: slicing takes time

    def __call__(self, batch: Batch, plan: Any) -> tuple[Tensor, Tensor, Tensor]:
        rows, collected = batch.num_rows, len(batch.logit_rows)
        self._inputs[0, :rows] = batch.token_ids
        self._inputs[1, :rows] = batch.positions
        self._inputs[2, :collected] = batch.logit_rows
        self._recording.run(rows, collected, plan)
        if collected not in self._views:
            hidden, logits, best = self._outputs
            self._views[collected] = hidden[:collected], logits[:collected], best[:collected]
        return self._views[collected]
