"""What ops are asked for where several processes compute a step together, each its part of every product."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from specserve.errors import ConfigError

Gather: TypeAlias = Callable[[list[Tensor], int], None]
Shared: TypeAlias = mmap.mmap | memoryview


class Peers(Protocol):
    """The processes of one model. Each calls the same ops with the same numbers of rows, and waits in them for the
    others."""

    rank: int
    count: int

    def leave(self) -> None:
        """Let nobody wait for anybody any more, now or ever. What ops give from then on is nothing."""

    @property
    def has_left(self) -> bool: ...


class PeerOps(Protocol):
    """The part of the op contract that is for them."""

    def peers(self, memory: Shared, rank: int, count: int, gather: Gather | None = None) -> Peers:
        """Those that have mapped this memory, which was zeros at first. Without memory that all can map, `gather` is
        given the parts of all ranks, uint8 [bytes], and the own rank, fills the other parts with what those have in
        theirs, and raises where it cannot; it may be called on any thread. Raises ConfigError where there are no
        kernels for them."""

    def sum_peers(self, x: Tensor, peers: Peers) -> Tensor:
        """The sum of all ranks' x float32 [rows, any], rank after rank. `x` is overwritten."""

    def share_broken(self, rows: int, plan: Any, peers: Peers) -> None:
        """Let `broken_rows` of the plan of a step of so many rows tell those of all ranks."""

    def gather_peers(self, x: Tensor, widths: Sequence[int], peers: Peers) -> Tensor:
        """All ranks' x float32 [rows, own width] side by side, whose `widths` these are."""


class NoPeers:
    """For backends without kernels for them."""

    name: str

    def peers(self, memory: Shared, rank: int, count: int, gather: Gather | None = None) -> Peers:
        raise ConfigError(
            f"--tensor-parallel-size, --pipeline-parallel-size: the {self.name} kernels compute no model in several "
            "processes; the native ones for CPUs do."
        )

    def sum_peers(self, x: Tensor, peers: Peers) -> Tensor:
        raise AssertionError("there are no peers")

    def share_broken(self, rows: int, plan: Any, peers: Peers) -> None:
        raise AssertionError("there are no peers")

    def gather_peers(self, x: Tensor, widths: Sequence[int], peers: Peers) -> Tensor:
        raise AssertionError("there are no peers")
