"""Replicas of a model that have some of its experts each, and so take every step together.

A step of one replica needs the experts of all: whoever begins one rings the others' bells, and those take it too, with
the rows that they have, or with none. Nothing else is agreed on: how many rows each has is told with the rows, in each
layer that has experts. Nobody is more than a step ahead, as no step ends before all have taken it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from specserve.cache.storage import KVStorage
from specserve.errors import EngineError, ModelError
from specserve.models.loader import native_spec
from specserve.models.sharding import EXPERTS_OPTION, divided_experts
from specserve.models.spec import ExpertsMlp
from specserve.ops import Ops
from specserve.ops.peers import ExpertPeers, ExpertRows
from specserve.parallel.begun import NUM_BYTES, Begun
from specserve.runtime.executor import LocalExecutor, MakeMasks, StepOutput, StepRunner
from specserve.runtime.pack import StepInput, pack
from specserve.sampling.sampler import Sampler


class Lockstep:
    """One replica's part in steps that all take together. It counts those that it takes without rows; `width` is how
    many numbers it holds for each row beside those of a replica that has all experts.

    `memory` is a descriptor of memory that all of them map, which this closes, and `bells` one of an eventfd for each.
    """

    def __init__(self, rank: int, memory: int, bells: Sequence[int]) -> None:
        self.rank, self._descriptor, self._bells = rank, memory, bells
        self.count = len(self._bells)
        self.width = self.num_empty_steps = 0
        self._peers: ExpertPeers | None = None
        self._executor: LockstepExecutor | None = None

    @property
    def bell(self) -> int:
        """What can be read while another replica may have begun a step."""
        return self._bells[self.rank]

    def peers(self, folder: Path, ops: Ops, max_rows: int) -> ExpertPeers:
        """The replicas, for the model in that folder. Raises ConfigError or ModelError for one that cannot be divided
        so."""
        try:
            spec = native_spec(folder)
        except ModelError as error:
            raise ModelError(f"{EXPERTS_OPTION}: {error}") from None
        mlps = divided_experts(spec, self.count)
        self.width = _width(mlps, spec.hidden_size, self.count)
        rows = ExpertRows(max_rows, max(mlp.per_token for mlp in mlps), spec.hidden_size)
        num_bytes = NUM_BYTES + ops.expert_memory(self.count, rows)
        known = os.fstat(self._descriptor).st_size
        if known not in (0, num_bytes):
            raise EngineError("The replicas have read different models: its files were changed while they started.")
        os.ftruncate(self._descriptor, num_bytes)
        mapped = memoryview(mmap.mmap(self._descriptor, num_bytes))
        os.close(self._descriptor)
        self._begun = Begun(mapped, self.count)
        self._peers = ops.expert_peers(mapped[NUM_BYTES:], self.rank, self.count, rows)
        return self._peers

    def executor(
        self,
        runner: StepRunner,
        sampler: Sampler,
        storage: KVStorage,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> LockstepExecutor:
        """What takes this replica's steps, once all replicas have loaded their weights: waits for them."""
        self._executor = LockstepExecutor(self, runner, sampler, storage, timed)
        self.begin()
        self._executor.take_empty()
        return self._executor

    def begin(self) -> None:
        """A step, which the others have to take, too."""
        self._begun.add(self.rank)
        for rank in self._begun.behind:
            os.eventfd_write(self._bells[rank], 1)

    def join(self) -> bool:
        """Take a step without rows if another replica has begun one that this one has not; whether it was."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.bell)  # before the look: who rings afterwards is heard
        if self._executor is None or self.rank not in self._begun.behind:
            return False
        self._begun.add(self.rank)
        self._executor.take_empty()
        self.num_empty_steps += 1
        return True

    def check(self) -> None:
        """Raises EngineError where a replica has left: what steps compute is nothing then."""
        if self._peers is not None and self._peers.has_left:
            raise EngineError("Another replica has ended, and with it its experts.")

    def leave(self) -> None:
        """Take no step any more, and let no other wait for one."""
        if self._peers is not None:
            self._peers.leave()


class LockstepExecutor(LocalExecutor):
    """An executor whose model is in this process, but for experts of other replicas."""

    def __init__(
        self,
        lockstep: Lockstep,
        runner: StepRunner,
        sampler: Sampler,
        storage: KVStorage,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        super().__init__(runner, sampler, storage, timed)
        self._lockstep = lockstep
        self._empty = pack((), self.row_multiple)

    def start(self, step: StepInput) -> None:
        self._lockstep.begin()
        super().start(step)

    def finish(self, masks: MakeMasks) -> StepOutput:
        output = super().finish(masks)
        self._lockstep.check()
        return output

    def take_empty(self) -> None:
        """A step of no rows, for the rows of other replicas."""
        self.runner.start(self._empty)
        self.runner.finish()
        self._lockstep.check()

    def close(self) -> None:
        self._lockstep.leave()


def _width(mlps: Iterable[ExpertsMlp], hidden: int, count: int) -> int:
    """At most: of each row what is laid down and what comes back, and the pairs of all other replicas' rows."""
    return max(hidden + mlp.per_token * (hidden + (count - 1) * (2 * hidden + 3 * mlp.size)) for mlp in mlps)
