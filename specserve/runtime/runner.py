"""Runs a model over packed steps, and over the KV of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.product import RowSlots
from specserve.models.spec import ModelSpec
from specserve.ops import AttentionRows, Input, Ops
from specserve.ops.capture import Captured
from specserve.runtime.pack import StepInput
from specserve.types import Ids

_MOST_VIEWS = 256  # 4 KB each; steps of a load have few sizes, chunks of prompts have all


class Model(Protocol):
    """What a Runner can run; models.decoder.Decoder is one, whose `forward` says what is what. A model that reads more
    than tokens says how many numbers each row has, and may overwrite these `features`."""

    @property
    def spec(self) -> ModelSpec: ...

    features_width: int
    num_adapter_slots: int

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        kv: list[Tensor],
        plan: Any,
        taps: tuple[int, ...] = (),
        features: Tensor | None = None,
        slots: RowSlots | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]: ...


@dataclass(slots=True)
class Output:
    """One row for each of the step's logit_rows; valid until the next step."""

    logits: Tensor  # float32 [logit rows, vocab]
    hidden: Tensor  # float32 [logit rows, hidden], after the final norm
    best: Tensor  # int64 [logit rows], the best token of each row, -1 where the logits are broken
    broken: list[int] = field(default_factory=list)  # rows of the step whose KV is not what the model computed
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # by layer float32 [rows, hidden], the residual after it
    top: Ids | None = None  # int32 [logit rows, k], the k best tokens of each row, -1 where the logits are broken
    is_replayed: bool = False  # whether the next step of as many rows leaves its tensors where these are
    more_s: float = 0.0  # as in StepOutput


class _Computed(NamedTuple):
    """As in Output, of all rows that a step may have or of those that it has."""

    hidden: Tensor
    logits: Tensor
    best: Tensor
    taps: tuple[Tensor, ...]
    top: Tensor | None

    def of(self, num_rows: int, num_logit_rows: int) -> _Computed:
        hidden, logits, best = (each[:num_logit_rows] for each in self[:3])
        taps = tuple(tap[:num_rows] for tap in self.taps)
        return _Computed(hidden, logits, best, taps, None if self.top is None else self.top[:num_logit_rows])


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
        self.taps, self.top_k = taps, top_k
        self.capture()

    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None:
        """Show the residual stream after these layers, of all rows, and so many of the best tokens of each row of
        logits, with every step from now on. Between steps."""
        if (taps, top_k) != (self.taps, self.top_k):
            self.taps, self.top_k = taps, top_k
            self.capture()

    def start(self, inputs: StepInput, features: Tensor | None = None) -> None:
        """Begin a forward pass; the LM head sees only the rows that are sampled or scored. `features` are those of the
        first rows, float32 [rows, model.features_width], for a model that reads any."""
        self._logit_rows = inputs.logit_rows
        self._num_rows = inputs.rows.num_rows
        self._plan = self.ops.plan(inputs.rows, self.block_size)
        arrays: list[Any] = [inputs.token_ids, inputs.positions, inputs.logit_rows]
        arrays += () if features is None else (features,)
        if self.model.num_adapter_slots:
            slots = self._no_adapters[: self._num_rows] if inputs.adapters is None else inputs.adapters
            arrays += slots, slots[self._logit_rows]
        self._captured.start(arrays, self._num_rows, len(self._logit_rows), self._plan)

    def finish(self) -> Output:
        """What came of it. Whatever the host does before this call takes the device no time.

        A row whose keys or values are NaN or infinite has broken logits, whatever the model says of it: the KV that
        later rows would read is not what it computed.
        """
        computed = self._captured.finish()
        # What a recording computes lives as long as this.
        key = id(computed), self._num_rows if self.taps else 0, len(self._logit_rows)
        found = self._views.get(key) if self._captured.is_replayed else None
        if found is None:
            found = computed.of(*key[1:])
            if self._captured.is_replayed:  # into the same tensors each time, and slicing takes time
                if len(self._views) == _MOST_VIEWS:
                    self._views.clear()
                self._views[key] = found
        hidden, logits, best, taps, top = found
        broken = self.ops.broken_rows(self._plan)
        mark_broken(broken, self._logit_rows, logits, best, top)
        shown = dict(zip(self.taps, taps, strict=True))
        shown_top = None if top is None else top.cpu().numpy()
        return Output(logits, hidden, best, broken, shown, shown_top, self._captured.is_replayed)

    def capture(self) -> None:
        """Anew where it was before. Between steps; with other processes of the model in all of them."""
        self.__dict__.pop("_captured", None)  # first: what is captured anew would take as much memory again
        self._views: dict[tuple[int, int, int], _Computed] = {}
        # Of values alone, not of the runner: who lets go of it lets go of the weights at once.
        compute = partial(_compute, self.model, self.ops, self.kv, self.taps, self.top_k)
        inputs = [Input(torch.int64), Input(torch.int64), Input(torch.int64, is_gathered=True)]
        if width := self.model.features_width:
            inputs.append(Input(torch.float32, width))
        if self.model.num_adapter_slots:
            inputs += (Input(torch.int64, is_gathered=each, padding=-1) for each in (False, True))
            multiple = self.ops.row_multiple
            self._no_adapters = np.full(self.max_rows + -self.max_rows % multiple, -1, np.int64)
        plan = self.ops.plan(AttentionRows.pack([0, 1], [0], [[0]], [-1], self.ops.row_multiple), self.block_size)
        self._captured = Captured(self.ops, compute, inputs, self.max_rows, self.max_logit_rows, plan)


def mark_broken(
    broken: list[int], logit_rows: NDArray[np.int64], logits: Tensor, best: Tensor, top: Tensor | None
) -> None:
    """Let the logits of `logit_rows` that are among the `broken` rows of a step be broken, too, and what was found in
    them."""
    if broken:
        at = np.flatnonzero(np.isin(logit_rows, broken)).tolist()
        with torch.inference_mode():
            logits[at], best[at] = torch.nan, -1
            if top is not None:
                top[at] = -1


def _compute(
    model: Model, ops: Ops, kv: list[Tensor], taps: tuple[int, ...], top_k: int, plan: Any, *inputs: Tensor
) -> _Computed:
    ids, positions, logit_rows, *more = inputs
    slots = RowSlots(more.pop(-2), more.pop()) if model.num_adapter_slots else None
    features = more[0] if more else None
    outputs = model.forward(ids, positions, logit_rows, kv, plan, taps, features, slots)
    return _Computed(*outputs, ops.top_k(outputs[1], outputs[2], top_k) if top_k else None)
