"""Runs a model whose layers are divided among stages: each computes its own and hands on the residual stream, and what
comes out of the last goes back to the first, which has the LM head."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.models.decoder import Decoder
from specserve.models.stages import FirstStage, LaterStage
from specserve.ops import Input, Ops
from specserve.ops.capture import Captured
from specserve.parallel.layout import Layout
from specserve.parallel.link import Link
from specserve.runtime.pack import StepInput
from specserve.runtime.runner import Output, Runner, mark_broken

_NO_ROWS = np.empty(0, np.int64)
# float32 [max_rows, hidden], the residual stream after a layer in the step of that number, which all have mapped.
States = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a process knows of the other stages."""

    layout: Layout
    rank: int
    states: States
    link: Link


class StageRunner:
    """Runs the layers that a process has, those of its stage, and shows what the next stage and drafters read. Steps
    are numbered as they come."""

    def __init__(
        self,
        model: FirstStage | LaterStage,
        ops: Ops,
        kv: list[Tensor],
        block_size: int,
        max_rows: int,
        shown: tuple[int, ...],
        states: States,
    ) -> None:
        self._runner = Runner(model, ops, kv, block_size, max_rows, 0, shown)
        self._states = states

    def show(self, layers: tuple[int, ...]) -> None:
        """Show the residual stream after these with every step from now on. Between steps."""
        self._runner.set_outputs(layers, 0)

    def run(self, step: StepInput, number: int, before: int | None = None) -> list[int]:
        """Compute, with what stands after layer `before`; the rows that it broke."""
        features = None if before is None else self._states(before, number)[: step.rows.num_rows]
        self._runner.start(replace(step, logit_rows=_NO_ROWS), features)
        found = self._runner.finish()
        for layer, tap in found.taps.items():
            self._states(layer, number)[: len(tap)] = tap
        return found.broken


class LaterRunner:
    """A process's part of steps, in a stage after the first."""

    def __init__(self, runner: StageRunner, pipeline: Pipeline) -> None:
        self._runner, self._link = runner, pipeline.link
        self._before = pipeline.layout.layers(pipeline.rank)[0] - 1
        self._num_begun = 0

    def show(self, layers: tuple[int, ...]) -> None:
        self._runner.show(layers)

    def run(self, step: StepInput) -> None:
        """Waits for the stage before. Raises EOFError where it has ended."""
        broken = self._link.receive()
        own = self._runner.run(step, self._num_begun, self._before)
        self._num_begun += 1
        self._link.hand_on(sorted({*broken, *own}))


class FirstRunner:
    """A Runner of all layers, for a process of the first stage: it shows what the others have computed, too. Its own
    layers' part of a step is over when that is started, so that the next stage has it; as many steps as there are
    stages may be under way."""

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        kv: list[Tensor],
        block_size: int,
        max_rows: int,
        max_logit_rows: int,
        taps: tuple[int, ...],
        top_k: int,
        pipeline: Pipeline,
    ) -> None:
        self.model, self.ops = model, ops
        self.max_rows, self.max_logit_rows = max_rows, max_logit_rows
        self.taps, self.top_k = taps, top_k
        self._layout, self._rank = pipeline.layout, pipeline.rank
        self._states, self._link = pipeline.states, pipeline.link
        shown = self._layout.shown(self._rank, taps)
        self._runner = StageRunner(FirstStage(model), ops, kv, block_size, max_rows, shown, self._states)
        self._steps: deque[tuple[StepInput, int]] = deque()  # under way, with their numbers
        self._num_begun = 0
        self._no_adapters = np.full(max_rows + -max_rows % ops.row_multiple, -1, np.int64)
        self._capture()

    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None:
        """As Runner.set_outputs, for what this process computes of it."""
        self._runner.show(self._layout.shown(self._rank, taps))
        self.taps = taps
        if top_k != self.top_k:
            self.top_k = top_k
            self._capture()

    def show(self, layers: tuple[int, ...]) -> None:
        self._runner.show(layers)

    def start(self, step: StepInput) -> None:
        self._link.begin(self._runner.run(step, self._num_begun))
        self._steps.append((step, self._num_begun))
        self._num_begun += 1

    def finish(self) -> Output:
        """As Runner.finish, of the oldest step. Raises EOFError where another process has ended."""
        broken = self._link.receive()
        step, number = self._steps.popleft()
        num_rows, rows = step.rows.num_rows, step.logit_rows
        arrays: list[Any] = [torch.from_numpy(self._states(self._layout.stages[-1][-1], number).numpy()[rows])]
        if self.model.num_adapter_slots:
            arrays.append((self._no_adapters if step.adapters is None else step.adapters)[rows])
        found, top = self._head(arrays, len(rows))
        hidden, logits, best = (each[: len(rows)] for each in found)
        top = None if top is None else top[: len(rows)]
        mark_broken(broken, rows, logits, best, top)
        taps: Mapping[int, Tensor] = {layer: self._states(layer, number)[:num_rows] for layer in self.taps}
        shown_top = None if top is None else top.cpu().numpy()
        return Output(logits, hidden, best, broken, taps, shown_top, self._head.is_replayed, self._link.more_s)

    def _capture(self) -> None:
        inputs = [Input(torch.float32, self.model.spec.hidden_size)]
        inputs += [Input(torch.int64, padding=-1)] if self.model.num_adapter_slots else []
        self._head = Captured(self.ops, partial(_scores, self.model, self.ops, self.top_k), inputs, self.max_logit_rows)


def _scores(
    model: Decoder, ops: Ops, top_k: int, plan: None, residual: Tensor, slots: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    found = model.scores(residual, slots)
    return found, ops.top_k(found[1], found[2], top_k) if top_k else None
