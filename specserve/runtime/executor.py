"""What computes a step: the contract between an engine, which decides, and whoever holds the model; and the executor
of one process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from specserve.cache.storage import KVStorage
from specserve.errors import ConfigError
from specserve.models.adapted import PackedAdapter
from specserve.models.decoder import Decoder
from specserve.models.product import LowRank
from specserve.ops import Ops
from specserve.ops.blocks import read_blocks, write_blocks
from specserve.runtime.pack import StepInput
from specserve.runtime.runner import Model, Output
from specserve.sampling.inputs import SamplingOutput
from specserve.sampling.sampler import Sampler
from specserve.types import Ids

# Makes the bits of the tokens that grammars allow at each sampled row of logits, int32 [rows, ceil(vocab / 32)], or
# None where no grammar is asked. Given the rows' best tokens, int64 [rows], it leaves out those that these decide;
# given None, it makes all.
MakeMasks = Callable[[Tensor | None], Ids | None]


@dataclass(slots=True)
class StepOutput:
    """What came of a step. Tensors stay where they were computed, and are valid until the next one begins."""

    sampled: SamplingOutput  # what stands of each draft, the token after it, log-probabilities that were asked for
    broken: list[int] = field(default_factory=list)  # rows of the step whose KV is not what the model computed
    taps: Mapping[int, Tensor] = field(default_factory=dict)  # by layer float32 [rows, hidden], the residual after it
    top: Ids | None = None  # int32 [logit rows, k], the k best tokens of each row, -1 where the logits are broken
    hidden: Tensor | None = None  # float32 [logit rows, hidden], after the final norm
    more_s: float = 0.0  # what other processes took for it one after the other, less how long this one waited for them


class Executor(Protocol):
    """Owns a target with its KV, and what was captured of its step. All that it needs for a step is in the step's
    input: it decides nothing, so that several of them, wherever they run, do the same.

    A step is started, then finished. Up to `most_under_way` may be started before the first of them is finished; they
    are finished in their order. Calls take effect in their order, also those that come while steps are under way, as
    copies of slots do; outputs are set while none is."""

    most_under_way: int
    is_asynchronous: bool  # whether a step is computed without the host's processor once it has started

    block_size: int
    num_blocks: int  # of KV cache, the null block included
    row_multiple: int  # that the rows of a step are padded to
    max_rows: int  # of a step
    max_logit_rows: int  # of these, how many may have logits

    def start(self, step: StepInput) -> None:
        """Begin to compute; whatever the host does before `finish` takes the device no time."""

    def finish(self, masks: MakeMasks) -> StepOutput:
        """What came of it."""

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        """Let slots `targets` hold the KV that `sources` hold, in every layer, a drafter's model's too; all are read
        before any is written."""

    def read_blocks(self, ids: Sequence[int]) -> list[bytes]:
        """The KV in these blocks, between steps: of each the numbers [2, block_size, num_kv_heads, head_dim] of every
        layer, keys before values, the target's layers before those of a drafter's model. In this layout it is of no
        backend, and of all heads whoever holds them."""

    def write_blocks(self, ids: Sequence[int], data: Sequence[bytes]) -> None:
        """Let these blocks hold what was read, of the same number of leading layers each; other layers stay."""

    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None:
        """Show the residual stream after these layers, and so many of the best tokens of each row of logits, with every
        step from now on."""

    def load_adapter(self, digest: str, weights: Mapping[str, LowRank]) -> int:
        """Keep an adapter under that name, packed, until it is dropped as often as it was loaded; returns how many
        bytes it takes. On any thread, beside steps. Raises ModelError for one that the model does not take."""

    def drop_adapter(self, digest: str) -> None:
        """Take one load back. The last one's is in no slot."""

    def place_adapter(self, slot: int, digest: str | None) -> None:
        """Let rows with that slot have this adapter from the next step on, or none."""

    def abandon(self) -> None:
        """Steps under way will not be finished, as one of them was left halfway."""

    def close(self) -> None:
        """End what computes in other processes. Nothing is called afterwards."""


class StepRunner(Protocol):
    """What runs a target's steps, as a Runner does."""

    @property
    def model(self) -> Model: ...
    @property
    def ops(self) -> Ops: ...

    max_rows: int
    max_logit_rows: int
    taps: tuple[int, ...]
    top_k: int

    def start(self, step: StepInput, /) -> None: ...
    def finish(self) -> Output: ...
    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None: ...


class LocalExecutor:
    """An executor whose model runs in this process, or from this process on. `timed` takes the time of a phase, as
    engine.counters has them."""

    most_under_way = 1

    def __init__(
        self,
        runner: StepRunner,
        sampler: Sampler,
        storage: KVStorage,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.runner, self.sampler, self.storage = runner, sampler, storage
        self.block_size, self.num_blocks = storage.block_size, storage.num_blocks
        self.row_multiple = runner.ops.row_multiple
        self.is_asynchronous = runner.ops.device.type != "cpu"
        self.max_rows, self.max_logit_rows = runner.max_rows, runner.max_logit_rows
        self._timed = timed
        self._adapters: dict[str, tuple[PackedAdapter, int]] = {}  # with how many loads there are of it
        self._loading = threading.Lock()
        self._steps: deque[StepInput] = deque()  # under way

    def start(self, step: StepInput) -> None:
        with self._timed("forward"):
            self._steps.append(step)
            self.runner.start(step)

    def finish(self, masks: MakeMasks) -> StepOutput:
        with self._timed("forward"):
            out = self.runner.finish()
        with self._timed("mask"):
            allowed = masks(out.best)
        with self._timed("sample"):
            sampled = self.sampler(out.logits, self._steps.popleft().sampling, allowed, out.best)
        return StepOutput(sampled, out.broken, out.taps, out.top, out.hidden, out.more_s)

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        self.storage.copy_slots(sources, targets)

    def read_blocks(self, ids: Sequence[int]) -> list[bytes]:
        return read_blocks(self.runner.ops, self.storage.layers, self.block_size, ids)

    def write_blocks(self, ids: Sequence[int], data: Sequence[bytes]) -> None:
        write_blocks(self.runner.ops, self.storage.layers, self.block_size, ids, data)

    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None:
        self.runner.set_outputs(taps, top_k)

    def load_adapter(self, digest: str, weights: Mapping[str, LowRank]) -> int:
        known = self._adapters.get(digest)
        packed = self._adapted.pack_adapter(weights) if known is None else known[0]
        with self._loading:
            packed, count = self._adapters.get(digest, (packed, 0))
            self._adapters[digest] = packed, count + 1
        return packed.num_bytes

    def drop_adapter(self, digest: str) -> None:
        with self._loading:
            packed, count = self._adapters.pop(digest)
            if count > 1:
                self._adapters[digest] = packed, count - 1

    def place_adapter(self, slot: int, digest: str | None) -> None:
        self._adapted.place_adapter(slot, None if digest is None else self._adapters[digest][0])

    def abandon(self) -> None:
        self._steps.clear()

    def close(self) -> None:
        """There is none."""

    @property
    def _adapted(self) -> Decoder:
        model = self.runner.model
        assert isinstance(model, Decoder) and model.num_adapter_slots, "only such models have slots"
        return model


def local(executor: Executor) -> LocalExecutor:
    """An executor whose insides may be looked at. Raises ConfigError for one whose model runs elsewhere."""
    if not isinstance(executor, LocalExecutor):
        raise ConfigError("This needs the model in this process, and it runs in another process.")
    return executor
