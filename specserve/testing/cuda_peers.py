"""What carries tensors between GPUs that are faked, each in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import Tensor

from specserve.testing.cuda_graph import Graph

_Gloo: Any = torch.distributed.ProcessGroupGloo
_LONGEST_WAIT = timedelta(seconds=120)


def faked_nccl(graph: Callable[[], Graph | None], numbers_of: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """While it is open, Gloo gathers the CPU's numbers in place of torch.distributed.ProcessGroupNCCL. `graph` is what
    this thread captures: then it is done at each replay, as a device would, and not before."""

    class Nccl:
        Options = object

        def __init__(self, store: Any, rank: int, size: int, options: object) -> None:
            own = _Gloo._Options()
            own._devices, own._timeout = [_Gloo.create_device(hostname="127.0.0.1")], _LONGEST_WAIT
            self._gloo, self._is_aborted = _Gloo(store, rank, size, own), threading.Event()

        def _allgather_base(self, found: Tensor, own: Tensor) -> _Done:
            numbers, captures = (numbers_of(found), numbers_of(own)), graph()
            if captures is None:
                self._gather(*numbers)
            else:
                captures.overwrites(numbers[:1])
                captures.note(self._gather, numbers, {}, None, is_mutable=True)
            return _Done()

        def _gather(self, found: Tensor, own: Tensor) -> None:
            parts = [part.flatten().view(torch.uint8) for part in found.unbind(0)]
            try:
                self._gloo.allgather([parts], [own.flatten().view(torch.uint8)]).wait()
            except RuntimeError:  # the other one has ended: a device waits for it until somebody ends that
                self._is_aborted.wait(_LONGEST_WAIT.total_seconds())

        def abort(self) -> None:
            self._is_aborted.set()

    return mock.patch.object(torch.distributed, "ProcessGroupNCCL", Nccl, create=True)


class _Done:
    def wait(self) -> None: ...
