"""What asking drafters takes that run a model: by the length of drafts, and for what they must read before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence as Many
from typing import NamedTuple

_LEARNS = 0.1  # share of what was measured last
_HELD_UP = 8.0  # times what was expected: more was a pause of the machine
_WARM = 8  # answers of one length to one number of sequences, of which the quickest counts
ON_THE_WAY = 16  # tokens that a draft's first pass reads with the last one


class Asked(NamedTuple):
    """One sequence that a drafter was asked for."""

    length: int  # most tokens of its draft
    unread: int  # tokens of the sequence that the drafter's own model had not computed


class DraftCost:
    """Seconds that one drafter takes for one sequence: per draft by its length, and per token that it has to read
    before its first one. Lengths nobody asked for yet are expected to take what the next longer one takes, or else
    proportionally more than the next shorter one."""

    def __init__(self) -> None:
        self._drafts: dict[int, float] = {}
        self._per_token = 0.0  # of reading

    def of(self, length: int) -> float:
        return _by_length(self._drafts, length) if length and self._drafts else 0.0

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


class SharedDraftCost:
    """Seconds that one drafter takes for one sequence, by its draft's length and by how many share its passes: numbers
    of sequences are told apart by powers of two. What nobody asked for yet is expected to take what was measured of the
    nearest number, by length as DraftCost does."""

    def __init__(self) -> None:
        self._drafts: dict[int, dict[int, float]] = {}  # by power of two, then by length
        self._num_answers: Counter[tuple[int, int]] = Counter()
        self.newest = 0.0  # seconds for one sequence

    def of(self, length: int, num_seqs: int) -> float:
        if not self._drafts:
            return 0.0
        size = num_seqs.bit_length()
        return _by_length(self._drafts[min(self._drafts, key=lambda known: abs(known - size))], length)

    def learn(self, lengths: Many[int], seconds: float) -> float:
        """Asking for drafts of these lengths together took `seconds`; returns what of it was no pause of the
        machine."""
        size, length, per_seq = len(lengths).bit_length(), max(lengths), seconds / len(lengths)
        drafts = self._drafts.setdefault(size, {})
        before = drafts.get(length)
        self._num_answers[size, length] += 1
        if before is None:
            drafts[length] = per_seq
        elif self._num_answers[size, length] <= _WARM:  # the first answers of all take longer
            drafts[length] = min(before, per_seq)
        else:
            per_seq = min(per_seq, _HELD_UP * before)
            drafts[length] = before + _LEARNS * (per_seq - before)
        self.newest = drafts[length]
        return per_seq * len(lengths)


def _by_length(drafts: Mapping[int, float], length: int) -> float:
    """What a draft of that length takes, where those of some lengths are known."""
    if length in drafts:
        return drafts[length]
    longer = [known for known in drafts if known > length]
    if longer:
        return drafts[min(longer)]
    longest = max(drafts)
    return drafts[longest] * length / longest
