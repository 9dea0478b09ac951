"""Writes structural tags as llguidance's Lark.

A lexeme of llguidance is as long as it can be, so free text would never end. What free text is followed by therefore
becomes part of its lexeme, and that one is lazy: it ends where it first may. A control token is no text and ends any
lexeme. Lazy ones win over others that match the same text, so no free text holds a trigger.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from specserve.structured.base import RefusedError, Vocabulary
from specserve.structured.tags import (
    AnyText,
    ConstString,
    EbnfGrammar,
    Either,
    Format,
    JsonSchema,
    Regex,
    SeparatedTags,
    Series,
    Tag,
    TriggeredTags,
)

_ANY = "/(?s:.*)/"
_MOST_IN_A_ROW = 32  # texts and expressions in one lexeme: its automaton grows with each
_MOST_EXCLUDES = 8  # automata that may all run at once


@dataclass(frozen=True, slots=True)
class Embedded:
    """Grammars for what llguidance has a form of its own for: each gives an entry of its list of grammars."""

    schema: Callable[[Any], dict[str, Any]]
    regex: Callable[[str], dict[str, Any]]
    ebnf: Callable[[str], dict[str, Any]]


def written(root: Format, vocabulary: Vocabulary, embedded: Embedded) -> str:
    """The grammar, as LLMatcher takes it. Raises RefusedError for what is not determined: free text before something
    that no text begins."""
    writer = _Writer(vocabulary, embedded)
    start = writer.expression([root], True)
    lark = "\n".join(["start: " + start, *writer.lines])
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *writer.grammars]}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Something of a sequence, in Lark. A "text" and a "pattern" are regular and can be one lexeme with their
    neighbours; "free" is a pattern that takes everything. `closes`: the end of a tag, which comes but once."""

    lark: str
    kind: Literal["text", "pattern", "free", "control", "rule"]
    closes: bool = False


@dataclass(frozen=True, slots=True)
class _Head:
    """How a tag in free text begins: with a control token, or with a text."""

    text: str
    token: int | None = None


