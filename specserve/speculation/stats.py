"""How often draft nodes were accepted: by source, confidence and depth for all sequences together, and by
source for one sequence against all."""

from __future__ import annotations

from specserve.speculation import constants as tuned


class Acceptance:
    """Of the nodes of one source whose parent was accepted, the share that was accepted too.

    A cell is a bucket of confidence and a depth. It begins with what confidence says, so a source need not be
    calibrated; one without confidence has 0.5.
    """

    def __init__(self) -> None:
        cells = range(tuned.BUCKETS * tuned.DEPTHS)
        priors = [(cell // tuned.DEPTHS + 0.5) / tuned.BUCKETS for cell in cells]
        self.rates = priors[:]  # by cell
        self._hits = [tuned.PRIOR * prior for prior in priors]
        self._trials = [tuned.PRIOR] * len(priors)

    @staticmethod
    def cell(confidence: float | None, depth: int) -> int:
        """That of what nothing more is known of: in the middle, where a source has no confidence."""
        bucket = tuned.BUCKETS // 2 if confidence is None else min(int(confidence * tuned.BUCKETS), tuned.BUCKETS - 1)
        return bucket * tuned.DEPTHS + min(depth, tuned.DEPTHS - 1)

    def count(self, cell: int, hit: bool) -> None:
        self._hits[cell] = self._hits[cell] * tuned.KEPT + hit
        self._trials[cell] = self._trials[cell] * tuned.KEPT + 1
        self.rates[cell] = self._hits[cell] / self._trials[cell]


class OwnAcceptance:
    """How often one sequence accepts what a source proposes, as a multiple of how often all do."""

    __slots__ = ("_expected", "_hits", "ratio")

    def __init__(self) -> None:
        self._hits = self._expected = tuned.OWN_PRIOR
        self.ratio = 1.0

    def count(self, hits: float, expected: float) -> None:
        """Nodes that a step has judged: how many were accepted, and of how many that was expected."""
        self._hits = tuned.OWN_KEPT * (self._hits - tuned.OWN_PRIOR) + hits + tuned.OWN_PRIOR
        self._expected = tuned.OWN_KEPT * (self._expected - tuned.OWN_PRIOR) + expected + tuned.OWN_PRIOR
        self.ratio = self._hits / self._expected

    def probability(self, rate: float) -> float:
        """Of a node that all sequences together accept at this rate."""
        return min(rate * self.ratio, 1.0)
