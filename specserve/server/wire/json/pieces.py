"""JSON as the server writes it: small values at once, and long lists piece by piece, so that no answer holds up others
while it is written, nor is ever in memory as objects."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from typing import Any, Protocol

import msgspec

_CHARACTERS_AT_ONCE = 2**16
AT_ONCE = 64  # members that are made and written at once; with 20 log-probabilities each they take 2 ms


class Entries(Sized, Iterable[Any], Protocol):
    """What members are made of."""


class LazyList:
    """A list in a body whose members are made when they are looked at: `make` of each of the entries, written
    `at_once` of them at a time."""

    def __init__(self, entries: Entries, make: Callable[[Any], Any], at_once: int = AT_ONCE) -> None:
        self._parts = [(entries, make)]
        self.at_once = at_once

    def __len__(self) -> int:
        return sum(len(entries) for entries, _ in self._parts)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(map(make, entries) for entries, make in self._parts)

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __add__(self, other: LazyList) -> LazyList:
        """Both lists as one."""
        joined = LazyList((), list)
        joined._parts = self._parts + other._parts
        return joined

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyList | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class LongString:
    """A text in a body that is written in pieces."""

    def __init__(self, text: str) -> None:
        self.text = text


def _plain(value: Any) -> Any:
    if isinstance(value, LazyList):
        return list(value)
    if isinstance(value, LongString):
        return value.text
    raise TypeError(f"{type(value).__name__} is no JSON")


_SMALL: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
_encode = json.JSONEncoder(**_SMALL, default=_plain).encode


def json_text(body: Mapping[str, object]) -> str:
    """One line of JSON. Raises ValueError for a number that is not finite."""
    return _encode(body)


def json_pieces(body: Mapping[str, object]) -> Iterator[bytes]:
    """As `json_text`, in pieces: a LazyList is written a few of them at a time, and so is a LongString."""
    mark = secrets.token_hex(16)  # stands where those do; nobody can have put it into a text
    found: list[LazyList | LongString] = []

    def stand_in(value: Any) -> str:
        assert isinstance(value, LazyList | LongString), f"{type(value).__name__} is no JSON"
        found.append(value)
        return mark

    text = json.JSONEncoder(**_SMALL, default=stand_in).encode(body)
    for long, around in zip([None, *found], text.split(f'"{mark}"'), strict=True):
        if long is not None:
            yield from _list(long) if isinstance(long, LazyList) else _string(long.text)
        yield around.encode()


class LongText:
    """The JSON of a body that is long, made when it is sent."""

    def __init__(self, body: Mapping[str, object]) -> None:
        self.body = body

    def pieces(self) -> Iterator[bytes]:
        return json_pieces(self.body)


def _list(members: LazyList) -> Iterator[bytes]:
    left, before = iter(members), b"["
    while batch := list(islice(left, members.at_once)):
        yield before + msgspec.json.encode(batch)[1:-1]
        before = b","
    yield b"[]" if before == b"[" else b"]"


def _string(text: str) -> Iterator[bytes]:
    yield b'"'
    for at in range(0, len(text), _CHARACTERS_AT_ONCE):
        yield msgspec.json.encode(text[at : at + _CHARACTERS_AT_ONCE])[1:-1]
    yield b'"'
