"""Follow the text that a request says its answer will mostly be, and find the place again after an edit.

What is predicted is OpenAI's `prediction` parameter (platform.openai.com/docs/guides/predicted-outputs); the matching
is our own.
"""

from __future__ import annotations

from bisect import bisect_right
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.retrieval import NGRAMS_PER_STEP, NgramIndex, checked_sizes
from specserve.types import Draft

PRIORITY = 40  # part of "auto"

# What predictions are taken for before anything came of them. Nothing was recorded to fit these to: they are guesses.
_LONG_RUN = 32  # as at the beginning, where the prediction should be right
_PRIOR = (9.0, 1.0)  # tokens followed and departed from, before there are any
_CHANCE = 0.5  # that a place found by one token is the wrong one; by n it is this / n^1.5


class PredictionDrafter:
    """Chains of the prediction's next tokens, from its first one on, for as long as the output follows it.

    Where the output departs, drafts are empty until its newest tokens stand somewhere in the prediction: `match_max` of
    them if possible, else fewer, but at least `match_min`; of several places the nearest after the last token that was
    followed, else the nearest before. The place depends on the output alone, not on how many tokens a step brought.

    All running sequences of the same prediction and salt share what is known of it, of which some hundred tokens are
    taken in with each step's proposals; who departs before that is done waits for it. A step costs O(new tokens), a
    proposal O(draft). Raises ConfigError unless 1 <= match_min <= match_max.
    """

    needs = Needs(observes=False)

    def __init__(self, context: DraftContext, match_max: int = 8, match_min: int = 2) -> None:
        self._sizes = checked_sizes("match_min", match_min, "match_max", match_max)
        # By salt too: how long it takes must not tell tenants of each other. And by request, where nothing is hashed.
        self._indexes: WeakValueDictionary[tuple[bytes, tuple[int, ...]], NgramIndex] = WeakValueDictionary()
        self._of_request: WeakValueDictionary[object, NgramIndex] = WeakValueDictionary()
        self._places: dict[SequenceView, _Place] = {}

    def begin(self, seq: SequenceView) -> None:
        index = self._of_request.get(seq.request)
        if index is None:
            index = self._indexes.setdefault((seq.salt, seq.prediction), NgramIndex(self._sizes))
            self._of_request[seq.request] = index
        self._places[seq] = _Place(index, seq.num_prompt)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = max(1, NGRAMS_PER_STEP // len(self._sizes))  # tokens
        for seq, _ in requests:
            index = self._places[seq].index
            left -= index.extend(seq.prediction, min(index.last + left, len(seq.prediction) - 1))
        return [self._draft(seq, most) for seq, most in requests]

    def observe(self, step: StepReport) -> None:
        """The output is read when a draft is asked for."""

    def end(self, seq: SequenceView) -> None:
        del self._places[seq]

    def _draft(self, seq: SequenceView, limit: int) -> Draft:
        place = self._places[seq]
        place.read(seq)
        if place.next is None:
            return Draft.empty()
        following = seq.prediction[place.next : place.next + limit]
        return Draft.chain(following, confidence=place.confidence(len(following)), own=range(limit))


class _Place:
    """Where one output stands in its prediction."""

    def __init__(self, index: NgramIndex, num_read: int) -> None:
        self.index = index
        self.next: int | None = 0  # index of the predicted token that should come next; None: lost
        self._reached = 0  # index after the last predicted token that did come: a place found by chance does not count
        self._num_read = num_read
        self._run = _LONG_RUN  # tokens up to `next` that output and prediction agree in
        self._num_followed, self._num_departed = _PRIOR  # of the predicted tokens that should have come next

    def confidence(self, count: int) -> NDArray[np.float32]:
        """How likely each of the next tokens comes if those before it do: as often as they came so far, and less so
        where the place was just found."""
        followed = self._num_followed / (self._num_followed + self._num_departed)
        return (followed * (1 - _CHANCE / np.arange(self._run, self._run + count) ** 1.5)).astype(np.float32)

    def read(self, seq: SequenceView) -> None:
        """Follow what is new of the output, token by token, up to where it departs before the place can be found again:
        the rest is read when it can, with no other outcome."""
        text, tokens = seq.prediction, seq.tokens
        for at in range(self._num_read, len(tokens)):
            if self.next is not None and text[self.next : self.next + 1] == (tokens[at],):
                self.next = self._reached = self.next + 1
                self._run += 1
                self._num_followed += 1
                continue
            self._num_departed += self.next is not None and self.next < len(text)
            if self.index.last < len(text) - 1:
                self.next, self._num_read = None, at
                return
            first = max(seq.num_prompt, at + 1 - self.index.sizes[0])
            self._run, ends = self.index.find(tuple(tokens[first : at + 1]))
            # The first place after what was reached, else the last one before.
            self.next = ends[min(bisect_right(ends, self._reached), len(ends) - 1)] if ends else None
        self._num_read = len(tokens)
