"""Numbers in JSON that end: each gets at most so many digits, unless its schema itself asks for more. A model that is
at a loss would otherwise write digits for ever. Whatever backend made a grammar, its masks are cut down here, so that
all of them write the same numbers.

What a schema asks for always wins: where a grammar leaves nothing but further digits, they may come, first of all those
after which the number can end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specserve.config import DEFAULT_MAX_NUMBER_DIGITS
from specserve.structured import walk
from specserve.structured.base import Grammar, Vocabulary
from specserve.types import GrammarState, Ids

_EXPONENT_DIGITS = 3  # floats need no more
_TOO_MANY = 2**15 - 1  # digits: what no number has left

# Where in a text a place is: in no JSON, between the tokens of JSON, in a string, after a backslash in one, in a
# number before its exponent or in that, in null, true or false.
_OUTSIDE, _BETWEEN, _STRING, _ESCAPE, _MANTISSA, _EXPONENT, _WORD = range(7)
_MANTISSA_PIECE = re.compile(rb"([0-9]*)(\.?)([0-9]*)(?:[eE][+-]?([0-9]*))?")
_EXPONENT_PIECE = re.compile(rb"[+-]?([0-9]*)")
_NUMBER = re.compile(rb"[0-9][0-9.]*")
_QUOTE, _BACKSLASH = b'"\\'
_OPENING, _CLOSING, _DIGITS = frozenset(b"{["), frozenset(b"}]"), frozenset(b"0123456789")
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_GOING_ON = {_MANTISSA: b".", _EXPONENT: b"+-", _WORD: _LETTERS}
_LONGEST_BEFORE = 64  # bytes of a text that JSON follows: enough to know it by


class Place(NamedTuple):
    """How far a text has come. `left`: digits that the number, or its exponent, may still get. `before`: the last
    bytes of text that is no JSON."""

    where: int
    depth: int = 0
    left: int = 0
    before: bytes = b""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where JSON stands in a text: at its start, and after each of these texts, of which the end suffices; and the
    digits of its numbers."""

    most: int
    at_start: bool = True
    after: tuple[bytes, ...] = ()


class NumberTokens:
    """For one vocabulary: which tokens may go on a number that has so many digits left."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size, self._num_words = vocabulary.size, vocabulary.num_words
        self.spelled = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        self._mantissa, self._exponent, self._begun = np.zeros((3, self._size), np.int16)
        for token, text in enumerate(self.spelled):
            if text[:1] in b"0123456789.eE+-":
                self._mantissa[token], self._exponent[token] = _needs(text)
            if len(text) > DEFAULT_MAX_NUMBER_DIGITS:
                self._begun[token] = max((len(found) for found in _NUMBER.findall(text)), default=0)
        self._rows = {_MANTISSA: self._of(self._mantissa), _EXPONENT: self._of(self._exponent)}
        self._beginnings: dict[int, Ids | None] = {}
        self.digits = [token for token, text in enumerate(self.spelled) if len(text) == 1 and text in b"0123456789"]
        self.ending = self._packed(self._mantissa == 0)
        for name, token in vocabulary.controls.items():  # JSON may follow them
            self.spelled[token] = name.encode()

    def row(self, where: int, left: int) -> Ids | None:
        """The bits of the tokens that may come there; None where all may."""
        rows = self._rows[where]
        return rows[min(left, len(rows) - 1)]

    def beginning(self, most: int) -> Ids | None:
        """As `row`, where a number may begin."""
        if most not in self._beginnings:
            fits = self._begun <= most
            self._beginnings[most] = None if fits.all() else self._packed(fits)
        return self._beginnings[most]

    def _of(self, needs: Any) -> list[Ids | None]:
        most = int(needs[needs < _TOO_MANY].max(initial=0))
        return [None if (needs <= left).all() else self._packed(needs <= left) for left in range(most + 1)]

    def _packed(self, fits: Any) -> Ids:
        bits = np.zeros(32 * self._num_words, np.bool_)
        bits[: self._size] = fits
        row: Ids = np.packbits(bits, bitorder="little").view(np.int32)
        return row


def _needs(text: bytes) -> tuple[int, int]:
    """The digits that a number must have left for a token that goes on in it, and an exponent likewise. After a point
    there must be one."""
    found = _MANTISSA_PIECE.match(text)
    exponent = _EXPONENT_PIECE.match(text)
    assert found is not None and exponent is not None, "they match anything"
    mantissa = len(found[1]) + (len(found[3]) or len(found[2]))
    return _TOO_MANY if len(found[4] or b"") > _EXPONENT_DIGITS else mantissa, len(exponent[1])


class BoundedGrammar:
    """A grammar whose numbers end."""

    def __init__(self, grammar: Grammar, tokens: NumberTokens, extent: Extent) -> None:
        self._grammar = grammar
        self._reader = _Reader(tokens, extent)

    @property
    def num_bytes(self) -> int:
        return self._grammar.num_bytes

    def start(self) -> BoundedState:
        return BoundedState(self._grammar.start(), self._reader)


class _Reader:
    """Follows the texts of one grammar."""

    def __init__(self, tokens: NumberTokens, extent: Extent) -> None:
        self.tokens = tokens
        self.start = Place(_BETWEEN if extent.at_start else _OUTSIDE)
        self._most = extent.most
        self._after = tuple(text[-_LONGEST_BEFORE:] for text in extent.after)
        self._kept = max(map(len, self._after), default=0)
        self._last = frozenset(text[-1] for text in self._after)

    def row(self, place: Place) -> Ids | None:
        """The bits of the tokens that a number's end leaves; None for all."""
        if place.where in (_MANTISSA, _EXPONENT):
            return self.tokens.row(place.where, place.left)
        return self.tokens.beginning(self._most) if place.where == _BETWEEN else None

    def after(self, place: Place, token: int) -> Place:
        """Whatever has come is followed: a number that had to be longer has no digits left."""
        text = self.tokens.spelled[token] if 0 <= token < len(self.tokens.spelled) else b""
        if place.where == _STRING and _QUOTE not in text and _BACKSLASH not in text:
            return place
        if place.where == _OUTSIDE and not self._kept:
            return place
        for byte in text:
            place = self._next(place, byte)
        return place

    def _next(self, place: Place, byte: int) -> Place:
        where, depth, left, _ = place
        if where == _STRING:
            return self._ended(depth) if byte == _QUOTE else Place(_ESCAPE, depth) if byte == _BACKSLASH else place
        if where == _ESCAPE:
            return Place(_STRING, depth)
        if where in (_MANTISSA, _EXPONENT) and byte in _DIGITS:
            return Place(where, depth, max(0, left - 1))
        if where == _MANTISSA and byte in b"eE":
            return Place(_EXPONENT, depth, _EXPONENT_DIGITS)
        if byte in _GOING_ON.get(where, b""):
            return place
        if where in (_MANTISSA, _EXPONENT, _WORD):
            place = self._ended(depth)
        return self._between(place, byte) if place.where == _BETWEEN else self._outside(place, byte)

    def _between(self, place: Place, byte: int) -> Place:
        depth = place.depth
        if byte == _QUOTE:
            return Place(_STRING, depth)
        if byte in _OPENING:
            return Place(_BETWEEN, depth + 1)
        if byte in _CLOSING:
            return self._ended(depth - 1)
        if byte in _DIGITS:  # a zero in front of the point is none of them
            return Place(_MANTISSA, depth, self._most - (byte != ord("0")))
        return Place(_WORD) if not depth and byte in _LETTERS else place

    def _ended(self, depth: int) -> Place:
        """After a value."""
        return Place(_BETWEEN, depth) if depth > 0 else Place(_OUTSIDE)

    def _outside(self, place: Place, byte: int) -> Place:
        if not self._kept:
            return place
        before = (place.before + bytes((byte,)))[-self._kept :]
        return Place(_BETWEEN) if byte in self._last and before.endswith(self._after) else Place(_OUTSIDE, 0, 0, before)


