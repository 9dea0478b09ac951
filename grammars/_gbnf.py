"""Grammars in GBNF, the EBNF of llama.cpp, brought into one form that all backends read alike: a rule a line, rules
under names of ours, each escape and set spelled in one way.

    root ::= "yes" | "no" | list
    list ::= "[" [a-z]+ ("," [a-z]+)* "]"   # a comment
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specserve.structured.base import RefusedError

START = "root"
_MOST_CHARACTERS = 100_000
_MOST_RULES = 1000
_MOST_REPEATS = 1000
_MOST_NESTED = 50
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])"
_PIECE = re.compile(
    rf'(?P<literal>"(?:{_ESCAPE}|[^"\\\n])*")'
    rf"|(?P<set>\[\^?(?:{_ESCAPE}|[^\]\\\n])*\])"
    r"|(?P<name>[a-zA-Z_][\w.-]*)(?P<defines>\s*::=)?"
    r"|\{\s*(?P<least>\d+)\s*(?P<comma>,)?\s*(?P<most>\d+)?\s*\}"
    r"|(?P<sign>[()|*+?.])"
    r"|(?P<space>\s+|\#[^\n]*)",
    re.ASCII,
)
_CHARACTER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_LITERAL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


@dataclass
class Rules:
    """A grammar: the pieces of each rule in order, references as their names. The first rule is the start."""

    bodies: dict[str, list[str]]

    @property
    def text(self) -> str:
        return "".join(f"{name} ::= {' '.join(body)}\n" for name, body in self.bodies.items())


def parse(text: str) -> Rules:
    """Raises RefusedError for what is no GBNF, and for a grammar that is too large."""
    if len(text) > _MOST_CHARACTERS:
        raise RefusedError(f"this grammar has {len(text)} characters; at most {_MOST_CHARACTERS} are taken.")
    named: dict[str, list[str]] = {}
    body: list[str] | None = None
    for name, piece in _pieces(text):
        if name is not None:
            if name in named:
                raise RefusedError(f"the rule {name!r} is defined twice.")
            body = named[name] = []
        elif body is None:
            raise RefusedError(f"a grammar begins with a rule, NAME ::= ..., not with {piece.lstrip('@')!r}.")
        else:
            body.append(piece)
    return _renamed(named)


def _pieces(text: str) -> Iterator[tuple[str | None, str]]:
    """Names of rules that begin, and what is in them: names in bodies have a mark before them."""
    end = 0
    while end < len(text):
        found = _PIECE.match(text, end)
        if found is None:
            raise RefusedError(f"this is no GBNF from {text[end : end + 20]!r} on.")
        end = found.end()
        if found["defines"] is not None:
            yield found["name"], ""
        elif found["space"] is None:
            yield None, _piece(found)


def _piece(found: re.Match[str]) -> str:
    if found["name"] is not None:
        return f"@{found['name']}"
    if found["literal"] is not None:
        return '"' + "".join(_LITERAL.get(each) or _printable(each) for each in _decoded(found["literal"][1:-1])) + '"'
    if found["set"] is not None:
        return _set(found["set"])
    if found["least"] is not None:
        return _repeats(found)
    return _any() if found["sign"] == "." else found["sign"]


def _repeats(found: re.Match[str]) -> str:
    least, most = int(found["least"]), found["most"]
    if max(least, int(most or 0)) > _MOST_REPEATS:
        raise RefusedError(f"{found[0]} repeats more than {_MOST_REPEATS} times, the most that is taken.")
    if most is not None and int(most) < least:
        raise RefusedError(f"{found[0]}: the second number is below the first.")
    if not found["comma"]:
        return f"{{{least},{least}}}"
    return f"{{{least},{most or ''}}}"


def _decoded(escaped: str) -> list[str]:
    return [_character(piece) for piece in _CHARACTER.findall(escaped)]


def _character(piece: str) -> str:
    if piece[0] != "\\" or len(piece) == 1:
        return piece
    if piece[1] in "xuU":
        value = int(piece[2:], 16)
        if 0xD800 <= value < 0xE000 or value > 0x10FFFF:
            raise RefusedError(f"{piece} is no character.")
        return chr(value)
    if piece[1].isalnum() and piece[1] not in _NAMED:
        raise RefusedError(f"{piece} is no escape of GBNF.")
    return _NAMED.get(piece[1], piece[1])


def _printable(character: str) -> str:
    if character < " " or character == "\x7f":
        return _coded(character)
    return character


def _set(piece: str) -> str:
    """Characters that mean something in a set anywhere are escaped."""
    negated = piece.startswith("[^")
    spelled = [
        f"{_in_set(chr(low))}-{_in_set(chr(high))}" if low < high else _in_set(chr(low)) for low, high in _listed(piece)
    ]
    return f"[{'^' * negated}{''.join(spelled)}]"


def characters(literal: str) -> list[str]:
    """Of a literal with its quotes."""
    return _decoded(literal[1:-1])


def ranges(piece: str) -> list[tuple[int, int]]:
    """The characters of a set with its brackets, from and to."""
    listed = sorted(_listed(piece))
    if not piece.startswith("[^"):
        return listed
    found, start = [], 0
    for low, high in listed:
        if low > start:
            found.append((start, low - 1))
        start = max(start, high + 1)
    return [*found, (start, 0x10FFFF)] if start <= 0x10FFFF else found


def _listed(piece: str) -> list[tuple[int, int]]:
    escaped = _CHARACTER.findall(piece[1 + piece.startswith("[^") : -1])
    found = []
    while escaped:
        low = high = _character(escaped.pop(0))
        if len(escaped) >= 2 and escaped[0] == "-":
            high = _character(escaped[1])
            del escaped[:2]
        if high < low:
            raise RefusedError(f"{piece}: {high!r} is before {low!r}.")
        found.append((ord(low), ord(high)))
    if not found:
        raise RefusedError(f"{piece} has no characters.")
    return found


def _in_set(character: str) -> str:
    return character if character.isalnum() or ord(character) > 0x7F else _coded(character)


def _coded(character: str) -> str:
    """Behind \\x some read as many digits as there are."""
    return f"\\u{ord(character):04x}"


def _any() -> str:
    return f"[{_in_set(chr(0))}-{chr(0x10FFFF)}]"


def _renamed(named: dict[str, list[str]]) -> Rules:
    """The start first; other names become of one kind, as each backend has names of its own that it does not take."""
    if START not in named:
        raise RefusedError(f"a grammar begins with its rule {START!r}, and this one has none.")
    if len(named) > _MOST_RULES:
        raise RefusedError(f"this grammar has more than {_MOST_RULES} rules.")
    names = {name: f"r{i}" for i, name in enumerate(named)} | {START: START}
    for body in named.values():
        unknown = [piece[1:] for piece in body if piece[0] == "@" and piece[1:] not in names]
        if unknown:
            raise RefusedError(f"the rule {unknown[0]!r} is not defined.")
    order = [START, *(name for name in named if name != START)]
    return Rules({names[name]: _whole(names[p[1:]] if p[0] == "@" else p for p in named[name]) for name in order})


def _whole(body: Iterable[str]) -> list[str]:
    """With empty texts where there is nothing between signs, and balanced."""
    found: list[str] = []
    depth, before = 0, "("
    for piece in body:
        if piece in ("|", ")") and before in ("(", "|"):
            found.append('""')
        if piece[0] in "*+?{" and before[0] in "(|*+?{":
            raise RefusedError(f"there is nothing before {piece} that could be repeated: put it in (...).")
        depth += (piece == "(") - (piece == ")")
        if not 0 <= depth <= _MOST_NESTED:
            raise RefusedError(f"parentheses do not match, or are nested deeper than {_MOST_NESTED}.")
        found.append(piece)
        before = piece
    if depth:
        raise RefusedError("a parenthesis is not closed.")
    return [*found, '""'] if before in ("(", "|") else found
