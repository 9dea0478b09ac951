"""Runs a model whose layers are divided among stages: each computes its own and hands on the residual stream, and what
comes out of the last goes back to the first, which has the LM head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
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
from specserve.parallel.messages import Connection, HandOn
from specserve.runtime.pack import StepInput
from specserve.runtime.runner import Output, Runner, mark_broken

_NO_ROWS = np.empty(0, np.int64)
States = Callable[[int], Tensor]  # float32 [max_rows, hidden], the residual stream after a layer, which all have mapped


class Link:
    """Where a process hears that the stage before its own has computed a step, and tells those of the next that its own
    has. Before the first stage comes the last."""

    def __init__(self, before: Connection, after: list[Connection]) -> None:
        self._before, self._after = before, after

    def receive(self) -> list[int]:
        """Waits; the rows that are broken by now. Raises EOFError where nothing will come any more."""
        found: HandOn = self._before.receive()
        return found.broken

    def hand_on(self, broken: list[int]) -> None:
        """To those that have ended it is nothing; the first process hears of it otherwise."""
        for connection in self._after:
            with suppress(OSError):
                connection.send(HandOn(broken))

    def close(self) -> None:
        for connection in (self._before, *self._after):
            connection.close()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a process knows of the other stages."""

    layout: Layout
    rank: int
    states: States
    link: Link


class StageRunner:
    """Runs the layers that a process has, those of its stage, and shows what the next stage and drafters read."""

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

    def start(self, step: StepInput, before: int | None = None) -> None:
        """Begin, with what stands after layer `before`."""
        features = None if before is None else self._states(before)[: step.rows.num_rows]
        self._runner.start(replace(step, logit_rows=_NO_ROWS), features)

    def finish(self) -> list[int]:
        """The rows that it broke."""
        found = self._runner.finish()
        for layer, tap in found.taps.items():
            self._states(layer)[: len(tap)] = tap
        return found.broken


class LaterRunner:
    """A process's part of steps, in a stage after the first."""

    def __init__(self, runner: StageRunner, pipeline: Pipeline) -> None:
        self._runner, self._link = runner, pipeline.link
        self._before = pipeline.layout.layers(pipeline.rank)[0] - 1

    def show(self, layers: tuple[int, ...]) -> None:
        self._runner.show(layers)

    def start(self, step: StepInput) -> None:
        """Waits for the stage before. Raises EOFError where it has ended."""
        self._broken = self._link.receive()
        self._runner.start(step, self._before)

    def finish(self) -> None:
        self._link.hand_on(sorted({*self._broken, *self._runner.finish()}))


class FirstRunner:
    """A Runner of all layers, for a process of the first stage: it shows what the others have computed, too."""

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
        self._step = step
        self._runner.start(step)

    def finish(self) -> Output:
        """As Runner.finish. Raises EOFError where another process has ended."""
        step, own = self._step, self._runner.finish()
        self._link.hand_on(own)
        broken = self._link.receive()
        num_rows, rows = step.rows.num_rows, step.logit_rows
        arrays: list[Any] = [torch.from_numpy(self._states(self._layout.stages[-1][-1]).numpy()[rows])]
        if self.model.num_adapter_slots:
            arrays.append((self._no_adapters if step.adapters is None else step.adapters)[rows])
        found, top = self._head(arrays, len(rows))
        hidden, logits, best = (each[: len(rows)] for each in found)
        top = None if top is None else top[: len(rows)]
        mark_broken(broken, rows, logits, best, top)
        taps: Mapping[int, Tensor] = {layer: self._states(layer)[:num_rows] for layer in self.taps}
        shown_top = None if top is None else top.cpu().numpy()
        return Output(logits, hidden, best, broken, taps, shown_top, self._head.is_replayed)

    def _capture(self) -> None:
        inputs = [Input(torch.float32, self.model.spec.hidden_size)]
        inputs += [Input(torch.int64, padding=-1)] if self.model.num_adapter_slots else []
        self._head = Captured(self.ops, partial(_scores, self.model, self.ops, self.top_k), inputs, self.max_logit_rows)


def _scores(
    model: Decoder, ops: Ops, top_k: int, plan: None, residual: Tensor, slots: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    found = model.scores(residual, slots)
    return found, ops.top_k(found[1], found[2], top_k) if top_k else None
