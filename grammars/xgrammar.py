"""xgrammar: a pushdown automaton whose masks are made when it is compiled, so what it compiles to is large and what
remains to be done a step is little. JSON Schema, regular expressions, choices, GBNF and Lark grammars, structural tags.

Source: github.com/mlc-ai/xgrammar. It ignores what it does not know, so what is asked of it is first held against what
it enforces exactly; it has no limits of its own, so sizes are bounded here, and time where it is tried.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any

import numpy as np

from specserve.grammars._crosscheck import Subset, check
from specserve.grammars._gbnf import parse
from specserve.grammars._lark import lark
from specserve.grammars._lean import xgrammar_module
from specserve.grammars._pattern import exact
from specserve.grammars._structural import Inside, structural_tag
from specserve.structured.base import RefusedError, Vocabulary
from specserve.structured.schema.document import check_depth, check_shape, walk
from specserve.structured.schema.formats import without_annotations
from specserve.structured.schema.lookahead import without_lookaheads
from specserve.structured.spec import Structured
from specserve.types import Ids

PRIORITY = 10

_xgrammar: Any = xgrammar_module()  # where it is not installed this file cannot be imported either
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_FORMATS = {"duration", "ipv6", "uri", "uri-template", "uuid"}
_MOST_OPTIONS = 1000
_MOST_CHARACTERS = 60_000  # of a schema or a choice


def _schema_pattern(pattern: Any) -> str:
    """In a schema a dot is ECMAScript's."""
    body = exact(pattern, in_json=True, dot=r"[^\n\r\u2028\u2029]")
    return f"^{body}$"


def _length_pattern(least: int, most: int | None) -> str:
    """By itself a string with a length holds control characters that nobody escapes."""
    return f'^[^"\\\\\\u0000-\\u001f]{{{least},{"" if most is None else most}}}$'


# What version 0.2.8 enforces exactly, found with one schema for each keyword and pair of them, and with random walks.
# Of formats, those with dates take the 30th of February and leap seconds at any time, ipv4 takes leading zeros,
# hostname and email have no lengths, pointers have quotes that nobody escapes. Of multipleOf most are ignored.
_SUBSET = Subset(
    keywords={
        "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
        "number": _NUMBERS,
        "integer": _NUMBERS,
        "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
        "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
        "boolean": frozenset(),
        "null": frozenset(),
    },
    formats=frozenset(_FORMATS),
    pattern=_schema_pattern,
    length=_length_pattern,
    most_schemas=1000,
    most_depth=50,
    most_properties=200,
    most_counted_properties=32,
    most_values=1000,
    most_characters=1000,
)


class XgrammarBackend:
    """Constraints for one vocabulary."""

    kinds = frozenset({"json_schema", "regex", "choice", "ebnf", "lark", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._words = _Words(vocabulary)
        information = _xgrammar.TokenizerInfo(
            self._words.spellings,
            _xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.eos_ids),
        )
        # Its own cache is off: what is compiled is kept once, by who asks for it.
        self._compiler = _xgrammar.GrammarCompiler(information, max_threads=4, cache_enabled=False)

    def compile(self, asked: Structured) -> XgrammarGrammar:
        named: set[int] = set()
        try:
            compiled = self._tag(asked.text, named) if asked.kind == "structural_tag" else self._compiled(asked)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, RefusedError):
                raise
            raise RefusedError(_reason(error)) from error
        matcher = partial(_xgrammar.GrammarMatcher, compiled)
        grammar = XgrammarGrammar(matcher, compiled.memory_size_bytes, self._words, named)
        row = np.zeros(self._words.vocabulary.num_words, np.int32)
        grammar.start().fill(row)
        if not row.any():
            raise RefusedError("nothing fits this.")
        return grammar

    def _compiled(self, asked: Structured) -> Any:
        if asked.kind == "json_schema":
            schema = _checked_schema(json.loads(asked.text))
            return self._compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=False)
        if asked.kind == "regex":
            return self._compiler.compile_regex(exact(asked.text))
        if asked.kind == "lark":
            return self._compiler.compile_lark(lark(asked.text))
        return self._compiler.compile_grammar(_choice(asked.text) if asked.kind == "choice" else parse(asked.text).text)

    def _tag(self, text: str, named: set[int]) -> Any:
        """`named` gets the tokens that it names."""
        words = self._words
        token_ids = frozenset(range(words.vocabulary.size)).difference(words.vocabulary.eos_ids)
        inside = Inside(self._schema_grammar, exact, lambda text: parse(text).text, token_ids, words.control_ids)
        tag, tokens = structural_tag(json.loads(text), inside)
        named |= tokens
        return self._compiler.compile_structural_tag(tag)

    def _schema_grammar(self, schema: Any) -> str:
        made = _xgrammar.Grammar.from_json_schema(_checked_schema(schema), any_whitespace=False, strict_mode=False)
        return str(made)


