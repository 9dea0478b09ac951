"""Reads a JSON text in short steps, and says of one that cannot be taken what is wrong and where. It is for what
msgspec does not do: one call of it keeps every other thread from running until all is read, fills the memory with what
the text says, whatever that is, and names no field; half of a surrogate pair it does not read."""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import msgspec

MAX_DEPTH = 64  # of lists and objects inside each other
MAX_DIGITS = 20  # of an integer; 2^64 has 20
MOST_IDS = 2**20  # of one list: to let go of as many takes some milliseconds, too
MOST_VALUES = 2**18  # names too; of numbers, those that are no ids

# All of these are bounded, so that no match takes more than a few milliseconds.
_BLANKS = re.compile(rb"[ \t\n\r]{0,65536}+")
_PAIR = rb"\\u[dD][89abAB][0-9A-Fa-f]{2}\\u[dD][c-fC-F][0-9A-Fa-f]{2}"  # the halves of one character
_SLICE = re.compile(rb'(?:[^"\\\x00-\x1f]{1,64}+|%b|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})){0,32768}+' % _PAIR)
_WORD = re.compile(rb"[-+.0-9A-Za-z]{0,65536}+")  # a number, true, false or null
_IDS = re.compile(rb"(?:(?:0|[1-9][0-9]{0,17}+)[ \t\n\r]{0,8}+,[ \t\n\r]{0,8}+){1,1024}+")
_NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity")


class TooManyError(ValueError):
    """The text has more than MOST_VALUES values, or a list more than MOST_IDS; `field` of the outermost object is where
    that became so."""

    def __init__(self, field: str | None) -> None:
        super().__init__()
        self.field = field


class TooDeepError(ValueError):
    """The text is nested deeper than MAX_DEPTH."""


class BadNumberError(ValueError):
    """A number of the outermost object is not taken; `path` are the names that lead to it."""

    def __init__(self, path: list[str], reason: str) -> None:
        super().__init__(reason)
        self.path = path


class Reader:
    """One text."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._num_values = 0
        self._path: list[str] = []
        self._names: dict[str, str] = {}

    def read(self) -> Any:
        """What the text says. Raises json.JSONDecodeError, whose position counts bytes, UnicodeDecodeError, and the
        errors above."""
        value, end = self._value(self._skip(0), 0)
        end = self._skip(end)
        if end != len(self._text):
            raise self._wrong("Extra data", end)
        return value

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        self._count()
        first = self._text[at : at + 1]
        if first == b'"':
            return self._string(at + 1)
        if first == b"{":
            return self._members(at + 1, depth + 1, {}, b"}", self._member)
        if first == b"[":
            return self._members(at + 1, depth + 1, [], b"]", self._entry)
        return self._word(at)

    def _members(
        self, at: int, depth: int, found: Any, close: bytes, read: Callable[[int, int, Any], int]
    ) -> tuple[Any, int]:
        """The members of a list or an object, put into `found`."""
        if depth > MAX_DEPTH:
            raise TooDeepError
        at = self._skip(at)
        if self._text.startswith(close, at):
            return found, at + 1
        while True:
            at = self._skip(read(at, depth, found))
            if self._text.startswith(close, at):
                return found, at + 1
            if not self._text.startswith(b",", at):
                raise self._wrong("Expecting ',' delimiter", at)
            at = self._skip(at + 1)

    def _entry(self, at: int, depth: int, found: list[Any]) -> int:
        if ids := _IDS.match(self._text, at):  # as many at once as go: prompts of ids are lists of a million
            found += msgspec.json.decode(b"[%b]" % ids.group().rstrip(b", \t\n\r"))
            at = ids.end()
            if len(found) > MOST_IDS:
                raise TooManyError(self._path[0] if self._path else None)
        value, end = self._value(at, depth)
        found.append(value)
        return end

    def _member(self, at: int, depth: int, found: dict[str, Any]) -> int:
        if not self._text.startswith(b'"', at):
            raise self._wrong("Expecting property name enclosed in double quotes", at)
        name, at = self._string(at + 1)
        name = self._names.setdefault(name, name)
        self._path.append(name)
        self._count()
        at = self._skip(at)
        if not self._text.startswith(b":", at):
            raise self._wrong("Expecting ':' delimiter", at)
        found[name], end = self._value(self._skip(at + 1), depth)
        self._path.pop()
        return end

    def _string(self, begin: int) -> tuple[str, int]:
        at, pieces = begin, []
        utf8 = codecs.getincrementaldecoder("utf-8")()  # a slice may end within a character
        while not self._text.startswith(b'"', at):
            match = _SLICE.match(self._text, at)
            assert match is not None, "it may be empty"
            if match.end() == at:
                found = self._text[at : at + 2]
                if found in (b"", b"\\"):
                    raise self._wrong("Unterminated string", begin - 1)
                raise self._wrong("Invalid escape" if found[:1] == b"\\" else "Invalid control character", at)
            pieces.append(scanstring(utf8.decode(match.group()) + '"', 0)[0])
            at = match.end()
        utf8.decode(b"", final=True)
        return pieces[0] if len(pieces) == 1 else "".join(pieces), at + 1

    def _word(self, at: int) -> tuple[Any, int]:
        match = _WORD.match(self._text, at)
        assert match is not None, "it may be empty"
        word = match.group()
        digits = word.removeprefix(b"-")
        if word in _NO_NUMBERS:
            return self._refuse(f"is {word.decode()}; it must be a finite number"), match.end()
        if digits.isdigit() and len(digits) > MAX_DIGITS:
            return self._refuse(f"has {len(digits)} digits; at most {MAX_DIGITS} are taken"), match.end()
        try:
            return msgspec.json.decode(word), match.end()
        except msgspec.ValidationError:
            return self._refuse("is too large for a number"), match.end()
        except msgspec.DecodeError:
            raise self._wrong("Expecting value", at) from None

    def _refuse(self, reason: str) -> float:
        """What stands for the number in a text that holds no object, which is refused for that."""
        if self._path:
            raise BadNumberError(self._path, reason)
        return math.nan

    def _skip(self, at: int) -> int:
        """After blanks."""
        while (match := _BLANKS.match(self._text, at)) and match.end() > at:
            at = match.end()
        return at

    def _count(self) -> None:
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            raise TooManyError(self._path[0] if self._path else None)

    def _wrong(self, what: str, at: int) -> json.JSONDecodeError:
        """Raises UnicodeDecodeError for bytes there that are no UTF-8."""
        codecs.getincrementaldecoder("utf-8")().decode(self._text[at : at + 4])
        return json.JSONDecodeError(what, "", at)
