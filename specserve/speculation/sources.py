"""What is known of a source of drafts: what asking it takes, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from specserve.speculation.constants import EXPLORED, HELD_UP, LEARNS, MOST_EXPLORED, ON_THE_WAY, WARM
from specserve.speculation.stats import Acceptance
from specserve.types import Sequence

LOOKUPS = "look-ups"  # all drafters that look things up, which are asked together


class Asked(NamedTuple):
    """One sequence that a source was asked for."""

    length: int  # most tokens of its draft
    unread: int = 0  # tokens of the sequence that the source's own model had not computed


class SourceCost:
    """Seconds that a source takes for one sequence: per draft, by its length and by how many sequences share a pass,
    numbers told apart by powers of two; and per token that it has to read before its first draft. What nobody asked for
    yet is expected to take what was measured of the nearest number of sequences, and there what the next longer draft
    takes, or else proportionally more than the longest."""

    def __init__(self) -> None:
        self._drafts: dict[int, dict[int, float]] = {}  # by power of two, then by length
        self._num_answers: Counter[tuple[int, int]] = Counter()
        self._per_token = 0.0  # of reading

    def of(self, length: int, num_seqs: int = 1) -> float:
        """Of a draft, where so many sequences are asked for together; 0 while nothing is known."""
        if not length or not self._drafts:
            return 0.0
        size = num_seqs.bit_length()
        drafts = self._drafts[min(self._drafts, key=lambda known: abs(known - size))]
        longer = [known for known in drafts if known >= length]
        return drafts[min(longer)] if longer else drafts[max(drafts)] * length / max(drafts)

    def reading(self, unread: int) -> float:
        """Seconds of reading so many tokens, as far as is known."""
        return self._per_token * unread if unread > ON_THE_WAY else 0.0

    def learn(self, asked: Many[Asked], seconds: float) -> tuple[float, list[float]]:
        """Asking for these drafts together took `seconds`. Returns what of it was for drafts, without pauses of the
        machine, and for reading by sequence."""
        num, length = len(asked), max(each.length for each in asked)
        expected = num * self.of(length, num)
        unread = [each.unread if each.unread > ON_THE_WAY else 0 for each in asked]
        if any(unread):
            read = max(0.0, seconds - expected) / sum(unread)
            read = min(read, HELD_UP * self._per_token) if self._per_token else read
            self._per_token += (read - self._per_token) * (LEARNS if self._per_token else 1.0)
            return expected, [read * count for count in unread]
        counted = min(seconds, HELD_UP * expected) if expected else seconds
        known, key = self._drafts.setdefault(num.bit_length(), {}), (num.bit_length(), length)
        newest = counted / num
        before = known.get(length, newest)
        self._num_answers[key] += 1
        warming = self._num_answers[key] <= WARM  # the first answers of all take longer
        known[length] = min(before, newest) if warming else before + LEARNS * (newest - before)
        return counted, [0.0] * num


@dataclass(slots=True)
class Source:
    """What is known of drafters that are asked together."""

    cost: SourceCost = field(default_factory=SourceCost)
    acceptance: Acceptance = field(default_factory=Acceptance)  # by depth, of what it was asked for
    explored: float = 0.0  # seconds for asking it where it seems not to pay, so that it shows when it would
    price: float = 0.0  # seconds that asking it so would have taken last
    gain: float | None = None  # tokens that a draft gained beyond what it took, of those that are verified whole
    catching_up: set[Sequence] = field(default_factory=set)  # that it has read, and that have not paid for it

    def count(self, hits: Many[bool]) -> None:
        """Whether one of the nodes at each depth of a draft, of which there may be none, was accepted."""
        for depth, hit in enumerate(hits):
            self.acceptance.count(Acceptance.cell(None, depth), hit)
            if not hit:
                break

    def may_explore(self, seconds: float) -> bool:
        """Whether what is left for exploring is that much, or nothing is known yet."""
        self.price = seconds
        return not self.cost.of(1) or 0 < seconds <= self.explored

    def explores(self, seconds: float) -> bool:
        """Take so long from what is left for exploring, if that is enough, or if nothing is known yet."""
        if not self.may_explore(seconds):
            return False
        self.explored -= seconds
        return True

    def end_step(self, seconds: float) -> None:
        self.explored = min(self.explored + EXPLORED * seconds, MOST_EXPLORED * self.price)
