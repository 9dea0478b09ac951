"""A request's body, bytes that anyone may have sent, as one JSON object within limits. Knows JSON and no fields."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specserve.errors import InputError
from specserve.server.wire.json_reader import MOST_IDS, MOST_VALUES, Reader, TooDeepError, TooManyError

MAX_DEPTH = 64  # of lists and objects inside each other
_SHORT = 2**16  # bytes; json.loads reads as many in two milliseconds, whatever they are
LONG, _MOST_MARKS = 2**19, 2**12  # bytes that it reads in as little time, with few commas and brackets among them
MAX_DIGITS = 20  # of an integer; 2^64 has 20

# A string, closed or not, or a bracket. Possessive, so that hostile text is read once and never again.
_BRACKET = re.compile(r'"(?:[^"\\]++|\\.?)*+"?|[\[\]{}]', re.DOTALL)
_MAX_PATH = 100  # characters of a path that a message shows


def json_object(text: bytes, what: str = "The body") -> dict[str, Any]:
    """The object that `text` holds; messages call it `what`.

    Raises InputError when it is no valid UTF-8, no JSON or no object, is nested deeper than MAX_DEPTH, or has a number
    that is too long or not finite; `param` is then the field that has it.
    """
    if not text.strip():
        raise InputError(f"{what} is empty. Send a JSON object.")
    if text.startswith(codecs.BOM_UTF8):
        raise InputError(f"{what} begins with a byte order mark. JSON is sent without one.")
    numbers = _Numbers()
    try:
        value = (_loaded if _is_quick(text) else _read)(text, what, numbers)
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not valid UTF-8: {error.reason}.") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{what} is not valid JSON: {error.msg} at {_unit(text)} {error.pos}.") from error
    if not isinstance(value, dict):
        raise InputError(f'{what} must be a JSON object, such as {{"name": "value"}}.')
    if numbers.refused_any:
        _refuse_number(value)
    return value


def _loaded(text: bytes, what: str, numbers: _Numbers) -> Any:
    decoded = text.decode("utf-8")
    try:
        value = json.loads(
            decoded, parse_int=numbers.integer, parse_float=numbers.float, parse_constant=numbers.constant
        )
    except (json.JSONDecodeError, RecursionError):
        if _opens_too_deep(decoded):
            raise _too_deep(what) from None
        raise
    if _is_too_deep(value):
        raise _too_deep(what)
    return value


def _read(text: bytes, what: str, numbers: _Numbers) -> Any:
    """On a thread, beside others."""
    try:
        return Reader(text, numbers, MAX_DEPTH).read()
    except TooDeepError:
        raise _too_deep(what) from None
    except TooManyError as error:
        field = (error.field or "")[:_MAX_PATH]
        raise InputError(
            f"{field or what} is too much: a body has at most {MOST_VALUES} names and values, besides token ids, of "
            f"which a list has at most {MOST_IDS}. Send several requests.",
            field or None,
        ) from None


def _is_quick(text: bytes) -> bool:
    """Whether json.loads, which lets no other thread run, has read it in some two milliseconds."""
    return len(text) <= _SHORT or (len(text) <= LONG and sum(map(text.count, (b",", b"[", b"{"))) <= _MOST_MARKS)


def _unit(text: bytes) -> str:
    """What the position of an error counts."""
    return "character" if _is_quick(text) else "byte"


def _too_deep(what: str) -> InputError:
    return InputError(f"{what} is nested more than {MAX_DEPTH} levels deep. Send a flatter object.")


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inside = itertools.chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [v for v in inside if isinstance(v, dict | list)]
    return bool(level)


def _opens_too_deep(text: str) -> bool:
    """Of a text that is no JSON, whether it is too deep before it ends."""
    depth = 0
    for match in _BRACKET.finditer(text):
        first = text[match.start()]
        depth += (first in "[{") - (first in "]}")
        if depth > MAX_DEPTH:
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands where a number was that is not taken: only the parsed whole tells which field that is."""

    reason: str


class _Numbers:
    """How the parser reads numbers."""

    def __init__(self) -> None:
        self.refused_any = False

    def integer(self, text: str) -> int | _Refused:
        digits = len(text.lstrip("-"))
        return (
            int(text) if digits <= MAX_DIGITS else self._refuse(f"has {digits} digits; at most {MAX_DIGITS} are taken")
        )

    def float(self, text: str) -> float | _Refused:
        value = float(text)
        return value if math.isfinite(value) else self._refuse("is too large for a number")

    def constant(self, text: str) -> _Refused:
        return self._refuse(f"is {text}; it must be a finite number")

    def _refuse(self, reason: str) -> _Refused:
        self.refused_any = True
        return _Refused(reason)


def _refuse_number(fields: dict[str, Any]) -> None:
    """Raise for the first refused number; one that a later equal key has hidden is gone and does no harm."""
    for name, value in fields.items():
        for path, refused in _refused(value, name):
            raise InputError(f"{path[:_MAX_PATH]} {refused.reason}.", name[:_MAX_PATH])


def _refused(value: Any, path: str) -> Iterator[tuple[str, _Refused]]:
    if isinstance(value, _Refused):
        yield path, value
    elif isinstance(value, list):
        for item in value:
            yield from _refused(item, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _refused(item, f"{path}.{key}")
