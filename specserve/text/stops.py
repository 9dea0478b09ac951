"""Finds stop strings in text that grows, and in texts that part.

Knuth, Morris and Pratt, "Fast pattern matching in strings" (SIAM J. Comput. 6, 1977): how much of a stop string the
text ends with is carried along, so every character is looked at once for each of them, however long they are.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams

MAX_CHARACTER_BYTES = 4


class StopString:
    """One stop string; the completions of a request share it. Where to go on after a mismatch is reckoned as far as a
    text has come: for all stop strings together it would take tens of milliseconds at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        # [m]: where text[:m] stood and text[m] did not come, the length of the longest proper prefix of it that also
        # ends it and that another character follows; -1: none. So one character meets few mismatches, O(log m), also in
        # texts that parted where each would meet all of them again.
        self._after_mismatch = [-1]
        self._border = -1  # the longest proper prefix that also ends the text as far as it is reckoned

    def search(self, text: str, begin: int, end: int, matched: int) -> tuple[int, int]:
        """Go on in text[begin:end], before which `matched` characters of the stop string stand. How many stand before
        the place that is reached, and that place: `end`, or where the stop string is complete."""
        pattern, after_mismatch = self.text, self._after_mismatch
        at = begin
        while at < end:
            if not matched:
                at = text.find(pattern[0], at, end)
                if at < 0:
                    return 0, end
            character = text[at]
            while matched >= 0 and pattern[matched] != character:
                matched = after_mismatch[matched]
            matched += 1
            at += 1
            if matched == len(pattern):
                return matched, at
            if matched == len(after_mismatch):
                self._reckon()
        return matched, end

    def _reckon(self) -> None:
        """One character more."""
        pattern, after_mismatch = self.text, self._after_mismatch
        place, border = len(after_mismatch), self._border
        while border >= 0 and pattern[border] != pattern[place - 1]:
            border = after_mismatch[border]
        self._border = border = border + 1
        after_mismatch.append(after_mismatch[border] if pattern[border] == pattern[place] else border)


class StopSearch:
    """Where one completion's text stands among its request's stop strings; `matched` characters of each of them end
    it."""

    def __init__(self, stops: Sequence[StopString], matched: Sequence[int] = ()) -> None:
        self._stops = stops
        self.matched = list(matched) or [0] * len(stops)

    @property
    def num_uncertain(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(self.matched, default=0)

    def push(self, text: str, begin: int = 0) -> tuple[int, str] | None:
        """Go on in text[begin:]. Where a stop string is complete first, and which: of two that end together the longer.
        What comes after it is another text."""
        end, found = len(text), ""
        for i, stop in enumerate(self._stops):
            self.matched[i], reached = stop.search(text, begin, end, self.matched[i])
            if self.matched[i] == len(stop.text) and (not found or reached < end or len(stop.text) > len(found)):
                end, found = reached, stop.text
        if not found:
            return None
        self.matched = [0] * len(self._stops)
        return end, found


class _Reader:
    """What the texts that came of one have in common."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stops = [StopString(stop) for stop in params.stop]
        self.least = params.min_tokens
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, rest: bytes, token: int) -> tuple[str, bytes]:
        """The text that a token completes, after bytes of an incomplete character, and such bytes after it."""
        self._utf8.setstate((rest, 0))
        text = self._utf8.decode(b"" if token in self._skipped else self._tokenizer.token_bytes(token))
        return text, self._utf8.getstate()[0]


@dataclass(frozen=True, slots=True)
class ForkedText:
    """A text that may go on in several ways, a beam, and where it stands among stop strings: `stop` is the one that
    ends it with its last token, as Detokenizer would. `rest` are bytes of a character that is not complete."""

    reader: _Reader
    matched: tuple[int, ...] = ()
    rest: bytes = b""
    num_tokens: int = 0
    stop: str | None = None

    @classmethod
    def begin(cls, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int]) -> ForkedText:
        reader, rest = _Reader(tokenizer, params), b""
        for token in prompt_ids[-MAX_CHARACTER_BYTES:]:
            rest = reader.decode(rest, token)[1]
        return cls(reader, rest=rest)

    def after(self, token: int) -> ForkedText:
        """With one token more. Must not be called after a stop string."""
        assert self.stop is None, "a text goes on after its end"
        reader, count = self.reader, self.num_tokens + 1
        text, rest = reader.decode(self.rest, token)
        search, begin = StopSearch(reader.stops, self.matched), 0
        while found := search.push(text, begin):
            begin, stop = found
            if count >= reader.least:
                return ForkedText(reader, (), b"", count, stop)
        return ForkedText(reader, tuple(search.matched), rest, count)
