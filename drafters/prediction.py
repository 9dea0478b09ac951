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
from specserve.speculation.retrieval import NGRAMS_PER_STEP, checked_sizes
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
        self._texts: WeakValueDictionary[tuple[bytes, tuple[int, ...]], _Text] = WeakValueDictionary()
        self._of_request: WeakValueDictionary[object, _Text] = WeakValueDictionary()
        self._places: dict[SequenceView, _Place] = {}

    def begin(self, seq: SequenceView) -> None:
        text = self._of_request.get(seq.request)
        if text is None:
            text = self._texts.setdefault((seq.salt, seq.prediction), _Text(seq.prediction, self._sizes))
            self._of_request[seq.request] = text
        self._places[seq] = _Place(text, seq.num_prompt)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = max(1, NGRAMS_PER_STEP // len(self._sizes))  # tokens
        for seq, _ in requests:
            left -= self._places[seq].text.extend(left)
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
        following = place.text.tokens[place.next : place.next + limit]
        return Draft.chain(following, confidence=place.confidence(len(following)), own=range(limit))


class _Text:
    """A prediction, and where its n-grams end, for every n in `sizes` (longest first), but for those that end it."""

    def __init__(self, tokens: tuple[int, ...], sizes: range) -> None:
        self.tokens = tokens
        self.sizes = sizes
        self._ends: dict[tuple[int, ...], int | list[int]] = {}  # indexes of the tokens after it, ascending
        self._last = 0  # n-grams that end at this index or before are in

    @property
    def is_complete(self) -> bool:
        return self._last >= len(self.tokens) - 1

    def extend(self, num_tokens: int) -> int:
        """Take in the n-grams that end with so many tokens more; returns with how many there were."""
        before = self._last
        self._last += max(0, min(num_tokens, len(self.tokens) - 1 - before))
        for end in range(before + 1, self._last + 1):
            for size in self.sizes:
                if size <= end:
                    ngram = self.tokens[end - size : end]
                    there = self._ends.setdefault(ngram, end)
                    if isinstance(there, list):
                        there.append(end)
                    elif there != end:
                        self._ends[ngram] = [there, end]
        return self._last - before

    def find(self, newest: tuple[int, ...], reached: int) -> tuple[int | None, int]:
        """Index of the token after the longest end of `newest` that stands in the text: of the first one after
        `reached`, else of the last one before; and how long that end is."""
        for size in self.sizes:
            if size <= len(newest) and (found := self._ends.get(newest[-size:])):
                ends = found if isinstance(found, list) else [found]
                return ends[min(bisect_right(ends, reached), len(ends) - 1)], size
        return None, 0


class _Place:
    """Where one output stands in its prediction."""

    def __init__(self, text: _Text, num_read: int) -> None:
        self.text = text
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
        text, tokens = self.text, seq.tokens
        for index in range(self._num_read, len(tokens)):
            if self.next is not None and text.tokens[self.next : self.next + 1] == (tokens[index],):
                self.next = self._reached = self.next + 1
                self._run += 1
                self._num_followed += 1
                continue
            self._num_departed += self.next is not None and self.next < len(text.tokens)
            if not text.is_complete:
                self.next, self._num_read = None, index
                return
            first = max(seq.num_prompt, index + 1 - text.sizes[0])
            self.next, self._run = text.find(tuple(tokens[first : index + 1]), self._reached)
        self._num_read = len(tokens)
