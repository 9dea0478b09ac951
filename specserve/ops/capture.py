"""Captures what a function does with ops once, so that it runs again and again without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import Ops, Recording

T = TypeVar("T")
_FEW = 8  # rows, at first


class Captured(Generic[T]):
    """`function(plan, *inputs)`, which works on rows by ops alone. Where ops record, it is recorded once, over
    `buffers(n)`, the inputs of n rows that live as long as this, and replayed on what is copied to them; elsewhere it
    is run op by op. It is made for `max_rows` rows at once, and again when there are more.

    What the function returns is valid until the next start: of as many rows as it was made for where ops record, else
    of those that were given, padded to a multiple of ops.row_multiple. A recording points into what the function
    refers to, so that must not be replaced.
    """

    def __init__(
        self,
        ops: Ops,
        function: Callable[..., T],
        buffers: Callable[[int], Sequence[Tensor]],
        max_rows: int | None = None,
    ) -> None:
        self._ops, self._function, self._buffers = ops, function, buffers
        self._recording: Recording | None = None
        self._max_rows = 0
        if max_rows and ops.records:
            self._record(max_rows)

    def start(
        self, inputs: Sequence[NDArray[Any] | Tensor], num_rows: int, num_gathered: int = 0, plan: Any = None
    ) -> None:
        """Begin: on inputs of `num_rows` rows, or after ops.gather_rows of `num_gathered`. They are arrays on the host
        of one number a row, or float32 tensors [at most num_rows, columns] on the device. All are copied."""
        if not self._ops.records:
            with torch.inference_mode():
                self._found = self._function(plan, *(self._moved(given, num_rows) for given in inputs))
            return
        if num_rows > self._max_rows:
            self._record(max(num_rows, 2 * self._max_rows, _FEW))
        assert self._recording is not None, "it was recorded"
        self._recording.finish()  # of a run that an exception left: its inputs are about to change
        for own, given in zip(self._arrays, inputs, strict=True):
            own[: len(given)] = given if isinstance(given, np.ndarray) else given.numpy()
        self._recording.start(num_rows, num_gathered, plan)

    def finish(self) -> T:
        """What came of it. Until then nobody may touch tensors that it works on."""
        if self._recording is not None:
            self._recording.finish()
        return self._found

    def __call__(self, inputs: Sequence[NDArray[Any] | Tensor], num_rows: int, plan: Any = None) -> T:
        """Start and finish, where all inputs and outputs have a row each."""
        self.start(inputs, num_rows, num_rows, plan)
        return self.finish()

    @torch.inference_mode()
    def _record(self, max_rows: int) -> None:
        self._max_rows = max_rows
        own = self._buffers(max_rows)
        self._arrays = [each.numpy() for each in own]
        with self._ops.recording() as self._recording:
            self._found = self._function(None, *own)

    def _moved(self, given: NDArray[Any] | Tensor, num_rows: int) -> Tensor:
        """A copy on the device, as a function may overwrite what it reads, with zeros after the last row."""
        multiple = self._ops.row_multiple
        if isinstance(given, Tensor):
            own = self._ops.input_rows(num_rows + -num_rows % multiple, given.shape[1])
            own[: len(given)] = given
            return own
        short = -len(given) % multiple
        return torch.from_numpy(np.pad(given, (0, short)) if short else given).to(self._ops.device)
