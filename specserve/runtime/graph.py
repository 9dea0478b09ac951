"""A model's step behind one interface: run op by op, or recorded once and replayed with no Python inside."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specserve.ops import Ops, Recording
from specserve.runtime.pack import StepInput

_MOST_VIEWS = 256  # 4 KB each; steps of a load have few sizes, chunks of prompts have all


class Outputs(NamedTuple):
    """What comes of a step: of its logit_rows, and of all rows what was tapped."""

    hidden: Tensor  # float32 [logit rows, hidden], behind the final norm
    logits: Tensor  # float32 [logit rows, vocab]
    best: Tensor  # int64 [logit rows], the best token, -1 where the logits are not finite
    taps: tuple[Tensor, ...] = ()  # float32 [rows, hidden] each, the residual stream behind a layer
    top: Tensor | None = None  # int32 [logit rows, k], the k best tokens as ops.top_k has them, if asked for


class Model(Protocol):
    """A model: see models.decoder.Decoder.forward, which returns the fields of Outputs but `top`. One that reads more
    than tokens says how many `features` each row has; it may overwrite them."""

    features_width: int

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]: ...


class Forward(Protocol):
    """One forward pass at a time, in two calls, between which the host may do something else."""

    def start(self, inputs: StepInput, plan: Any, features: Tensor | None = None) -> None: ...
    def finish(self) -> Outputs: ...


class EagerForward:
    """Runs the model's ops one by one."""

    def __init__(self, model: Model, ops: Ops, kv: list[Tensor], taps: tuple[int, ...], top_k: int) -> None:
        self._model = model
        self._ops = ops
        self._kv = kv
        self._taps = taps
        self._top_k = top_k
        self._outputs: Outputs | None = None

    @torch.inference_mode()
    def start(self, inputs: StepInput, plan: Any, features: Tensor | None = None) -> None:
        device = self._kv[0].device
        arrays = (inputs.token_ids, inputs.positions, inputs.logit_rows)
        ids, positions, rows = (torch.from_numpy(values).to(device) for values in arrays)
        if features is not None:
            own = self._ops.input_rows(len(ids), features.shape[1])
            own[: len(features)] = features
            features = own
        outputs = self._model.forward(ids, positions, rows, self._kv, plan, self._taps, features)
        self._outputs = _with_top(self._ops, outputs, self._top_k)

    def finish(self) -> Outputs:
        assert self._outputs is not None, "it was started"
        outputs, self._outputs = self._outputs, None
        return outputs


class RecordedForward:
    """Replays the model's ops on static tensors of `max_rows` rows, `max_logit_rows` with logits, on a CPU. What it
    returns is valid until the next step."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        recording: AbstractContextManager[Recording],
        kv: list[Tensor],
        taps: tuple[int, ...],
        top_k: int,
        max_rows: int,
        max_logit_rows: int,
    ) -> None:
        self._inputs = np.zeros((2, max_rows), np.int64)  # ids, positions
        self._logit_rows = np.zeros(max_logit_rows, np.int64)
        self._features = ops.input_rows(max_rows, model.features_width) if model.features_width else None
        self._points_into = model, kv  # and nothing else keeps the weights
        with recording as self._recording:
            ids, positions = torch.from_numpy(self._inputs)
            logit_rows = torch.from_numpy(self._logit_rows)
            outputs = model.forward(ids, positions, logit_rows, kv, None, taps, self._features)
            self._outputs = _with_top(ops, outputs, top_k)
        self._views: dict[tuple[int, int], Outputs] = {}  # of the outputs' first rows: slicing takes time
        self._size = 0, 0  # rows, and those with logits

    def start(self, inputs: StepInput, plan: Any, features: Tensor | None = None) -> None:
        self._recording.finish()  # of a step that an exception left: its inputs are about to change
        if self._features is not None and features is not None:
            self._features[: len(features)] = features
        rows, logit_rows = inputs.rows.num_rows, len(inputs.logit_rows)
        self._inputs[0, :rows] = inputs.token_ids
        self._inputs[1, :rows] = inputs.positions
        self._logit_rows[:logit_rows] = inputs.logit_rows
        self._recording.start(rows, logit_rows, plan)
        self._size = rows if self._outputs.taps else 0, logit_rows

    def finish(self) -> Outputs:
        self._recording.finish()
        if self._size not in self._views:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            rows, logit_rows = self._size
            hidden, logits, best, taps, top = self._outputs
            view = hidden[:logit_rows], logits[:logit_rows], best[:logit_rows], tuple(tap[:rows] for tap in taps)
            self._views[self._size] = Outputs(*view, None if top is None else top[:logit_rows])
        return self._views[self._size]


def captured(
    model: Model,
    ops: Ops,
    kv: list[Tensor],
    taps: tuple[int, ...],
    top_k: int,
    max_rows: int,
    max_logit_rows: int,
) -> Forward:
    """The model's step: recorded, where `ops` record."""
    recording = ops.recording()
    if recording is None:
        return EagerForward(model, ops, kv, taps, top_k)
    return RecordedForward(model, ops, recording, kv, taps, top_k, max_rows, max_logit_rows)


def _with_top(ops: Ops, outputs: tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]], top_k: int) -> Outputs:
    _, logits, best, _ = outputs
    return Outputs(*outputs, ops.top_k(logits, best, top_k) if top_k else None)
