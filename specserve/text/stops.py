"""Finds stop strings in text that grows.

Knuth, Morris and Pratt, "Fast pattern matching in strings" (SIAM J. Comput. 6, 1977): how much of a stop string the
text ends with is carried along, so every character is looked at once for each of them, however long they are.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopString:
    """One stop string; the completions of a request share it. Borders are reckoned as far as a text has come: those of
    all stop strings together would take tens of milliseconds at once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = [0, 0]  # [m]: length of the longest proper prefix of text[:m] that also ends it

    def search(self, text: str, begin: int, end: int, matched: int) -> tuple[int, int]:
        """Go on in text[begin:end], before which `matched` characters of the stop string stand. How many stand before
        the place that is reached, and that place: `end`, or where the stop string is complete."""
        pattern, borders = self.text, self._borders
        at = begin
        while at < end:
            if not matched:
                at = text.find(pattern[0], at, end)
                if at < 0:
                    return 0, end
            character = text[at]
            while matched and pattern[matched] != character:
                matched = borders[matched]
            matched += pattern[matched] == character
            at += 1
            if matched == len(pattern):
                return matched, at
            if matched == len(borders):
                borders.append(self._next_border())
        return matched, end

    def _next_border(self) -> int:
        last = self.text[len(self._borders) - 1]
        border = self._borders[-1]
        while border and self.text[border] != last:
            border = self._borders[border]
        return border + (self.text[border] == last)


class StopSearch:
    """Where one completion's text stands among its request's stop strings."""

    def __init__(self, stops: Sequence[StopString]) -> None:
        self._stops = stops
        self._matched = [0] * len(stops)

    @property
    def num_uncertain(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(self._matched, default=0)

    def push(self, text: str, begin: int = 0) -> tuple[int, str] | None:
        """Go on in text[begin:]. Where a stop string is complete first, and which: of two that end together the longer.
        What comes after it is another text."""
        end, found = len(text), ""
        for i, stop in enumerate(self._stops):
            self._matched[i], reached = stop.search(text, begin, end, self._matched[i])
            if self._matched[i] == len(stop.text) and (not found or reached < end or len(stop.text) > len(found)):
                end, found = reached, stop.text
        if not found:
            return None
        self._matched = [0] * len(self._stops)
        return end, found
