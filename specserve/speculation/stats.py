"""How often draft nodes were accepted: by source, confidence, depth and agreement for all sequences together, and by
source for one sequence against all."""

from __future__ import annotations

from enum import IntEnum

_BUCKETS, _DEPTHS = 8, 8  # of confidence, and of depth; deeper is as the deepest
_PRIOR = 4.0  # trials that a source's own confidence counts for
_KEPT = 0.99  # of the weight of what was counted, with each trial: about the last hundred count
_OWN_PRIOR, _OWN_KEPT = 2.0, 0.95  # hits that are expected of a sequence before it has any; of the others' weight
_LEAST, _MOST = 0.01, 0.98


class Agreement(IntEnum):
    """Whether other sources say anything about the same place, and the same."""

    ALONE, AGREED, DISPUTED = range(3)


class Acceptance:
    """Of the nodes of one source whose parent was accepted, the share that was accepted too.

    A cell is a bucket of confidence, a depth and an agreement. It begins with what confidence says, so a source need
    not be calibrated; one without confidence has 0.5.
    """

    UNSURE = _BUCKETS // 2  # the bucket of those without

    def __init__(self) -> None:
        per_bucket = _DEPTHS * len(Agreement)
        priors = [(cell // per_bucket + 0.5) / _BUCKETS for cell in range(_BUCKETS * per_bucket)]
        self.rates = priors[:]  # by cell
        self._hits = [_PRIOR * prior for prior in priors]
        self._trials = [_PRIOR] * len(priors)

    @staticmethod
    def bucket(confidence: float) -> int:
        return min(int(confidence * _BUCKETS), _BUCKETS - 1)

    @staticmethod
    def cell(bucket: int, depth: int, agreement: Agreement) -> int:
        return (bucket * _DEPTHS + min(depth, _DEPTHS - 1)) * len(Agreement) + agreement

    @classmethod
    def unsure(cls, depth: int) -> int:
        """The cell of what nothing is known of but how deep it stands."""
        return cls.cell(cls.UNSURE, depth, Agreement.ALONE)

    def count(self, cell: int, hit: bool) -> None:
        self._hits[cell] = self._hits[cell] * _KEPT + hit
        self._trials[cell] = self._trials[cell] * _KEPT + 1
        self.rates[cell] = self._hits[cell] / self._trials[cell]


class OwnAcceptance:
    """How often one sequence accepts what a source proposes, as a multiple of how often all do."""

    __slots__ = ("_expected", "_hits", "ratio")

    def __init__(self) -> None:
        self._hits = self._expected = _OWN_PRIOR
        self.ratio = 1.0

    def count(self, hits: float, expected: float) -> None:
        """Nodes that a step has judged: how many were accepted, and of how many that was expected."""
        self._hits = _OWN_KEPT * (self._hits - _OWN_PRIOR) + hits + _OWN_PRIOR
        self._expected = _OWN_KEPT * (self._expected - _OWN_PRIOR) + expected + _OWN_PRIOR
        self.ratio = self._hits / self._expected

    def probability(self, rate: float) -> float:
        """Of a node that all sequences together accept at this rate."""
        return min(max(rate * self.ratio, _LEAST), _MOST)
