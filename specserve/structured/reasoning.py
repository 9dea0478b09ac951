"""Grammars of models that reason first: everything may come until the reasoning is closed, and after that what the
grammar says.

The tokens of a draft are walked one by one, so reasoning may end anywhere in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from specserve.structured import walk
from specserve.structured.base import Grammar
from specserve.text.reasoning import Beginning, Reasoning
from specserve.types import GrammarState, Ids


def wrapped(grammar: Grammar, beginning: Beginning, reasoning: Reasoning | None) -> Grammar:
    """The grammar of what a model says to a prompt: the answer has `grammar`, reasoning before it has none. `reasoning`
    is None for models that do not reason; where the prompt has closed it, `grammar` begins at once."""
    if reasoning is None or beginning == "after":
        return grammar
    return ReasoningGrammar(grammar, reasoning, is_open=beginning == "inside")


class ReasoningGrammar:
    """A grammar after reasoning, which the prompt has opened (`is_open`) or the model may open as the first thing it
    says."""

    def __init__(self, grammar: Grammar, reasoning: Reasoning, is_open: bool) -> None:
        self.grammar = grammar
        self.reasoning = reasoning
        self.is_open = is_open

    @property
    def num_bytes(self) -> int:
        return self.grammar.num_bytes

    def start(self) -> ReasoningState:
        return ReasoningState(self)


class _Phase(Enum):
    OPENING = auto()  # all that was said begins what opens reasoning, and perhaps an answer
    THINKING = auto()
    ANSWERING = auto()


@dataclass(frozen=True, slots=True)
class _Place:
    """`matched` tokens of what opens or closes reasoning have just been said. `states` have moved over `moved` tokens
    each: that of an answer without reasoning, and that of an answer after it. `is_early`: the former still stands
    where the output does."""

    phase: _Phase
    matched: int = 0
    moved: tuple[int, int] = (0, 0)
    is_early: bool = True


class ReasoningState:
    """Where one sequence stands. eos cannot come before the answer has begun."""

    def __init__(self, grammar: ReasoningGrammar) -> None:
        self._open, self._close = grammar.reasoning.open, grammar.reasoning.close
        self._eos_ids = grammar.reasoning.eos_ids
        self._fallbacks = grammar.reasoning.fallbacks
        self._states: tuple[GrammarState, GrammarState] = (grammar.grammar.start(), grammar.grammar.start())
        self._place = _Place(_Phase.THINKING if grammar.is_open else _Phase.OPENING)
        self._past: list[_Place] = []

    def fill(self, row: Ids) -> None:
        place = self._place
        if place.phase is _Phase.THINKING:
            row[:] = -1
            for token in self._eos_ids:
                row.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
            return
        row[:] = 0
        if place.phase is _Phase.ANSWERING or place.is_early:
            self._answer.fill(row)
        if place.phase is _Phase.OPENING:
            token = self._open[place.matched]
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        if self._place.phase is _Phase.ANSWERING:
            self._answer.fill_draft(tokens, parents, ends, rows)
        else:
            walk.fill_draft(self, tokens, parents, ends, rows)

    def allows(self, token: int) -> bool:
        place = self._place
        if place.phase is _Phase.THINKING:
            return token >= 0 and token not in self._eos_ids
        if place.phase is _Phase.OPENING and token == self._open[place.matched]:
            return True
        return (place.phase is _Phase.ANSWERING or place.is_early) and self._answer.allows(token)

    def advance(self, token: int) -> bool:
        found = self._after(token)
        if found is None:
            return False
        self._past.append(self._place)
        self._place = found
        return True

    def rollback(self, n: int) -> None:
        if not n:
            return
        before, self._place = self._place, self._past[-n]
        del self._past[-n:]
        for state, now, then in zip(self._states, before.moved, self._place.moved, strict=True):
            state.rollback(now - then)

    def jump_forward(self) -> list[int]:
        if self._place.phase is _Phase.ANSWERING:
            return self._answer.jump_forward()
        if self._place.phase is _Phase.OPENING and not self._place.is_early:
            return list(self._open[self._place.matched :])
        return []

    @property
    def _answer(self) -> GrammarState:
        return self._states[0] if self._place.is_early else self._states[1]

    def _after(self, token: int) -> _Place | None:
        """Where it stands after a token; None if that may not come."""
        if self._place.phase is _Phase.THINKING:
            return None if token in self._eos_ids else self._thinking(token)
        if self._place.phase is _Phase.OPENING:
            return self._opening(token)
        early, late = self._place.moved
        if not self._answer.advance(token):
            return None
        moved = (early + 1, late) if self._place.is_early else (early, late + 1)
        return _Place(_Phase.ANSWERING, 0, moved, self._place.is_early)

    def _opening(self, token: int) -> _Place | None:
        """What opens reasoning may begin an answer as well; once it is there whole, it has opened reasoning."""
        place = self._place
        is_early = place.is_early and self._states[0].advance(token)
        moved = (place.moved[0] + is_early, 0)
        if token != self._open[place.matched]:
            return _Place(_Phase.ANSWERING, 0, moved) if is_early else None
        if place.matched + 1 == len(self._open):
            return _Place(_Phase.THINKING, 0, moved, False)
        return _Place(_Phase.OPENING, place.matched + 1, moved, is_early)

    def _thinking(self, token: int) -> _Place:
        matched = self._place.matched
        while matched and token != self._close[matched]:
            matched = self._fallbacks[matched]
        matched += token == self._close[matched]
        if matched == self._place.matched:
            return self._place  # most tokens of most reasoning: one object for all of them
        phase = _Phase.ANSWERING if matched == len(self._close) else _Phase.THINKING
        return _Place(phase, matched, self._place.moved, False)
