"""Reads a long JSON text as json.loads does, in short steps: that one keeps every other thread from running until it
has read all, for half a second where there are fifteen megabytes. Knows JSON and no fields."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Protocol

MOST_IDS = 2**20  # of one list: to let go of as many takes some milliseconds, too
MOST_VALUES = 2**18  # names too; of numbers, those that are no ids

# All of these are bounded, so that no match takes more than a few milliseconds. The text is bytes read as Latin-1.
_BLANKS = re.compile(r"[ \t\n\r]{0,65536}+")
_UNIT = r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})'
_SLICE = re.compile(rf'(?:[^"\\\x00-\x1f]{{1,64}}+|{_UNIT}){{0,32768}}+')
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LONG_NUMBER = re.compile(r"-?[0-9][-+.eE0-9]{1000,}+")
_IDS = re.compile(r"(?:(?:0|[1-9][0-9]{0,17}+)[ \t\n\r]{0,8}+,[ \t\n\r]{0,8}+){1,1024}+")
_WORDS = {"true": True, "false": False, "null": None}
_CONSTANTS = ("NaN", "Infinity", "-Infinity")


class Numbers(Protocol):
    """How numbers are read."""

    def integer(self, text: str) -> Any: ...
    def float(self, text: str) -> Any: ...
    def constant(self, text: str) -> Any: ...


class TooManyError(ValueError):
    """The text has more than MOST_VALUES values, or a list more than MOST_IDS; `field` of the outermost object is where
    that became so."""

    def __init__(self, field: str | None) -> None:
        super().__init__()
        self.field = field


class TooDeepError(ValueError):
    """The text is nested too deep."""


class Reader:
    """One text. `max_depth` counts lists and objects inside each other."""

    def __init__(self, body: bytes, numbers: Numbers, max_depth: int) -> None:
        self._text = body.decode("latin-1")
        self._numbers = numbers
        self._max_depth = max_depth
        self._num_values = 0
        self._field: str | None = None  # of the outermost object
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
        if first == '"':
            return self._string(at + 1)
        if first == "{":
            return self._members(at + 1, depth + 1, {}, "}", self._member)
        if first == "[":
            return self._members(at + 1, depth + 1, [], "]", self._entry)
        if match := _LONG_NUMBER.match(self._text, at):
            return self._numbers.integer(match.group()), match.end()
        if match := _NUMBER.match(self._text, at):
            integer, fraction, exponent = match.groups("")
            is_whole = not fraction and not exponent
            made = self._numbers.integer(integer) if is_whole else self._numbers.float(match.group())
            return made, match.end()
        for word, value in _WORDS.items():
            if self._text.startswith(word, at):
                return value, at + len(word)
        for word in _CONSTANTS:
            if self._text.startswith(word, at):
                return self._numbers.constant(word), at + len(word)
        raise self._wrong("Expecting value", at)

    def _members(
        self, at: int, depth: int, found: Any, close: str, read: Callable[[int, int, Any], int]
    ) -> tuple[Any, int]:
        """The members of a list or an object, put into `found`."""
        if depth > self._max_depth:
            raise TooDeepError
        at = self._skip(at)
        if self._text.startswith(close, at):
            return found, at + 1
        while True:
            at = self._skip(read(at, depth, found))
            follows = self._text[at : at + 1]
            if follows == close:
                return found, at + 1
            if follows != ",":
                raise self._wrong("Expecting ',' delimiter", at)
            at = self._skip(at + 1)

    def _entry(self, at: int, depth: int, found: list[Any]) -> int:
        if ids := _IDS.match(self._text, at):  # as many at once as go: prompts of ids are lists of a million
            found += map(int, ids.group().rstrip(", \t\n\r").split(","))
            at = ids.end()
            if len(found) > MOST_IDS:
                raise TooManyError(self._field)
        value, end = self._value(at, depth)
        found.append(value)
        return end

    def _member(self, at: int, depth: int, found: dict[str, Any]) -> int:
        if not self._text.startswith('"', at):
            raise self._wrong("Expecting property name enclosed in double quotes", at)
        self._count()
        name, at = self._string(at + 1)
        self._field = name if depth == 1 else self._field
        at = self._skip(at)
        if not self._text.startswith(":", at):
            raise self._wrong("Expecting ':' delimiter", at)
        value, end = self._value(self._skip(at + 1), depth)
        found[self._names.setdefault(name, name)] = value
        return end

    def _string(self, begin: int) -> tuple[str, int]:
        text, at = self._text, begin
        pieces: list[str] = []
        utf8 = codecs.getincrementaldecoder("utf-8")()
        while not text.startswith('"', at):
            match = _SLICE.match(text, at)
            assert match is not None, "it may be empty"
            end = match.end()
            if end == at:
                raise self._broken(at, begin)
            piece = scanstring(utf8.decode(text[at:end].encode("latin-1")) + '"', 0)[0]
            if pieces and _PAIR.match(pair := pieces[-1][-1:] + piece[:1]):  # the halves of one character
                pieces[-1] = pieces[-1][:-1]
                piece = pair.encode("utf-16", "surrogatepass").decode("utf-16") + piece[1:]
            pieces.append(piece)
            at = end
        utf8.decode(b"", final=True)
        return pieces[0] if len(pieces) == 1 else "".join(pieces), at + 1

    def _broken(self, at: int, begin: int) -> json.JSONDecodeError:
        found = self._text[at : at + 2]
        if len(found) < 2 and found in ("", "\\"):
            return self._wrong("Unterminated string starting", begin - 1)
        if found[0] != "\\":
            return self._wrong("Invalid control character", at)
        return self._wrong("Invalid \\uXXXX escape" if found[1] == "u" else "Invalid \\escape", at)

    def _skip(self, at: int) -> int:
        """Behind blanks."""
        while (match := _BLANKS.match(self._text, at)) and match.end() > at:
            at = match.end()
        return at

    def _count(self) -> None:
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            raise TooManyError(self._field)

    def _wrong(self, what: str, at: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(what, "", at)
