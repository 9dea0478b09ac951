"""How KV that another engine has computed of a prompt reaches the sequence that needs it: the contract of a connector,
and the one that connects to nobody. After vLLM's KVConnectorBase_V1, with completions and failures in one snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from specserve.types import Sequence


class Arrival(NamedTuple):
    """The blocks of a sequence hold KV of its first `num_tokens` tokens, whole blocks, and of the first `num_drafted`
    of them that of a drafter's model, too. That took so long."""

    seq: Sequence
    num_tokens: int
    num_drafted: int
    seconds: float = 0.0


class Failed(NamedTuple):
    """What was to come will not; why, in a sentence."""

    seq: Sequence
    reason: str


@dataclass(slots=True)
class News:
    """What has come to an end since the last look: each sequence that was begun appears in it once, or was ended."""

    arrivals: list[Arrival] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)

    @property
    def seqs(self) -> list[Sequence]:
        """All of them."""
        return [each.seq for each in self.arrivals] + [each.seq for each in self.failures]


class Connector(Protocol):
    """The thread that calls Engine.step calls everything, between steps. The scheduler asks `num_available`, reserves
    blocks, and calls `begin`; then the connector owns what these blocks hold until it names the sequence in a `poll` or
    is told to `end` it. It fails what takes too long."""

    def num_available(self, seq: Sequence) -> int:
        """How many tokens after `seq.cached`, whole blocks, can be had from elsewhere; 0: none, or not any more."""

    def begin(self, seq: Sequence) -> None:
        """Bring them: the blocks for them are the sequence's, from index `seq.cached` on."""

    def poll(self) -> News:
        """What has arrived or failed since the last call. Writes what is there to be written, and waits for nothing."""

    def end(self, seq: Sequence) -> None:
        """Its blocks are taken away: nothing may be written to them any more."""


class NoConnector:
    """Nothing can be had from elsewhere."""

    def num_available(self, seq: Sequence) -> int:
        return 0

    def begin(self, seq: Sequence) -> None:
        raise AssertionError("nothing was available")

    def poll(self) -> News:
        return News()

    def end(self, seq: Sequence) -> None:
        raise AssertionError("nothing was begun")
