r"""Control characters in JSON texts as llguidance (1.8 to 1.9.1) must be told of them. JSON has short escapes for five.
Where the others may not be written as \u00XX, it leaves them out of a text without a word: the const "a\u0000b" becomes
"ab". A set of characters that holds all of those others gets the escapes \" and \\ as well, whether it holds these two
characters or not: [^"] takes a quote."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from specserve.structured.base import RefusedError
from specserve.structured.schema.document import reachable

_LONG = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # those that JSON can only write as \u00XX
_PIECE = re.compile(r"\\(?:[xuU]\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_LETTERS = {"a": "\x07", "v": "\x0b", "0": "\0"}
# A set of characters, ranges and the classes \d \w \s: it holds a control character only where it spells one.
_PLAIN_SET = re.compile(r"\[(?:[ -%'-,.-Z_-}]|[!-Z_-~]-[!-Z_-~]|\\[dws.\-/+*?()|{}$@\[\]^])*\]")


def spells_controls(schema: Any) -> bool:
    """Whether a const or an enum has a text that needs long escapes, which are off otherwise: a name that an object
    lists could come again as another spelling of it. Raises RefusedError where both are asked for."""
    schemas = list(reachable(schema))
    needing = next((name for each in schemas for name in ("const", "enum") if _has_long(each.get(name))), None)
    if needing is None:
        return False
    for each in schemas:
        names = each.get("properties") or each.get("required")
        if names and (each.get("additionalProperties") is not False or each.get("patternProperties")):
            raise RefusedError(
                f"{needing}: a control character that JSON writes as \\u00XX is not enforced beside an object that may "
                "have other properties than those it lists. Give that additionalProperties: false."
            )
    return True


def _has_long(value: Any) -> bool:
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, str) and _LONG.search(found):
            return True
        left += found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return False


def exact_sets(root: Any) -> Any:
    """The same document with patterns whose sets are exact; itself, if all are. Raises RefusedError for a pattern that
    has one of those characters outside a set."""
    if all(exact_pattern(pattern) == pattern for each in reachable(root) for pattern in _patterns(each)):
        return root
    made = copy.deepcopy(root)
    for each in list(reachable(made)):
        if isinstance(each.get("pattern"), str):
            each["pattern"] = exact_pattern(each["pattern"])
        if isinstance(each.get("patternProperties"), dict):
            each["patternProperties"] = {exact_pattern(p): inner for p, inner in each["patternProperties"].items()}
    return made


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(schema.get("pattern"), str):
        yield schema["pattern"]
    if isinstance(schema.get("patternProperties"), dict):
        yield from schema["patternProperties"]


def exact_pattern(pattern: str) -> str:
    """The pattern with NUL taken out of all sets that may hold it: no text has one, unless a const does."""
    made: list[str] = []
    inside: list[str] = []  # a set, with those in it
    depth = 0
    for piece in _PIECE.findall(pattern):
        if piece == "[" or depth:
            starts = depth and inside[-1] in ("[", "[^")  # a ] that begins a set is a member of it
            depth += (piece == "[") - (piece == "]" and not starts)
            if piece == "^" and inside[-1] == "[":
                inside[-1] = "[^"
            else:
                inside.append(piece)
            if not depth:
                found = "".join(inside)
                made.append(found if _PLAIN_SET.fullmatch(found) and "&&" not in found else rf"[{found}&&[^\x00]]")
                inside.clear()
        else:
            if _LONG.match(_spelled(piece)):
                raise RefusedError(f"pattern: {piece!r}, which JSON writes as \\u00XX, is not enforced.")
            made.append(piece)
    return "".join(made + inside)


def _spelled(piece: str) -> str:
    """The character that a piece of a pattern is; a class is none."""
    if len(piece) == 1:
        return piece
    if len(piece) == 2:
        return _LETTERS.get(piece[1], "" if piece[1].isalnum() else piece[1])
    code = int(piece[2:].strip("{}"), 16)
    return chr(code) if code < 0x110000 else ""
