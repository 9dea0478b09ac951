"""Executors that take several steps at once, in one process."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import torch

from specserve.engine.engine import Engine
from specserve.runtime.executor import LocalExecutor, MakeMasks, StepOutput
from specserve.runtime.pack import StepInput


class Lagging(LocalExecutor):
    """Computes a step no sooner than it is to be finished, as the last stage of several may: what it was told before
    and since waits, in its order. Drafters' models, which run where the engine does, find their KV copied at once."""

    def __init__(self, local: LocalExecutor, most_under_way: int) -> None:
        super().__init__(local.runner, local.sampler, local.storage, local._timed)
        self.most_under_way = most_under_way  # type: ignore[misc]
        self._later: deque[Callable[[], None] | StepInput] = deque()

    def start(self, step: StepInput) -> None:
        self._later.append(step)
        num_steps = sum(isinstance(each, StepInput) for each in self._later)
        assert num_steps <= self.most_under_way, "so many it takes"

    def finish(self, masks: MakeMasks) -> StepOutput:
        while True:
            found = self._later.popleft()
            if isinstance(found, StepInput):
                super().start(found)
                return super().finish(masks)
            found()

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        kv, storage = self.runner.kv, self.storage  # type: ignore[attr-defined]
        read, written = torch.tensor(sources), torch.tensor(targets)
        own = {id(layer) for layer in kv}
        if drafted := [layer for layer in storage.layers if id(layer) not in own]:
            storage._copy_kv(drafted, read, written)
        self._later.append(lambda: storage._copy_kv(kv, read, written))

    def abandon(self) -> None:
        super().abandon()
        self._later.clear()


def overlap_always(engine: Engine, seed: int | None = None) -> None:
    """Let as many steps be under way as may, or now and then another number, whatever they take."""
    overlap, draws = engine.scheduler.overlap, random.Random(seed)

    def choose(num_seqs: int, context: int, chunk_s: float) -> int:
        if seed is None or not draws.randrange(8):
            overlap.num = overlap.most if seed is None else draws.randint(1, overlap.most)
        return overlap.num

    overlap.choose = choose  # type: ignore[method-assign]
