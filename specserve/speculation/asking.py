"""What asking drafters takes whose drafts are verified whole: by length, and for what they must read before."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

_LEARNS = 0.1  # share of what was measured last
_HELD_UP = 8.0  # times what was expected: more was a pause of the machine
ON_THE_WAY = 16  # tokens that a draft's first pass reads with the last one


class Asked(NamedTuple):
    """One sequence that a drafter was asked for."""

    length: int  # most tokens of its draft
    unread: int  # tokens of the sequence that the drafter's own model had not computed


class AskingCost:
    """Seconds that one drafter takes for one sequence: per draft by its length, and per token that it has to read
    before its first one. Lengths nobody asked for yet are expected to take what the next longer one takes, or else
    proportionally more than the next shorter one."""

    def __init__(self) -> None:
        self._drafts: dict[int, float] = {}
        self._per_token = 0.0  # of reading

    def of(self, length: int) -> float:
        if not length or not self._drafts:
            return 0.0
        if length in self._drafts:
            return self._drafts[length]
        longer = [known for known in self._drafts if known > length]
        if longer:
            return self._drafts[min(longer)]
        longest = max(self._drafts)
        return self._drafts[longest] * length / longest

    def reading(self, unread: int) -> float:
        """Seconds of reading so many tokens, as far as is known."""
        return self._per_token * unread if self.has_to_read(unread) else 0.0

    @staticmethod
    def has_to_read(unread: int) -> bool:
        """Whether they are more than a draft's first pass reads on the way."""
        return unread > ON_THE_WAY

    def learn(self, asked: Many[Asked], seconds: float) -> tuple[float, list[float]]:
        """Asking for these drafts took `seconds`. Returns what of it was for drafts, and for reading by sequence."""
        expected = sum(self.of(each.length) for each in asked)
        unread = [each.unread if self.has_to_read(each.unread) else 0 for each in asked]
        if any(unread):
            read = max(0.0, seconds - expected) / sum(unread)
            if not self._drafts:  # the first drafts of all: what they took themselves shows with the next
                self._per_token = read
                return 0.0, [read * count for count in unread]
            read = min(read, _HELD_UP * self._per_token) if self._per_token else read
            self._per_token += (read - self._per_token) * (_LEARNS if self._per_token else 1.0)
            return expected, [read * count for count in unread]
        counted = min(seconds, _HELD_UP * expected) if expected else seconds
        length = max(1, round(sum(each.length for each in asked) / len(asked)))
        per_draft, before = counted / len(asked), self._drafts.get(length)
        self._drafts[length] = per_draft if before is None else before + _LEARNS * (per_draft - before)
        return counted, [0.0] * len(asked)
