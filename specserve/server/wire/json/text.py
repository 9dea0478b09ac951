"""A request's body, bytes that anyone may have sent, as one JSON object within limits."""

from __future__ import annotations

import codecs
import itertools
import json
from typing import Any

import msgspec

from specserve.errors import InputError
from specserve.server.wire.json.reader import (
    MAX_DEPTH,
    MAX_DIGITS,
    MOST_IDS,
    MOST_VALUES,
    BadNumberError,
    Reader,
    TooDeepError,
    TooManyError,
)

# What msgspec has read in some two milliseconds, in which no other thread runs.
_SHORT = 2**16  # bytes, whatever they are
LONG, _MOST_MARKS = 2**20, 2**14  # bytes with few commas and brackets among them
_MAX_PATH = 100  # characters of a path that a message shows

_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


def json_object(text: bytes, what: str = "The body") -> dict[str, Any]:
    """The object that `text` holds; messages call it `what`.

    Raises InputError when it is no valid UTF-8, no JSON or no object, is nested deeper than MAX_DEPTH, or has a number
    that is too long or not finite; `param` is then the field that has it.
    """
    if not text.strip():
        raise InputError(f"{what} is empty. Send a JSON object.")
    if text.startswith(codecs.BOM_UTF8):
        raise InputError(f"{what} begins with a byte order mark. JSON is sent without one.")
    value = _at_once(text)
    if value is None:
        value = _in_steps(text, what)
    if not isinstance(value, dict):
        raise InputError(f'{what} must be a JSON object, such as {{"name": "value"}}.')
    return value


def _at_once(text: bytes) -> Any:
    """What msgspec reads; None for what it may take long to read, and what it refuses or takes against the rules."""
    num_opened = text.count(b"[") + text.count(b"{") if len(text) <= LONG else 0
    if len(text) > LONG or (len(text) > _SHORT and num_opened + text.count(b",") > _MOST_MARKS):
        return None
    if _LONG_NUMBER in text.translate(_DIGITS):  # it may also stand in a string
        return None
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return None
    return None if num_opened > MAX_DEPTH and _is_too_deep(value) else value


def _in_steps(text: bytes, what: str) -> Any:
    try:
        return Reader(text).read()
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not valid UTF-8: {error.reason}.") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{what} is not valid JSON: {error.msg} at byte {error.pos}.") from error
    except TooDeepError:
        raise InputError(f"{what} is nested more than {MAX_DEPTH} levels deep. Send a flatter object.") from None
    except BadNumberError as error:
        raise InputError(f"{'.'.join(error.path)[:_MAX_PATH]} {error}.", error.path[0][:_MAX_PATH]) from None
    except TooManyError as error:
        field = (error.field or "")[:_MAX_PATH]
        raise InputError(
            f"{field or what} is too much: a body has at most {MOST_VALUES} names and values, besides token ids, of "
            f"which a list has at most {MOST_IDS}. Send several requests.",
            field or None,
        ) from None


def _is_too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inside = itertools.chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [v for v in inside if isinstance(v, dict | list)]
    return bool(level)
