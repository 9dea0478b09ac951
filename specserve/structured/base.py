"""The contract between grammars and the engine: what a backend is given, what it must give, and how it is called so
that nothing it does can end or alter another request.

A backend is a file: `grammars/NAME.py` with exactly one public class named `...Backend`, or an entry point.
"auto" asks those that state a PRIORITY, the highest first; see specserve.registry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence as Many
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol, TypeVar

from specserve.structured.reader import GrammarReader
from specserve.structured.spec import RefusedError as RefusedError, Structured
from specserve.types import Failure, GrammarState, Ids

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens as grammars see them. `tokens[i]` are the bytes of token i inside a text, empty for one that is not text:
    a control token or an id that stands for nothing. `eos_ids` end a text, the usual one first. `size` is the width of
    the LM head, at least len(tokens). `encode` is how the tokenizer itself would split a text. `controls` are the
    control tokens by how they are spelled: where a constraint spells one, the token is meant, as no text becomes it."""

    tokens: Many[bytes]
    eos_ids: tuple[int, ...]
    size: int
    encode: Callable[[str], list[int]]
    controls: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_words(self) -> int:
        """Of a row of bits."""
        return -(-self.size // 32)


class Grammar(Protocol):
    """A compiled constraint: immutable, shared by all sequences that have it."""

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes; may grow with use."""

    def start(self) -> GrammarState: ...


class Backend(Protocol):
    """Compiles constraints for one vocabulary. `kinds` are those of Structured that it takes.

    `compile` raises RefusedError for what it cannot enforce exactly, and may take long: it is never called where others
    wait for it.
    """

    kinds: frozenset[str]

    def compile(self, asked: Structured) -> Grammar: ...


class Guarded:
    """A grammar's state, called so that whatever it raises is the fault of one request. `fault` says why nothing may
    come any more, from the first exception on; an empty row then stands for every row. `grammar` is what it was started
    from, where readers are wanted."""

    def __init__(self, state: GrammarState, grammar: Grammar | None = None) -> None:
        self.fault: Failure | None = None
        self._state = state
        self._grammar = grammar
        self._forced: list[int] | None = None  # until it moves

    def fill(self, row: Ids) -> None:
        if self.fault is None:
            self._call(self._state.fill, None, row)
        if self.fault is not None:
            row[:] = 0

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        if self.fault is None:
            self._call(self._state.fill_draft, None, tokens, parents, ends, rows)
        if self.fault is not None:
            rows[:] = 0

    def allows(self, token: int) -> bool:
        return self._call(self._state.allows, False, token)

    def advance(self, token: int) -> bool:
        self._forced = None
        return self._call(self._state.advance, False, token)

    def rollback(self, n: int) -> None:
        self._forced = None
        if n:
            self._call(self._state.rollback, None, n)

    def jump_forward(self) -> list[int]:
        if self._forced is None:
            self._forced = self._call(self._state.jump_forward, list[int]())
        return self._forced

    def reader(self, num_prompt: int, ends: frozenset[int]) -> GrammarReader:
        grammar = self._grammar
        assert grammar is not None, "only states of sequences are read"
        return GrammarReader(lambda: Guarded(grammar.start()), num_prompt, ends)

    def _call(self, function: Callable[P, T], otherwise: T, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.fault is not None:
            return otherwise
        try:
            return function(*args, **kwargs)
        except RefusedError as error:
            self.fault = Failure(f"The grammar cannot go on here: {error.reason}", "no_token_left")
            return otherwise
        except Exception as error:
            _log.warning("A grammar failed; its request ends, or drafts that asked it do.", exc_info=error)
            self.fault = Failure(f"The grammar failed: {type(error).__name__}: {error}")
            return otherwise
