"""Steps that several processes compute together, each on a GPU of its own. NCCL brings what each has to all, and they
add it up in the order of the ranks: the order of NCCL's own sums follows from the size of a step, so that a row would
have other bits alone than among others.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.errors import EngineError
from specserve.ops.peers import Gather, Peers, Shared

_LEFT, _LENGTH, _PATH = 0, 1, 8  # places in shared memory: whether one has left; how long the path is, and the path
_PAUSE_S = 0.01


class DevicePeers:
    """Peers that meet when they are first needed, where the first of them says in memory that all have mapped."""

    def __init__(self, memory: Shared, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._memory = memoryview(memory)
        if rank == 0:
            folder = tempfile.mkdtemp(prefix="specserve-")  # nobody else may read it
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            path = str(Path(folder, "peers")).encode()
            self._memory[_PATH : _PATH + len(path)] = path
            self._memory[_LENGTH] = len(path)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x of one shape -> [ranks, *shape]."""
        found = torch.empty((self.count, *x.shape), dtype=x.dtype, device=x.device)
        self._group._allgather_base(found, x.contiguous()).wait()
        return found

    def leave(self) -> None:
        self._memory[_LEFT] = 1
        if "_group" in self.__dict__:
            self._group.abort()

    @property
    def has_left(self) -> bool:
        return bool(self._memory[_LEFT])

    @cached_property
    def _group(self) -> Any:
        """Waits for the first one to say where, and in the first sum for all others."""
        while not self._memory[_LENGTH]:
            if self.has_left:
                raise EngineError("Another process of the model has ended.")
            time.sleep(_PAUSE_S)
        path = bytes(self._memory[_PATH : _PATH + self._memory[_LENGTH]]).decode()
        store = torch.distributed.FileStore(path, self.count)  # type: ignore[attr-defined]  # its types leave it out
        nccl: Any = torch.distributed.ProcessGroupNCCL
        return nccl(store, self.rank, self.count, nccl.Options())


class DevicePeerOps:
    """The ops of steps that several processes compute together."""

    _tensors: Callable[[Any], Any]  # a plan's on the device, as the backend has them

    def peers(self, memory: Shared, rank: int, count: int, gather: Gather | None = None) -> Peers:
        assert gather is None, "start_ranks has refused other hosts"
        return DevicePeers(memory, rank, count)

    def sum_peers(self, x: Tensor, peers: Peers) -> Tensor:
        first, *others = _gathered(x, peers)
        total: Tensor = first.float()
        for each in others:
            total += each
        return total

    def share_broken(self, rows: int, plan: Any, peers: Peers) -> None:
        broken = self._tensors(plan).broken
        broken.copy_(_gathered(broken.view(torch.uint8), peers).any(0))

    def gather_peers(self, x: Tensor, widths: Sequence[int], peers: Peers) -> Tensor:
        own = x.new_zeros((len(x), max(widths)))  # NCCL gathers what is equally large
        own[:, : x.shape[1]] = x
        parts = _gathered(own, peers)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)


def _gathered(x: Tensor, peers: Peers) -> Tensor:
    assert isinstance(peers, DevicePeers), "made by these kernels"
    return peers.gather(x)