class XgrammarGrammar:
    """What was compiled, and the tokens that it names: other control tokens never come, whatever it says of them."""

    def __init__(self, matcher: partial[Any], num_bytes: int, words: _Words, named: Iterable[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._closed = words.control_ids - set(named)
        self._open = words.row_without(self._closed)
        self.num_bytes = num_bytes + self._open.nbytes

    def start(self) -> XgrammarState:
        return XgrammarState(self._matcher(), self._words, self._closed, self._open)


class XgrammarState:
    """A matcher of its own. One that has heard the end is asked nothing but to take it back."""

    def __init__(self, matcher: Any, words: _Words, closed: frozenset[int], open_: Ids) -> None:
        self._matcher = matcher
        self._words = words
        self._closed = closed
        self._open = open_
        self._ended = False

    def fill(self, row: Ids) -> None:
        assert row.flags.c_contiguous, "it knows no strides"
        if self._ended:
            row[:] = 0
            return
        self._matcher.fill_next_token_bitmask(row)
        row &= self._open

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        assert rows.flags.c_contiguous, "it knows no strides"
        if self._ended or not len(tokens):
            rows[:] = 0
            self.fill(rows[0])
            return
        rows[:] = 0  # those behind what may not stand are not written
        child, sibling = self._links(tokens.tolist(), parents.tolist(), ends)
        nodes = np.concatenate(([0], tokens)).astype(np.int64)
        self._matcher.traverse_draft_tree(np.array(child), np.array(sibling), nodes, rows)
        rows &= self._open

    def allows(self, token: int) -> bool:
        may_come = self.advance(token)
        if may_come:
            self.rollback(1)
        return may_come

    def _links(self, tokens: list[int], parents: list[int], ends: frozenset[int]) -> tuple[list[int], list[int]]:
        """First children and next siblings, -1 for none; node 0 is what was said last. Nodes with tokens that end a
        text or never come are left out, and what hangs from them with them."""
        child, sibling = [-1] * (len(tokens) + 1), [-1] * (len(tokens) + 1)
        last: dict[int, int] = {}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            if token in ends or not self._may_hear(token):
                continue
            if parent + 1 in last:
                sibling[last[parent + 1]] = node
            else:
                child[parent + 1] = node
            last[parent + 1] = node
        return child, sibling

    def _may_hear(self, token: int) -> bool:
        return 0 <= token < self._words.vocabulary.size and token not in self._closed

    def advance(self, token: int) -> bool:
        if self._ended or not self._may_hear(token):
            return False
        moved: bool = self._matcher.accept_token(token)
        self._ended = moved and token in self._words.vocabulary.eos_ids
        return moved

    def rollback(self, n: int) -> None:
        if n:
            self._matcher.rollback(n)
            self._ended = False

    def jump_forward(self) -> list[int]:
        if self._ended:
            return []
        text = self._forced_text()
        if not text:
            return self._forced_end()
        assert self._matcher.accept_string(text), "what it forces may come"
        end = self._forced_end()
        self._matcher.rollback(1)  # one string is one step
        return self._words.vocabulary.encode(text) + end if end else self._words.certain(text)

    def _forced_text(self) -> str:
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:  # it ends within a character, or what was said did
            return error.object[: error.start].decode()

    def _forced_end(self) -> list[int]:
        """The usual end token where nothing else may come."""
        if not self._matcher.is_completed():
            return []
        row = np.zeros(len(self._open), np.int32)
        self.fill(row)
        return [self._words.vocabulary.eos_ids[0]] if (row == self._words.ends).all() else []


class _Words:
    """A vocabulary as xgrammar takes it. A token that is no text has a spelling that no text has, so that grammars of
    tokens can name it and those of text cannot reach it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        missing = vocabulary.size - len(vocabulary.tokens)
        self.spellings = [text or b"\xff%d" % i for i, text in enumerate([*vocabulary.tokens, *[b""] * missing])]
        self.control_ids = frozenset(i for i, text in enumerate(self.spellings) if text[:1] == b"\xff") - set(
            vocabulary.eos_ids
        )
        everything = frozenset(range(vocabulary.size))
        self.ends = self.row_without(everything - set(vocabulary.eos_ids))

    def row_without(self, ids: frozenset[int]) -> Ids:
        """Bits of all tokens but these."""
        bits = np.zeros(32 * self.vocabulary.num_words, np.uint8)
        bits[: self.vocabulary.size] = 1
        bits[list(ids)] = 0
        row: Ids = np.packbits(bits, bitorder="little").view(np.int32)
        return row

    def certain(self, text: str) -> list[int]:
        """The tokens of a text, up to where one might be another token if the text went on."""
        tokens = self.vocabulary.encode(text)
        rest = text.encode()
        for place, token in enumerate(tokens):
            after = bisect.bisect_right(self._sorted, rest)
            if after < len(self._sorted) and self._sorted[after].startswith(rest):
                return tokens[:place]
            rest = rest[len(self.vocabulary.tokens[token]) :]
        return tokens

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(set(self.vocabulary.tokens))


def _checked_schema(schema: Any) -> str:
    check_depth(schema)
    for each in walk(schema):
        check_shape(each)
    schema = without_lookaheads(without_annotations(schema))
    check(schema, _SUBSET)
    text = json.dumps(schema)
    if len(text) > _MOST_CHARACTERS:
        raise RefusedError(f"a schema of {len(text)} characters; at most {_MOST_CHARACTERS} are taken.")
    return text


def _choice(text: str) -> str:
    options = json.loads(text)
    if len(text) > _MOST_CHARACTERS:
        raise RefusedError(f"choices of {len(text)} characters; at most {_MOST_CHARACTERS} are taken.")
    if len(options) > _MOST_OPTIONS:
        raise RefusedError(f"{len(options)} choices; at most {_MOST_OPTIONS} are taken.")
    return "root ::= " + " | ".join(json.dumps(option, ensure_ascii=False) for option in options)


def _reason(error: Exception) -> str:
    """Its message without the time and the place in its sources, and without what it was given."""
    said = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
    return (said.splitlines() or ["it does not say why"])[0].rstrip(".: ") + "."
