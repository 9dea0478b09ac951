"""Follow the text that a request says its answer will mostly be, and find the place again after an edit.

What is predicted is OpenAI's `prediction` parameter (platform.openai.com/docs/guides/predicted-outputs); the matching
is our own.
"""

from __future__ import annotations

from bisect import bisect_right
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from specserve.errors import ConfigError
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.ngrams import NGRAMS_PER_STEP, NgramIndex, PerRequest, suffix_keys
from specserve.types import Draft

PRIORITY = 40  # part of "auto"

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

    needs = Needs()

    def __init__(self, context: DraftContext, match_max: int = 8, match_min: int = 2) -> None:
        whole = all(type(value) is int for value in (match_max, match_min))
        if not whole or not 1 <= match_min <= match_max:
            raise ConfigError(
                f"match_min is {match_min!r} and match_max is {match_max!r}; both must be whole numbers, with "
                "1 <= match_min <= match_max."
            )
        self._sizes = range(match_max, match_min - 1, -1)
        self._texts: WeakValueDictionary[tuple[bytes, tuple[int, ...]], _Text] = WeakValueDictionary()
        self._of_request: PerRequest[_Text] = PerRequest()
        self._places: dict[SequenceView, _Place] = {}

    def begin(self, seq: SequenceView) -> None:
        if seq.prediction:
            text = self._of_request.take(seq, lambda: self._text(seq))
            self._places[seq] = _Place(text, seq.num_prompt)
            self._places[seq].read(seq)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        left = NGRAMS_PER_STEP
        for seq, _ in requests:
            place = self._places.get(seq)
            if place is not None and not place.text.index.is_complete and left > 0:
                left -= place.text.index.extend(left)
        return [self._draft(seq, most) for seq, most in requests]

    def observe(self, step: StepReport) -> None:
        for each in step.seqs:
            if each.verdict is not None and each.seq in self._places:
                self._places[each.seq].read(each.seq)

    def end(self, seq: SequenceView) -> None:
        if self._places.pop(seq, None) is not None:
            self._of_request.give(seq)

    def _text(self, seq: SequenceView) -> _Text:
        key = (seq.salt, seq.prediction)  # by salt: how long it takes must not tell tenants of each other
        text = self._texts.get(key) or _Text(seq.prediction, self._sizes)
        self._texts[key] = text
        return text

    def _draft(self, seq: SequenceView, limit: int) -> Draft:
        place = self._places.get(seq)
        if place is None:
            return Draft.empty()
        place.read(seq)
        if place.next is None:
            return Draft.empty()
        following = place.text.tokens[place.next : place.next + limit]
        return Draft.chain(following, confidence=place.confidence(len(following)), own=range(limit))


class _Text:
    """A prediction, and where its n-grams are, for every n in `sizes` (longest first)."""

    def __init__(self, tokens: tuple[int, ...], sizes: range) -> None:
        self.tokens = tokens
        self.sizes = sizes
        self.index = NgramIndex(tokens, len(tokens), sizes)

    def find(self, newest: tuple[int, ...], reached: int) -> tuple[int | None, int]:
        """Index of the token after the longest end of `newest` that stands in the text: of the first one after
        `reached`, else of the last one before; and how long that end is."""
        keys = suffix_keys(newest, self.sizes[0])
        for size in self.sizes:
            if size <= len(newest) and (ends := self.index.ends(newest, keys, size)):
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
            if not text.index.is_complete:
                self.next, self._num_read = None, index
                return
            first = max(seq.num_prompt, index + 1 - text.sizes[0])
            self.next, self._run = text.find(tuple(tokens[first : index + 1]), self._reached)
        self._num_read = len(tokens)
