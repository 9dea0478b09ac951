"""What ops are asked for where several processes compute a step together, each its part of every product."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """What replicas of a model that have some of its experts each lay down for each other."""

    max_rows: int  # of a replica in a step
    per_token: int  # experts that a row goes to, at most
    hidden: int  # numbers of a row


class ExpertPeers(Protocol):
    """Replicas of one model with some of its experts each. All of them call the same ops, each with as many rows as it
    has, or none, and wait in them for the others."""

    rank: int
    count: int

    def leave(self) -> None:
        """As Peers.leave."""

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

    def expert_memory(self, count: int, rows: ExpertRows) -> int:
        """The bytes that so many replicas need to have mapped. Raises ConfigError where there are no kernels for
        them."""

    def expert_peers(self, memory: Shared, rank: int, count: int, rows: ExpertRows) -> ExpertPeers:
        """Those that have mapped this memory, which was zeros at first."""

    def some_experts(self, weights: Any, own: range) -> Any:
        """Of packed experts these, in the same memory; the others are never read."""

    def peer_experts(
        self, x: Any, weights: Any, routing: Any, activation: str, shared: Tensor | None, first: int, peers: ExpertPeers
    ) -> Tensor:
        """As `experts`, with the same bits, where `weights` are this replica's: number `first` and those after it."""


class NoPeers:
    """For backends without kernels for them."""

    name: str

    def expert_memory(self, count: int, rows: ExpertRows) -> int:
        raise ConfigError(
            f"--enable-expert-parallel: the {self.name} kernels divide no experts among replicas; the native ones for "
            "CPUs do."
        )

    def expert_peers(self, memory: Shared, rank: int, count: int, rows: ExpertRows) -> ExpertPeers:
        raise AssertionError("there are no peers")

    def some_experts(self, weights: Any, own: range) -> Any:
        raise AssertionError("there are no peers")

    def peer_experts(
        self, x: Any, weights: Any, routing: Any, activation: str, shared: Tensor | None, first: int, peers: ExpertPeers
    ) -> Tensor:
        raise AssertionError("there are no peers")

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
