"""GBNF as Lark, for a lexer that always takes the longest text that a terminal fits, also where a shorter one alone
leads to an end. Where that makes a difference, the grammar is written so that it makes none.

A grammar without recursion becomes one terminal. Else what is not recursive becomes terminals, if nothing that may
follow one could also prolong it or another that began with it; if something could, terminals are single characters,
where the grammar is small enough for a parser of characters. In a larger one the longest text is what is read: all that
is accepted is derived by the grammar, but not all that it derives is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from specserve.grammars._gbnf import characters, ranges

_MOST_POSITIONS = 600  # of characters in terminals, beyond which nobody looks whether they are apart
_MOST_NESTED = 100
_MOST_PIECES = 60  # of a grammar that is parsed by characters

Body = list[str]
Range = tuple[int, int]
_Rule = tuple["_Places", bool, set[int], set[int]]  # as _Places.add says


class _TooLarge(Exception):
    pass


def lark(bodies: dict[str, Body], start: str) -> str:
    """The grammar, its bodies as those of _gbnf.Rules."""
    recursive = _recursive(bodies)
    if not recursive:
        return _written(bodies, start, set(), _whole)
    if sum(map(len, bodies.values())) > _MOST_PIECES or _are_apart(bodies, recursive):
        return _written(bodies, start, recursive, _whole)
    return _written(bodies, start, set(bodies), _by_character)


def _written(bodies: dict[str, Body], start: str, rules: set[str], literal: Callable[[str], str]) -> str:
    """Rules are in lower case, terminals in upper case."""
    named = {name: name.lower() if name in rules else name.upper() for name in bodies}

    def piece_of(piece: str) -> str:
        if piece[0] == "[":
            return f"/{piece}/"
        return literal(piece) if piece[0] == '"' else named.get(piece, piece)

    lines = [f"{named[name]}: {' '.join(map(piece_of, body))}" for name, body in bodies.items()]
    return "\n".join([f"start: {named[start]}", *lines])


def _whole(literal: str) -> str:
    return literal


def _by_character(literal: str) -> str:
    split = re.findall(r"\\u....|\\.|.", literal[1:-1])
    return "(" + " ".join(f'"{each}"' for each in split) + ")" if split else literal


def _recursive(bodies: dict[str, Body]) -> set[str]:
    """Rules that lead to one that leads back to itself."""
    open_ = {name: {piece for piece in body if piece in bodies} for name, body in bodies.items()}
    while leaves := {name for name, inside in open_.items() if not inside}:
        open_ = {name: inside - leaves for name, inside in open_.items() if name not in leaves}
    return set(open_)


# --- expressions ------------------------------------------------------------------------------------------------------
# A tree is a piece, or (sign, trees): "|" one of them, "," one after the other, "*", "+" and "?" a repetition of one.
# What is repeated a number of times is taken for repeated any number of times, which only finds more that overlaps.


def _tree(body: Body) -> Any:
    left = list(reversed(body))
    return _alternatives(left)


def _alternatives(left: Body) -> Any:
    branches = [_sequence(left)]
    while left and left[-1] == "|":
        left.pop()
        branches.append(_sequence(left))
    return branches[0] if len(branches) == 1 else ("|", branches)


def _sequence(left: Body) -> Any:
    parts: list[Any] = []
    while left and left[-1] not in ("|", ")"):
        piece = left.pop()
        if piece == "(":
            parts.append(_alternatives(left))
            left.pop()
        elif piece in ("*", "+", "?"):
            parts[-1] = (piece, parts[-1:])
        elif piece[0] == "{":
            parts[-1] = ("*" if piece.startswith("{0,") else "+", parts[-1:])
        else:
            parts.append(piece)
    return parts[0] if len(parts) == 1 else (",", parts)


@dataclass
class _Places:
    """The places of an expression where something is said (Glushkov's automaton): what each says, and which may come
    behind it. `nullable` says which pieces may be nothing."""

    nullable: Callable[[str], bool]
    said: list[Any] = field(default_factory=list)
    behind: list[set[int]] = field(default_factory=list)

    def add(self, tree: Any) -> tuple[bool, set[int], set[int]]:
        """Whether the tree may be nothing, its first places and its last."""
        if not isinstance(tree, tuple):
            self.said.append(tree)
            self.behind.append(set())
            place = {len(self.said) - 1}
            return self.nullable(tree), place, place
        sign, trees = tree
        parts = [self.add(each) for each in trees]
        if sign == ",":
            return self._joined(parts)
        firsts = set[int]().union(*(part[1] for part in parts))
        lasts = set[int]().union(*(part[2] for part in parts))
        if sign in ("*", "+"):
            self._link(lasts, firsts)
        return sign in ("*", "?") or any(part[0] for part in parts), firsts, lasts

    def _joined(self, parts: list[tuple[bool, set[int], set[int]]]) -> tuple[bool, set[int], set[int]]:
        whole: tuple[bool, set[int], set[int]] = (True, set(), set())
        for empty, firsts, lasts in parts:
            self._link(whole[2], firsts)
            whole = (
                whole[0] and empty,
                whole[1] | (firsts if whole[0] else set()),
                lasts | (whole[2] if empty else set()),
            )
        return whole

    def _link(self, lasts: Iterable[int], firsts: set[int]) -> None:
        for last in lasts:
            self.behind[last] |= firsts


# --- terminals --------------------------------------------------------------------------------------------------------


@dataclass
class _Terminal:
    """Its places say characters, as ranges; `follows` are those of the terminals that may come next."""

    places: _Places
    empty: bool
    firsts: set[int]
    lasts: set[int]
    follows: list[Range] = field(default_factory=list)

    def beginnings(self) -> list[Range]:
        return [each for place in self.firsts for each in self.places.said[place]]


def _are_apart(bodies: dict[str, Body], recursive: set[str]) -> bool:
    try:
        terminals = _terminals(bodies, recursive)
    except _TooLarge:
        return False
    _follow(bodies, recursive, terminals)
    every = list(terminals.values())
    return not any(_overlap(first, second) for first in every for second in every)


def _terminals(bodies: dict[str, Body], recursive: set[str]) -> dict[str, _Terminal]:
    """Of what rules name or say themselves."""
    names = {piece for name in recursive for piece in bodies[name] if piece[0] in '"[' or piece in bodies} - recursive
    left = [_MOST_POSITIONS]
    found = {}
    for name in names:
        places = _Places(lambda _: False)
        found[name] = _Terminal(places, *places.add(_inlined(name, bodies, left, 0)))
    return found


def _inlined(piece: Any, bodies: dict[str, Body], left: list[int], depth: int) -> Any:
    """A tree of ranges."""
    if depth > _MOST_NESTED:
        raise _TooLarge
    if isinstance(piece, tuple):
        return piece[0], [_inlined(each, bodies, left, depth + 1) for each in piece[1]]
    if piece in bodies:
        return _inlined(_tree(bodies[piece]), bodies, left, depth + 1)
    said: list[Any] = [[(ord(each), ord(each))] for each in characters(piece)] if piece[0] == '"' else [ranges(piece)]
    left[0] -= len(said)
    if left[0] < 0:
        raise _TooLarge
    return (",", said)


def _follow(bodies: dict[str, Body], recursive: set[str], terminals: dict[str, _Terminal]) -> None:
    """Which terminals may come behind which: over all rules, what a neighbour may begin with."""
    rules = _rules(bodies, recursive, {name for name, terminal in terminals.items() if terminal.empty})

    @cache
    def edge(is_end: bool, name: str) -> frozenset[str]:
        """Terminals that the piece may begin or end with."""
        seen, open_, found = set[str](), [name], set[str]()
        while open_:
            piece = open_.pop()
            if piece in terminals:
                found.add(piece)
            elif piece not in seen:
                seen.add(piece)
                places, _, firsts, lasts = rules[piece]
                open_ += [places.said[place] for place in (lasts if is_end else firsts)]
        return frozenset(found)

    for places, *_ in rules.values():
        for place, behind in enumerate(places.behind):
            begun = {terminal for after in behind for terminal in edge(False, places.said[after])}
            characters = [each for terminal in begun for each in terminals[terminal].beginnings()]
            for before in edge(True, places.said[place]):
                terminals[before].follows += characters


def _rules(bodies: dict[str, Body], recursive: set[str], empty: set[str]) -> dict[str, _Rule]:
    """Their places, which say names of rules and terminals; `empty` gets those that may be nothing."""
    while True:
        found = {}
        for name in recursive:
            places = _Places(empty.__contains__)
            found[name] = (places, *places.add(_tree(bodies[name])))
        fresh = {name for name, rule in found.items() if rule[1]} - empty
        if not fresh:
            return found
        empty |= fresh


def _overlap(first: _Terminal, second: _Terminal) -> bool:
    """Whether a text of the first, with a character that may follow it, begins a text of the second."""
    said, others = first.places.said, second.places.said
    open_ = [(p, q) for p in first.firsts for q in second.firsts if _meet(said[p], others[q])]
    seen = set(open_)
    while open_:
        p, q = open_.pop()
        if p in first.lasts and any(_meet(others[after], first.follows) for after in second.places.behind[q]):
            return True
        for pair in ((a, b) for a in first.places.behind[p] for b in second.places.behind[q]):
            if pair not in seen and _meet(said[pair[0]], others[pair[1]]):
                seen.add(pair)
                open_.append(pair)
    return False


def _meet(some: list[Range], others: list[Range]) -> bool:
    return any(a <= d and c <= b for a, b in some for c, d in others)
