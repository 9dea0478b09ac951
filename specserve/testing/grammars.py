"""A grammar that is a list of sentences."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from specserve.structured import walk
from specserve.types import Ids


class LanguageGrammar:
    """A grammar that knows all its sentences, as token ids with an end token each: for tests of everything around
    grammars. `fault_after` raises from so many tokens on."""

    num_bytes = 1

    def __init__(self, sentences: Many[Many[int]], fault_after: int | None = None) -> None:
        self.sentences = [tuple(sentence) for sentence in sentences]
        self.fault_after = fault_after

    def start(self) -> LanguageState:
        return LanguageState(self, [])


class LanguageState:
    """Where one sequence stands in its language. `said` are the tokens that it has moved over."""

    def __init__(self, grammar: LanguageGrammar, said: list[int]) -> None:
        self.grammar = grammar
        self.said = said

    def next(self) -> set[int]:
        """What may come."""
        if self.grammar.fault_after is not None and len(self.said) >= self.grammar.fault_after:
            raise RuntimeError("a planted fault")
        n = len(self.said)
        return {s[n] for s in self.grammar.sentences if len(s) > n and s[:n] == tuple(self.said)}

    def fill(self, row: Ids) -> None:
        row[:] = 0
        bits = row.view(np.uint32)
        for token in self.next():
            bits[token // 32] |= np.uint32(1 << token % 32)

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        walk.fill_draft(self, tokens, parents, ends, rows)

    def allows(self, token: int) -> bool:
        return token in self.next()

    def advance(self, token: int) -> bool:
        if token not in self.next():
            return False
        self.said.append(token)
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self.said), "rolled back beyond the beginning"
        del self.said[len(self.said) - n :]

    def jump_forward(self) -> list[int]:
        ahead = LanguageState(self.grammar, list(self.said))
        while len(ahead.next()) == 1:
            ahead.advance(ahead.next().pop())
        return ahead.said[len(self.said) :]
