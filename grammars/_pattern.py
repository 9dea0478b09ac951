"""Regular expressions in the part of their language that means the same everywhere.

For a backend that ignores anchors in the midst and look-around, and takes a dot for any character.
"""

from __future__ import annotations

import re

from specserve.structured.base import RefusedError

_PIECE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^xu])"  # an escape
    r"|\[\^?(?:\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^xu])|[^\]\\\[])+\]"  # a set, without sets inside
    r"|\(\?:|\{\d+(?:,\d*)?\}|[()|^$.*+?]|[^\\\[\]{}()|^$.*+?]",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)
_ESCAPED = re.compile(r'["\x00-\x1f]|\\[\\nrtfv]|\\x(?:[01].|22|5[cC])|\\u00(?:[01].|22|5[cC])')
_LETTERS = frozenset(
    "dwsnrtfv"
)  # that mean no less than they do elsewhere; \D and its like mean more where \d is ASCII
_COMPLEMENTS = re.compile(r"\\[dws]")
_SET_OPERATIONS = ("&&", "--", "~~", "||")
_MOST_REPEATS = 256  # of one thing, also where a repeated group has repeats inside: states and seconds are as many
_MOST_CHARACTERS = 10_000


def exact(pattern: str, in_json: bool = False, dot: str = r"[^\n]") -> str:
    """A pattern that must match all of a text, without anchors and with `dot` for each dot. Raises RefusedError for
    what is read differently. With `in_json`, as in JSON Schema, where a pattern is looked for anywhere in a text, one
    that is not bound to both ends is refused; else anchors at the ends may be left out. So is one that asks for a
    character that JSON escapes: it would come unescaped."""
    if not isinstance(pattern, str):
        raise RefusedError("a pattern is a text.")
    if len(pattern) > _MOST_CHARACTERS:
        raise RefusedError(f"the pattern has {len(pattern)} characters; at most {_MOST_CHARACTERS} are taken.")
    pieces = _pieces(pattern)
    anchored = [pieces[:1] == ["^"], pieces[-1:] == ["$"]]
    if in_json and not all(anchored):
        raise RefusedError(f"{pattern!r} is only enforced with ^ before it and $ behind it.")
    inside = pieces[anchored[0] : len(pieces) - anchored[1]]
    if any(anchored) and "|" in _at_the_top(inside):
        raise RefusedError(f"{pattern!r}: an anchor binds one of several branches only; put them in (?:...).")
    _check_repeats(inside)
    if in_json:
        _check_escaped(inside)
    blanks = " " if in_json else r" \t\n\r\f\v"  # in JSON the others come escaped
    return "".join(dot if piece == "." else _spaced(_checked(piece, pattern), blanks) for piece in inside)


def _pieces(pattern: str) -> list[str]:
    pieces, end = [], 0
    while end < len(pattern):
        found = _PIECE.match(pattern, end)
        if found is None:
            raise RefusedError(f"{pattern[end : end + 9]!r} in a pattern is not enforced exactly.")
        pieces.append(found[0])
        end = found.end()
        if pieces[-1] == "(" and pattern[end : end + 1] == "?":
            raise RefusedError(f"{pattern[end - 1 : end + 3]!r}: groups are (...) or (?:...), without look-around.")
    return pieces


def _at_the_top(pieces: list[str]) -> list[str]:
    """Those in no group."""
    found, depth = [], 0
    for piece in pieces:
        depth += piece.startswith("(")
        if not depth:
            found.append(piece)
        depth -= piece == ")"
    return found


def _check_repeats(pieces: list[str]) -> None:
    """Groups are gone through from their ends, so that how often each is repeated is known before what is inside."""
    times, total, outer = 1, 0, [1]
    for piece in reversed(pieces):
        if piece[0] == "{":
            times = max(map(int, re.findall(r"\d+", piece)))
            total += times * outer[-1]
            if times * outer[-1] > _MOST_REPEATS or total > 2 * _MOST_REPEATS:
                raise RefusedError(
                    f"{piece}: at most {_MOST_REPEATS} repeats are taken, those of groups around it among them, and "
                    f"twice as many in all."
                )
            continue
        if piece == ")":
            outer.append(outer[-1] * times)
        elif piece[0] == "(" and len(outer) > 1:
            outer.pop()
        times = times if piece in ("?", "*", "+") else 1


def _check_escaped(pieces: list[str]) -> None:
    for piece in pieces:
        if _ESCAPED.search(piece) and not piece.startswith("[^"):
            raise RefusedError(f"{piece} stands for a character that JSON escapes.")


def _checked(piece: str, pattern: str) -> str:
    if piece in ("^", "$"):
        raise RefusedError(f"{pattern!r}: {piece} inside a pattern is not enforced.")
    if piece[0] == "\\":
        _check_escape(piece)
    if piece[0] == "[":
        _check_set(piece)
    return _ESCAPE.sub(_four_digits, piece)


def _spaced(piece: str, blanks: str) -> str:
    r"""With the members of \s, which has blanks beyond ASCII for some."""
    if piece == r"\s":
        return f"[{blanks}]"
    return _ESCAPE.sub(lambda escape: blanks if escape[0] == r"\s" else escape[0], piece)


def _four_digits(escape: re.Match[str]) -> str:
    """Behind \\x some read as many digits as there are."""
    return f"\\u00{escape[1]}" if escape[1] else escape[0]


def _check_escape(escape: str) -> None:
    letter = escape[1]
    if (letter.isalnum() and letter not in _LETTERS and letter not in "xu") or not letter.isascii():
        raise RefusedError(f"{escape} in a pattern is not enforced exactly.")


def _check_set(piece: str) -> None:
    for escape in _ESCAPE.finditer(piece):
        _check_escape(escape[0])
    if (piece[1] == "^" and _COMPLEMENTS.search(piece)) or any(sign in piece for sign in _SET_OPERATIONS):
        raise RefusedError(f"the set {piece} in a pattern is not enforced exactly.")
