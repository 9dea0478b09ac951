"""What ops launch, captured as a graph of the device and replayed on inputs that one copy brings there."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.kernels._triton_plan import PARTS, Found, Plan, PlanTensors
from specserve.ops import Input

T = TypeVar("T")
_log = logging.getLogger("specserve.kernels.triton")
_ALIGNMENT = 64  # bytes: kernels are compiled for pointers that 16 divides, and for others anew
_STAGED_BYTES = 2**20  # 512 rows take some 40 KB, the rest is for block ids
# Of the longest context, how many splits a graph is captured for: each takes a program of every row and head, which has
# something to do or not. The first is captured with the recording, others when a context is so long.
_SPLITS = (4, 32, 256, 2**31)


class Staging:
    """Memory of the host, page-locked, and as much on the device: whoever captures shares it, as all of it runs in one
    stream and is copied there before each run."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros(_STAGED_BYTES, dtype=torch.uint8, pin_memory=True)
        self.array: NDArray[np.uint8] = self._host.numpy()
        self.memory = torch.zeros(_STAGED_BYTES, dtype=torch.uint8, device=device)
        self.lock = threading.RLock()  # of whoever writes, copies and replays: a drafter may have a thread of its own
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # torch's own for captures is of the device that captured first.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._has_failed = False
        gc.collect()  # graphs of engines before, whose memory nobody else gives back

    def wait(self) -> None:
        """Until what was written last has left the host."""
        self._copied.synchronize()

    def copy(self, num_bytes: int) -> None:
        """Begin to copy what was written."""
        self.memory[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        self._copied.record()

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Within it nothing runs, and all is captured. Nor is garbage collected: a graph that is destroyed meanwhile,
        as one of an engine before may be, spoils this one."""
        collects, stream = gc.isenabled(), torch.cuda.current_stream(self.memory.device)
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                yield
        finally:
            torch.cuda.set_stream(stream)  # torch leaves its own where a capture fails
            if collects:
                gc.enable()

    def give_up(self, error: Exception) -> None:
        """A graph could not be captured."""
        self._pool = torch.cuda.graph_pool_handle()  # to the one before torch may still believe that it captures
        if not self._has_failed:
            self._has_failed = True
            _log.warning("Some steps run without a graph, slower, as it could not be captured: %s", error)


class _Layout:
    """Places in staged memory, one after the other."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.end = 0  # bytes

    def place(self, count: int, dtype: torch.dtype) -> tuple[NDArray[Any], Tensor]:
        """`count` numbers on the host, and where the device has them."""
        start, stop = self.end, self.end + count * dtype.itemsize
        assert stop <= _STAGED_BYTES, "there is room for the inputs of all rows"
        self.end = stop + -stop % _ALIGNMENT
        on_host = torch.from_numpy(self._staging.array[start:stop]).view(dtype).numpy()
        return on_host, self._staging.memory[start:stop].view(dtype)


class GraphRecording(Generic[T]):
    """`function(plan, *inputs)` for `num_rows` rows, of which `num_gathered` are gathered, as one graph. A run of fewer
    has rows of padding, whose keys and values go nowhere. `block_size` is that of its plans. With `has_flash` steps of
    chains alone have graphs of their own."""

    def __init__(
        self,
        staging: Staging,
        function: Callable[..., T],
        inputs: Sequence[Input],
        num_rows: int,
        num_gathered: int,
        block_size: int,
        has_flash: bool = False,
    ) -> None:
        self._staging, self._has_flash = staging, has_flash
        layout = _Layout(staging)
        self._inputs: list[tuple[NDArray[Any] | None, Tensor]] = []  # where the host writes, and what is read
        self._padding = [each.padding for each in inputs]
        for each in inputs:
            rows = num_gathered if each.is_gathered else num_rows
            if each.columns:
                own = torch.zeros((rows, each.columns), dtype=each.dtype, device=staging.memory.device)
                self._inputs.append((None, own))
            else:
                self._inputs.append(layout.place(rows, each.dtype))
        self._end_of_inputs = layout.end
        dtypes = [torch.int64] + [torch.int32] * (len(PARTS) - 1)
        parts = [layout.place(num_rows, dtype) for dtype in dtypes]
        self._start_of_numbers = layout.end
        self._numbers, numbers = layout.place((_STAGED_BYTES - layout.end) // 4, torch.int32)
        self._parts = [part for part, _ in parts]
        broken = torch.zeros(num_rows, dtype=torch.bool, device=staging.memory.device)
        self._plan = PlanTensors(*(part for _, part in parts), numbers, broken, block_size, 0)
        self._broken = torch.zeros(num_rows, dtype=torch.bool, pin_memory=True)
        self._flags: NDArray[np.bool_] = self._broken.numpy()
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._function = function
        # By splits and whether there are chains alone, and what each finds.
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, T] | None] = {}
        for is_chain in sorted({False, has_flash}):
            self._captured(1, is_chain)

    def takes(self, plan: Plan | None) -> bool:
        """Makes it ready for a context of that length, before it is filled."""
        fits = plan is None or len(plan.numbers) <= len(self._numbers)
        return fits and self._for(plan) is not None

    def _for(self, plan: Plan | None) -> tuple[torch.cuda.CUDAGraph, T] | None:
        return self._captured(1, False) if plan is None else self._captured(plan.num_splits, plan.is_chain)

    def _captured(self, num_splits: int, is_chain: bool) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """The graph for contexts of so many splits, and what it finds; None where it could not be captured."""
        key = next(splits for splits in _SPLITS if splits >= num_splits), is_chain and self._has_flash
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        return self._graphs[key]

    @torch.inference_mode()
    def _capture(self, max_splits: int, is_chain: bool) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """First the function runs, so that whatever is made once is made: kernels, and what they keep. Then it is
        captured, which runs nothing."""
        inputs, plan = [own for _, own in self._inputs], self._plan
        plan.max_splits, plan.is_chain, plan.sequences = max_splits, is_chain, None
        graph, staging = torch.cuda.CUDAGraph(), self._staging
        with staging.lock:
            staging.memory.zero_()  # row 0, token 0, slot 0: what others staged may be no row at all
            self._function(plan, *inputs)
            plan.sequences = None
            try:
                with staging.capturing(graph):
                    if plan.is_used:
                        plan.broken.zero_()
                    return graph, self._function(plan, *inputs)
            except RuntimeError as error:  # as torch calls all that a device or its memory refuses
                staging.give_up(error)
                return None

    def fill(self, inputs: Sequence[NDArray[Any] | Tensor]) -> None:
        self._given = inputs  # until they are copied with the plan

    @torch.inference_mode()
    def start(self, num_rows: int, num_gathered: int, plan: Plan | None) -> None:
        captured = self._for(plan)
        assert captured is not None, "it takes the plan"
        graph, self.found = captured
        with self._staging.lock:
            self._staging.wait()
            self._write_inputs()
            self._staging.copy(self._end_of_inputs if plan is None else self._write(plan))
            graph.replay()
            if plan is not None:
                self._broken.copy_(self._plan.broken, non_blocking=True)
                self._copied.record()
                plan.found = Found(self._flags[: plan.num_rows], self._copied)

    def _write_inputs(self) -> None:
        for (array, own), given, padding in zip(self._inputs, self._given, self._padding, strict=True):
            if array is None:
                assert isinstance(given, Tensor), "rows of several numbers come from the device"
                own[: len(given)].copy_(given)
            else:
                array[: len(given)], array[len(given) :] = given, padding

    def finish(self) -> None:
        """Whatever works on its tensors runs in the same stream, after it."""

    def _write(self, plan: Plan) -> int:
        """Returns where what is staged ends."""
        for part, values, padding in zip(self._parts, plan.arrays, PARTS.values(), strict=True):
            part[: len(values)], part[len(values) :] = values, padding
        count = len(plan.numbers)
        self._numbers[:count] = plan.numbers
        return self._start_of_numbers + 4 * count