class BoundedState:
    """A grammar's state, and where in JSON its text is."""

    def __init__(self, state: GrammarState, reader: _Reader) -> None:
        self._state = state
        self._reader = reader
        self._places = [reader.start]

    def fill(self, row: Ids) -> None:
        self._state.fill(row)
        allowed = self._reader.row(self._places[-1])
        if allowed is not None and row.any():
            limited = row & allowed
            row[:] = limited if limited.any() else self._last_digits(row)

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        self._state.fill_draft(tokens, parents, ends, rows)
        places, stands = [self._places[-1]], [True]
        limits = [self._reader.row(places[0])]
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            limit = limits[parent + 1]
            stands.append(stands[parent + 1] and (limit is None or _has(limit, token)))
            places.append(self._reader.after(places[parent + 1], token))
            limits.append(self._reader.row(places[-1]))
        for row, limit, may_stand in zip(rows, limits, stands, strict=True):
            if not may_stand:
                row[:] = 0
            elif limit is not None and row.any():
                row &= limit
                if not row.any():  # further digits may come after all
                    walk.fill_draft(self, tokens, parents, ends, rows)
                    return

    def allows(self, token: int) -> bool:
        return self._may_come(token) and self._state.allows(token)

    def advance(self, token: int) -> bool:
        moved = self._may_come(token) and self._state.advance(token)
        if moved:
            self._places.append(self._reader.after(self._places[-1], token))
        return moved

    def rollback(self, n: int) -> None:
        if n:
            self._state.rollback(n)
            del self._places[-n:]

    def jump_forward(self) -> list[int]:
        """What all texts of the grammar go on with, those whose numbers end do, too."""
        return self._state.jump_forward()

    def _may_come(self, token: int) -> bool:
        """Whether a token is left, as far as numbers are concerned."""
        allowed = self._reader.row(self._places[-1])
        if allowed is None or _has(allowed, token):
            return True
        row = np.zeros_like(allowed)
        self.fill(row)
        return _has(row, token)

    def _last_digits(self, row: Ids) -> Ids:
        """Of a row that leaves digits alone, those after which the number may end; all, where there are none."""
        found, after = np.zeros_like(row), np.zeros_like(row)
        for token in self._reader.tokens.digits:
            if _has(row, token) and self._state.advance(token):
                self._state.fill(after)
                if (after & self._reader.tokens.ending).any():
                    found.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
                self._state.rollback(1)
        return found if found.any() else row


def _has(row: Ids, token: int) -> bool:
    return 0 <= token < 32 * len(row) and bool(row.item(token >> 5) >> (token & 31) & 1)
