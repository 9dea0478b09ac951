"""Captures what a function does with ops once, so that it runs again and again without Python."""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import Input, Ops, Recording

T = TypeVar("T")
_log = logging.getLogger(__name__)
_FEW = 8  # rows, at first; gathered rows
LONGEST_S = 120.0  # that a start waits for what it could record later, too
_Size = tuple[int, int]  # rows, gathered rows
_shown: ContextVar[Callable[[Sequence[_Size]], Iterable[_Size]]] = ContextVar("shown", default=iter)
_longest_s: ContextVar[float] = ContextVar("longest_s", default=math.inf)


class Captured(Generic[T]):
    """`function(plan, *inputs)`, which works on rows by ops alone and reads what `inputs` describe. Where ops record,
    it is recorded with inputs that live as long as this, and replayed on what is copied to them; elsewhere it is run
    op by op.

    Ops without buckets record it once, for `max_rows` rows, and again when there are more. Ops with buckets record it
    for each, the largest first, which smaller ones share memory with; where it gathers, once for few gathered rows and
    once for as many as there are rows, as a chunk of a prompt has few that the LM head should read. What is larger than
    the largest bucket, or has a plan that no recording takes, runs op by op: with the same bits. With `max_rows`, and
    `max_gathered` of these, all is recorded at once: no step waits for it then, and who measures steps does not measure
    that; what recording_at_start has no time for is recorded when it is first asked for. `plan` is any plan that it
    will run with.

    What the function returns is valid until the next start: of as many rows as were recorded, or where it ran op by op
    of those that were given, padded to a multiple of ops.row_multiple. A recording points into what the function
    refers to, so that must not be replaced.
    """

    def __init__(
        self,
        ops: Ops,
        function: Callable[..., T],
        inputs: Sequence[Input],
        max_rows: int = 0,
        max_gathered: int | None = None,
        plan: Any = None,
    ) -> None:
        self._ops, self._function, self._inputs = ops, function, inputs
        self._gathers = any(each.is_gathered for each in inputs)
        self._recordings: dict[_Size, Recording[T]] = {}
        self._running: Recording[T] | None = None
        self._most = 0, 0  # of one recording for all
        self._max_gathered = sys.maxsize if max_gathered is None else max_gathered
        if max_rows and ops.records:
            self._record_all(self._sizes(max_rows), plan)

    @property
    def is_replayed(self) -> bool:
        """Whether what was found last lies where the next run of as many rows leaves it, too."""
        return self._running is not None

    def start(
        self, inputs: Sequence[NDArray[Any] | Tensor], num_rows: int, num_gathered: int = 0, plan: Any = None
    ) -> None:
        """Begin: on inputs of `num_rows` rows, or after ops.gather_rows of `num_gathered`. They are arrays on the host
        of one number a row, or float32 tensors [at most num_rows, columns] on the device. All are copied."""
        if self._running is not None:
            self._running.finish()  # of a run that an exception left: its inputs are about to change
        recording = self._running = self._recording(num_rows, num_gathered, plan) if self._ops.records else None
        if recording is None:
            self._found = self.op_by_op(inputs, num_rows, plan)
            return
        recording.fill(inputs)
        recording.start(num_rows, num_gathered, plan)
        self._found = recording.found

    def finish(self) -> T:
        """What came of it. Until then nobody may touch tensors that it works on."""
        if self._running is not None:
            self._running.finish()
        return self._found

    def __call__(self, inputs: Sequence[NDArray[Any] | Tensor], num_rows: int, plan: Any = None) -> T:
        """Start and finish, where all inputs and outputs have a row each."""
        self.start(inputs, num_rows, num_rows, plan)
        return self.finish()

    @torch.inference_mode()
    def op_by_op(self, inputs: Sequence[NDArray[Any] | Tensor], num_rows: int, plan: Any = None) -> T:
        """What comes of it without a recording."""
        return self._function(plan, *map(self._moved, inputs, self._inputs, repeat(num_rows)))

    def _recording(self, num_rows: int, num_gathered: int, plan: Any) -> Recording[T] | None:
        """What serves so many rows, made now where it is not there; None: nothing does."""
        if self._ops.buckets:
            size = self._bucket(num_rows, num_gathered)
        else:
            if num_rows > self._most[0]:
                self._recordings.clear()
                rows = max(num_rows, 2 * self._most[0], _FEW)
                self._most = rows, rows
            size = self._most
        if size is None:
            return None
        found = self._recordings.get(size) or self._record(size, plan)
        return found if found.takes(plan) else None

    def _bucket(self, num_rows: int, num_gathered: int) -> _Size | None:
        buckets = self._ops.buckets
        at = bisect_left(buckets, max(num_rows, num_gathered))
        if at == len(buckets):
            return None
        most = min(buckets[at], self._max_gathered)
        return buckets[at], min(most, _FEW) if self._gathers and num_gathered <= _FEW else most

    def _sizes(self, max_rows: int) -> Sequence[_Size]:
        """All that there will be, the largest first."""
        buckets = self._ops.buckets
        if not buckets:
            self._most = max_rows, min(max_rows, self._max_gathered)
            return [self._most]
        last = min(bisect_left(buckets, max_rows), len(buckets) - 1)
        found = {self._bucket(rows, gathered) for rows in buckets[: last + 1] for gathered in (1, rows)}
        return sorted((size for size in found if size is not None), reverse=True)

    def _record_all(self, sizes: Sequence[_Size], plan: Any) -> None:
        longest_s = _longest_s.get()
        end = time.monotonic() + longest_s
        for size in _shown.get()(sizes):
            if self._recordings and time.monotonic() > end:
                _log.warning(
                    "Of %d graphs %d were captured within %.0f s; the others are when they are first used, which makes "
                    "a step slower each time.", len(sizes), len(self._recordings), longest_s,
                )  # fmt: skip
                break
            self._record(size, plan)

    @torch.inference_mode()
    def _record(self, size: _Size, plan: Any) -> Recording[T]:
        self._recordings[size] = found = self._ops.record(self._function, self._inputs, *size, plan)
        return found

    def _moved(self, given: NDArray[Any] | Tensor, of: Input, num_rows: int) -> Tensor:
        """A copy on the device, as a function may overwrite what it reads, with padding after the last row."""
        multiple = self._ops.row_multiple
        if isinstance(given, Tensor):
            own = self._ops.input_rows(num_rows + -num_rows % multiple, given.shape[1])
            own[: len(given)] = given
            return own
        short = -len(given) % multiple
        padded = np.pad(given, (0, short), constant_values=of.padding) if short else given
        if not padded.flags.writeable:  # it came in a message, and torch warns of such
            padded = padded.copy()
        return torch.from_numpy(padded).to(self._ops.device)


@contextmanager
def recording_at_start(progress: bool, has_peers: bool = False) -> Iterator[None]:
    """What is recorded at once within it has a bar on stderr, if there is to be `progress`, and two minutes: but not
    where a process `has_peers`, which record with it what it records."""
    shown, longest = _shown.set(_with_bar if progress else iter), _longest_s.set(math.inf if has_peers else LONGEST_S)
    try:
        yield
    finally:
        _shown.reset(shown)
        _longest_s.reset(longest)


def _with_bar(sizes: Sequence[_Size]) -> Iterable[_Size]:
    if len(sizes) == 1:  # it is quick, and needs no bars
        return sizes
    from rich.progress import track

    from specserve.terminal import console

    return track(sizes, "Capturing graphs", console=console(stderr=True))


def recorded_bytes(device: torch.device, make: Callable[[], object]) -> int:
    """Bytes of a GPU that are taken while what `make` makes is there: what it recorded, and what running that once left
    with the allocator. It is gone afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info(device)
    made = make()
    torch.cuda.synchronize(device)
    after, _ = torch.cuda.mem_get_info(device)
    del made
    gc.collect()
    torch.cuda.empty_cache()
    return max(0, before - after)
