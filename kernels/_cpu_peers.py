"""Steps that several processes compute together, on the native kernels: sums in memory that all have mapped."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import specserve.kernels._native as _native
from specserve.kernels._cpu_base import Base
from specserve.kernels._cpu_rows import at
from specserve.ops.peers import ExpertRows, Gather, Peers, Shared

_log = logging.getLogger(__name__)


class CpuPeers:
    """Peers over one piece of memory, which it keeps."""

    def __init__(self, memory: Shared, rank: int, count: int, gather: Gather | None) -> None:
        self.rank, self.count = rank, count
        self._memory = memory
        head = _native.Peers.size(count, 0)
        num_bytes = (len(memory) - head) // (2 * count) // 64 * 64
        gather_places = None if gather is None else _gather(gather, memory, rank, count, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.native = _native.Peers(address, rank, count, num_bytes, gather_places)

    def leave(self) -> None:
        self.native.leave()

    @property
    def has_left(self) -> bool:
        return bool(self.native.has_left)


class CpuExpertPeers:
    """Replicas over one piece of memory, which it keeps."""

    def __init__(self, memory: Shared, rank: int, count: int, rows: ExpertRows, kind: int) -> None:
        self.rank, self.count = rank, count
        self.most_pairs = rows.max_rows * rows.per_token  # of a replica's rows
        self._memory = memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        sizes = rows.max_rows, rows.per_token, kind, rows.hidden, rows.hidden
        self.native = _native.ExpertPeers(address, rank, count, *sizes)

    def leave(self) -> None:
        self.native.leave()

    @property
    def has_left(self) -> bool:
        return bool(self.native.has_left)


class PeerKernels(Base):  # type: ignore[misc]  # the kernels' package is found at run time
    """The ops of steps that several processes compute together."""

    def peers(self, memory: Shared, rank: int, count: int, gather: Gather | None = None) -> CpuPeers:
        return CpuPeers(memory, rank, count, gather)

    def expert_memory(self, count: int, rows: ExpertRows) -> int:
        sizes = rows.max_rows, rows.per_token, self._kind, rows.hidden, rows.hidden
        return int(_native.ExpertPeers.size(count, *sizes))

    def expert_peers(self, memory: Shared, rank: int, count: int, rows: ExpertRows) -> CpuExpertPeers:
        return CpuExpertPeers(memory, rank, count, rows, self._kind)

    def sum_peers(self, x: Tensor, peers: Peers) -> Tensor:
        assert isinstance(peers, CpuPeers) and x.dtype == torch.float32, "made by these kernels"
        with self._program(len(x), x, peers) as program:
            program.sum_peers(peers.native, at(x), x.stride(0))
        return x

    def share_broken(self, rows: int, plan: _native.Plan, peers: Peers) -> None:
        assert isinstance(peers, CpuPeers), "made by these kernels"
        with self._program(rows, peers, plan=plan) as program:
            program.share_broken(peers.native)

    def gather_peers(self, x: Tensor, widths: Sequence[int], peers: Peers) -> Tensor:
        assert isinstance(peers, CpuPeers) and x.shape[1] == widths[peers.rank], "made by these kernels"
        out = self._floats("gather_peers", len(x), sum(widths))
        with self._program(len(x), x, peers) as program:
            program.gather_peers(peers.native, at(x), x.stride(0), list(widths), at(out), out.stride(0))
        found: Tensor = out[:, : sum(widths)]
        return found


def _gather(gather: Gather, memory: Shared, rank: int, count: int, num_bytes: int) -> Callable[[int, int], bool]:
    """As native code calls it: for one of the two places of all ranks in `memory`, filled as far as it says."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    places = [
        [whole[_native.Peers.place_at(count, num_bytes, each, half) :] for each in range(count)] for half in (0, 1)
    ]

    def gather_places(half: int, filled: int) -> bool:
        try:
            gather([place[:filled] for place in places[half]], rank)
        except Exception as error:  # native code is no place for it
            _log.error("Another process of the model cannot be reached: %s", error)
            return False
        return True

    return gather_places