class _Writer:
    """`lines` are rules and terminals, `grammars` what they refer to."""

    def __init__(self, vocabulary: Vocabulary, embedded: Embedded) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self._controls = vocabulary.controls
        self._eos_ids = vocabulary.eos_ids
        self._embedded = embedded
        self._references: dict[str, str] = {}
        self._frees: dict[tuple[str, ...], str] = {}
        self._open_ends: tuple[str, ...] = ()  # of the innermost tag that is being written
        longest_first = sorted(vocabulary.controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def expression(self, formats: Iterable[Format], is_last: bool) -> str:
        """Formats one after the other. `is_last`: nothing comes behind them."""
        formats = tuple(formats)
        pieces: list[_Piece] = []
        for i, each in enumerate(formats):
            pieces += self._pieces(each, is_last and i == len(formats) - 1)
        return self._joined(pieces, is_last)

    def _pieces(self, found: Format, is_last: bool) -> list[_Piece]:
        if isinstance(found, ConstString):
            return self._spelled(found.value)
        if isinstance(found, AnyText):
            return [_Piece(self._free((*found.excludes, *self._open_ends)), "free")]
        if isinstance(found, Regex):
            entry = self._embedded.regex(found.pattern)
            return [_Piece(entry["lark_grammar"].removeprefix("start: "), "pattern")]
        if isinstance(found, JsonSchema):
            return [self._reference(found.json_schema, self._embedded.schema)]
        if isinstance(found, EbnfGrammar):
            return [self._reference(found.grammar, self._embedded.ebnf)]
        if isinstance(found, Series):
            return [
                piece
                for i, each in enumerate(found.elements)
                for piece in self._pieces(each, is_last and i == len(found.elements) - 1)
            ]
        if isinstance(found, Tag):
            return self._tag(found, found.begin)
        return [_Piece(f"({self._choices(found, is_last)})", "rule")]

    def _tag(self, tag: Tag, begin: str) -> list[_Piece]:
        """`begin` is what is left of how the tag begins."""
        try:
            return [*self._spelled(begin), *self._content(tag), *self._ends(tag.end)]
        except RefusedError as error:
            reason = str(error).removeprefix("structured: ").removeprefix("structural tag: ")
            raise RefusedError(f"structural tag: in the tag {tag.begin!r}: {reason}") from error

    def _content(self, tag: Tag) -> list[_Piece]:
        """Free text in it holds none of its ends, wherever it stands; right before them it is lazy, and cannot."""
        outer = self._open_ends
        ends = () if isinstance(tag.content, AnyText) else tag.end
        self._open_ends = tuple(end for end in ends if end and not self._control.search(end))
        try:
            return self._pieces(tag.content, False)
        finally:
            self._open_ends = outer

    def _choices(self, found: Either | TriggeredTags | SeparatedTags, is_last: bool) -> str:
        if isinstance(found, Either):
            return _any_of(self.expression([each], is_last) for each in found.elements)
        return self._triggered(found, is_last) if isinstance(found, TriggeredTags) else self._separated(found)

    def _separated(self, found: SeparatedTags) -> str:
        tag = self._rule(_any_of(self.expression([tag], False) for tag in found.tags))
        separator = self._joined(self._spelled(found.separator), False)
        several = tag if found.stop_after_first else f"{tag} ({separator} {tag})*"
        return several if found.at_least_one else f"({several})?"

    # --- free text with triggers --------------------------------------------------------------------------------------

    def _triggered(self, found: TriggeredTags, is_last: bool) -> str:
        heads = self._heads(found)
        bodies = {
            head: self._rule(_any_of(self._joined(rest, False) for rest in rests)) for head, rests in heads.items()
        }
        first = _any_of(f"{self._head(head)} {body}" for head, body in bodies.items())
        if found.at_least_one and found.stop_after_first:
            return first
        if not is_last:
            raise RefusedError("structural tag: text may follow triggered_tags, so nothing else can.")
        free = self._free(found.excludes)
        later = self._rule(_any_of(self._after(free, head, body) for head, body in bodies.items()))
        if found.stop_after_first:
            return f"{later} | {free}"
        return f"({first}) {later}* {free}" if found.at_least_one else f"{later}* {free}"

    def _heads(self, found: TriggeredTags) -> dict[_Head, list[list[_Piece]]]:
        """What begins tags, and how the tags go on that begin so."""
        heads: dict[_Head, list[list[_Piece]]] = {}
        for tag in found.tags:
            (trigger,) = [trigger for trigger in found.triggers if tag.begin.startswith(trigger)]
            control = self._control.match(tag.begin)
            head = _Head(control[0], self._controls[control[0]]) if control else _Head(trigger)
            if not control and self._control.search(tag.begin[: len(trigger)]):
                raise RefusedError(f"structural tag: the trigger {trigger!r} must begin with its control token.")
            heads.setdefault(head, []).append(self._tag(tag, tag.begin[len(head.text) :]))
        texts = [head.text for head in heads]
        for text in texts:
            if around := next((other for other in texts if other != text and text in other), None):
                raise RefusedError(f"structural tag: the trigger {text!r} is inside another one, {around!r}.")
        return heads

    def _head(self, head: _Head) -> str:
        return self._joined(self._spelled(head.text), False)

    def _after(self, free: str, head: _Head, body: str) -> str:
        """A tag after free text. A control token that is written out begins a tag, too: who reads the text sees no
        difference."""
        spelled = f"{self._lexeme(f'{free} {_text(head.text)}', lazy=True)} {body}"
        return spelled if head.token is None else f"{spelled} | {free} <[{head.token}]> {body}"

    # --- texts --------------------------------------------------------------------------------------------------------

    def _spelled(self, text: str) -> list[_Piece]:
        """A text, with the control tokens that it spells as tokens."""
        pieces: list[_Piece] = []
        at = 0
        for found in self._control.finditer(text):
            token = self._controls[found[0]]
            if token in self._eos_ids:
                raise RefusedError(f"structural tag: {found[0]!r} ends the output, so no tag can hold it.")
            pieces += [_Piece(_text(text[at : found.start()]), "text")] * (found.start() > at)
            pieces.append(_Piece(f"<[{token}]>", "control"))
            at = found.end()
        return [*pieces, _Piece(_text(text[at:]), "text")] if at < len(text) else pieces

    def _ends(self, texts: tuple[str, ...]) -> list[_Piece]:
        """One of the texts that end a tag."""
        if len(texts) == 1:
            first, *others = self._spelled(texts[0]) or [_Piece(_text(""), "rule")]
            return [_Piece(first.lark, first.kind, closes=True), *others]
        if any(map(self._control.search, texts)):
            raise RefusedError("structural tag: a tag whose end is a control token can have no other end.")
        if "" in texts:
            raise RefusedError("structural tag: a tag that may end with nothing can have no other end.")
        return [_Piece(f"({_any_of(map(_text, texts))})", "text", closes=True)]

    def _free(self, excludes: tuple[str, ...]) -> str:
        if excludes not in self._frees:
            if len(self._frees) > _MOST_EXCLUDES:
                raise RefusedError(f"structural tag: there are more than {_MOST_EXCLUDES} different lists of excludes.")
            name = self._frees[excludes] = f"FREE{len(self._frees)}"
            held = f" & ~({_ANY} ({_any_of(map(_text, excludes))}) {_ANY})" if excludes else ""
            self.lines.append(f"{name}: {_ANY}{held}")
        return self._frees[excludes]

    def _joined(self, pieces: list[_Piece], is_last: bool) -> str:
        """Pieces one after the other; what can be one lexeme is."""
        found: list[str] = []
        lexeme: list[_Piece] = []
        for piece in pieces:
            if piece.kind not in ("text", "pattern", "free"):
                found += [*self._ended(lexeme, False, piece.kind == "control"), piece.lark]
                lexeme = []
                continue
            lexeme.append(piece)
            before = {other.kind for other in lexeme[:-1]}
            if piece.kind == "text" and ("free" in before or (piece.closes and "pattern" in before)):
                found += self._ended(lexeme, True, True)
                lexeme = []
        return " ".join([*found, *self._ended(lexeme, False, is_last)]) or _text("")

    def _ended(self, lexeme: list[_Piece], lazy: bool, may_be_free: bool) -> list[str]:
        if any(piece.kind == "free" for piece in lexeme) and not may_be_free:
            raise RefusedError(
                "structural tag: any_text can stand last, or before a text that ends it; what comes behind it here "
                "begins with no certain text."
            )
        if all(piece.kind == "text" for piece in lexeme):
            return [piece.lark for piece in lexeme]
        if len(lexeme) > _MOST_IN_A_ROW:
            raise RefusedError(f"structural tag: more than {_MOST_IN_A_ROW} texts and expressions follow each other.")
        return [self._lexeme(" ".join(piece.lark for piece in lexeme), lazy)]

    # --- names --------------------------------------------------------------------------------------------------------

    def _rule(self, lark: str) -> str:
        name = f"rule{len(self.lines)}"
        self.lines.append(f"{name}: {lark}")
        return name

    def _lexeme(self, lark: str, lazy: bool) -> str:
        name = f"lazy{len(self.lines)}" if lazy else f"LEXEME{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' * lazy}: {lark}")
        return name

    def _reference(self, value: Any, entry: Callable[[Any], dict[str, Any]]) -> _Piece:
        """Equal ones are one grammar."""
        key = json.dumps(value)
        if key not in self._references:
            name = f"inner{len(self.grammars)}"
            self.grammars.append({**entry(value), "name": name})
            self._references[key] = name
        return _Piece(f"@{self._references[key]}", "rule")


def _any_of(choices: Iterable[str]) -> str:
    return " | ".join(choices)


def _text(text: str) -> str:
    """A literal. Control characters have no spelling in one, but in an expression."""
    if all(character.isprintable() or character in "\n\t" for character in text):
        return json.dumps(text, ensure_ascii=False)
    return "/" + "".join(f"\\x{{{ord(character):x}}}" for character in text) + "/"
