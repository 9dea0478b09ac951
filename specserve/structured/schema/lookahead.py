"""Patterns with look-aheads as patterns without: a text must match all of those. Regular expressions that grammars are
made of have no look-ahead, but where one stands at the beginning of a pattern it says something about the whole text,
which another pattern can say as well. pydantic's Decimal has such a pattern; so have rules for passwords.

What a look-ahead forbids is turned round where it has one of a few forms: see `_denied`. Other patterns stay as they
are.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

from specserve.structured.schema.document import reachable
from specserve.structured.schema.spelling import all_but
from specserve.structured.spec import RefusedError

_PIECE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\[\^?(?:\\.|[^\]\\])+\]|\(\?(?:<?[=!]|:)|\{[0-9,]+\}|.", re.DOTALL
)
_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
_LINE_ENDS = r"\n\r\u2028\u2029"  # no "." of ECMA-262
_HYPHENS = re.compile(r"^-|(?<!\\)-$")  # at the ends of a set they are no ranges, until others come beside them
_ANY = r"[\s\S]*"
_CHARACTERS = frozenset("dDwWsSnrtfvxu")  # after a backslash


def without_lookaheads(root: Any) -> Any:
    """The same document, with patterns that have no look-ahead where it had those that can be replaced; itself, if it
    has none."""
    if not any(_replaced(schema) for schema in reachable(root)):
        return root
    made = copy.deepcopy(root)
    for schema in list(reachable(made)):
        if patterns := _replaced(schema):
            of_type = {"type": "string"} if schema.get("type") == "string" else {}
            del schema["pattern"]
            if len(patterns) == 1:
                schema["pattern"] = patterns[0]
            else:
                schema["allOf"] = [*schema.get("allOf", ()), *({**of_type, "pattern": each} for each in patterns)]
    return made


def _replaced(schema: dict[str, Any]) -> list[str]:
    pattern = schema.get("pattern")
    return replaced(pattern) if isinstance(pattern, str) else []


def replaced(pattern: str) -> list[str]:
    """Patterns without look-ahead: a text matches all of them if it matches this one. None if it has no look-ahead, or
    one that nothing can stand for."""
    if not any(around in pattern for around in _AROUND):
        return []
    pieces = _PIECE.findall(pattern)
    found, rest = list[str](), pieces[1:]
    if pieces[0] != "^" or "|" in _top(rest):
        return []
    while rest[:1] in (["(?="], ["(?!"]):
        end = _group_end(rest)
        condition = (_demanded if rest[0] == "(?=" else _denied)(rest[1 : end - 1])
        if condition is None:
            return []
        found.append(condition)
        rest = rest[end:]
        if rest[:1] and rest[0][0] in "*+?{":
            return []
    if _says_nothing(rest):
        return found
    own = "".join(rest)
    return [] if any(around in own for around in _AROUND) else [*found, f"^{own}"]


def _group_end(pieces: list[str]) -> int:
    """Behind the group that they begin with."""
    depth = 0
    for place, piece in enumerate(pieces):
        depth += piece.startswith("(") - (piece == ")")
        if not depth:
            return place + 1
    return len(pieces)


def _top(pieces: list[str]) -> list[str]:
    """Those in no group."""
    depth, found = 0, []
    for piece in pieces:
        depth += piece.startswith("(")
        if not depth:
            found.append(piece)
        depth -= piece == ")"
    return found


def _items(pieces: list[str]) -> Iterator[tuple[list[str], str]]:
    """One after the other: a character, a set or a group, and how it is repeated."""
    while pieces:
        end = _group_end(pieces)
        item, pieces = pieces[:end], pieces[end:]
        sign = ""
        while pieces[:1] and (pieces[0] in ("*", "+", "?") or (pieces[0][0] == "{" and len(pieces[0]) > 2)):
            sign, pieces = sign + pieces[0], pieces[1:]
        yield item, sign


def _says_nothing(pieces: list[str]) -> bool:
    """Whether they match the empty text before anything: then any text has a match."""
    return all(sign[:1] in ("*", "?") or sign.startswith(("{0", "{,")) or _may_be_nothing(item)
               for item, sign in _items(pieces))  # fmt: skip


def _may_be_nothing(item: list[str]) -> bool:
    if item[0] not in ("(", "(?:"):
        return False
    inside, branches = item[1:-1], [list[str]()]
    depth = 0
    for piece in inside:
        depth += piece.startswith("(") - (piece == ")")
        if piece == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(piece)
    return any(map(_says_nothing, branches))


# --- what a look-ahead says -------------------------------------------------------------------------------------------


def _demanded(pieces: list[str]) -> str | None:
    """Of the texts that begin with a match of these pieces."""
    says = "".join(pieces).removeprefix("^")
    if any(around in says for around in _AROUND):
        return None
    if "|" not in _top(pieces):
        return f"^{says}"
    return None if {"^", "$"} & set(pieces) else f"^(?:{says})"


def _denied(pieces: list[str]) -> str | None:
    """Of the texts that do not begin with a match of these pieces: a character or a set, once or twice somewhere, or
    all of a text; one of some texts, at its beginning or as a whole. None for other forms."""
    pieces = pieces[1:] if pieces[:1] == ["^"] else pieces
    is_whole = pieces[-1:] == ["$"]
    pieces = pieces[:-1] if is_whole else pieces
    if pieces[:2] in ([".", "*"], [r"[\s\S]", "*"]):
        return None if is_whole else _nowhere(pieces[2:], _LINE_ENDS if pieces[0] == "." else "")
    if is_whole and len(pieces) == 2 and pieces[1] in ("*", "+") and (others := _others(pieces[0])):
        return f"[{others}]" if pieces[1] == "*" else f"^(?:|{_ANY}[{others}]{_ANY})$"
    if not is_whole and len(pieces) == 1 and (others := _others(pieces[0])):
        return f"^(?:|[{others}]{_ANY})$"
    texts = _texts(pieces)
    if texts is None:
        return None
    try:
        return all_but(texts) if is_whole else f"^{_none_begins(texts)}$"
    except RefusedError:
        return None


def _nowhere(pieces: list[str], ends: str) -> str | None:
    """Of the texts without it, before one of `ends` if they have some."""
    is_twice = len(pieces) == 2 and pieces[1] in (pieces[0], "{2}")
    others = _others(pieces[0]) if pieces and (is_twice or len(pieces) == 1) else None
    if others is None or others[0] != "^" or (ends and _may_end_lines(pieces[0])):
        return None
    piece, other = pieces[0], f"[{others}{ends}]"
    rest = f"(?:|[{ends}]{_ANY})$" if ends else "$"
    return f"^(?:{piece}?{other})*{piece}?{rest}" if is_twice else f"^{other}*{rest}"


def _may_end_lines(piece: str) -> bool:
    try:
        return any(re.fullmatch(piece, end) for end in "\n\r\u2028\u2029")
    except re.error:
        return True


def _others(piece: str) -> str | None:
    """The inside of a set of all other characters; None for what is no character and no set of some."""
    if len(piece) > 2 and piece[0] == "[":
        inside = _HYPHENS.sub(r"\\-", piece[2:-1] if piece[1] == "^" else piece[1:-1])
        return f"^{inside}" if piece[1] != "^" else inside if inside[0] != "^" else None
    if piece[0] == "\\":
        return f"^{piece}" if piece[1] in _CHARACTERS or not piece[1].isalnum() else None
    if piece == "-":
        return r"^\-"
    return None if piece in ".^$*+?()|[]" or piece[0] in "({" else f"^{piece}"


def _texts(pieces: list[str]) -> list[str] | None:
    """What they spell, if it is one of some texts."""
    if pieces[:1] in (["("], ["(?:"]) and _group_end(pieces) == len(pieces):
        pieces = pieces[1:-1]
    texts = [""]
    for piece in pieces:
        if piece == "|":
            texts.append("")
        elif len(piece) == 1 and piece not in ".^$*+?()[]{}|":
            texts[-1] += piece
        elif len(piece) == 2 and piece[0] == "\\" and not piece[1].isalnum():
            texts[-1] += piece[1]
        else:
            return None
    return texts if all(texts) else None


def _none_begins(texts: list[str]) -> str:
    """Whatever goes on otherwise than any of them."""
    ordered = sorted(set(texts))
    groups = {first: [text[1:] for text in each] for first, each in itertools.groupby(ordered, lambda text: text[0])}
    others = "".join(f"\\x{{{ord(first):x}}}" for first in groups)
    branches = ["", f"[^{others}]{_ANY}"]
    branches += [f"\\x{{{ord(first):x}}}{_none_begins(rests)}" for first, rests in groups.items() if all(rests)]
    return f"(?:{'|'.join(branches)})"
