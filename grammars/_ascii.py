r"""The classes \d, \w and \s of regular expressions as JSON Schema's patterns and most servers have them: of ASCII,
in the syntax of Rust's regex crate, which several backends read."""

from __future__ import annotations

import re

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}
_PIECE = re.compile(r"\\.|[^\\]+|\\", re.DOTALL)


def in_ascii(pattern: str) -> str:
    r"""The pattern with sets for these classes, in sets too, as a set may hold others. Left to Unicode \d has 760
    digits, and a model that has to write one may take any."""
    return "".join(map(_spelled, _PIECE.findall(pattern)))


def _spelled(piece: str) -> str:
    members = _CLASSES.get(piece[1:].lower()) if len(piece) == 2 and piece[0] == "\\" else None
    if members is None:
        return piece
    return f"[^{members}]" if piece[1].isupper() else f"[{members}]"
