"""A grammar as drafters may ask it: by a state of its own, so that nothing done there reaches the sequence's, whatever
is asked, on whatever thread, and wherever it is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence as Many

import numpy as np

from specserve.types import GrammarState, Ids


class GrammarReader:
    """`start` makes a state at the beginning, when something is first asked. It follows the tokens of a sequence, which
    only grow, from the first that is no prompt; `ends` are those that end the sequence."""

    def __init__(self, start: Callable[[], GrammarState], num_prompt: int, ends: frozenset[int]) -> None:
        self._start = start
        self._ends = ends
        self._num_read = num_prompt
        self._state: GrammarState | None = None
        self._lock = threading.Lock()  # for drafters with threads of their own; the engine never waits for it

    def jump_forward(self, tokens: Many[int]) -> list[int]:
        """The tokens that must follow, as the tokenizer would split them."""
        with self._lock:
            state = self._after(tokens)
            return [] if state is None else state.jump_forward()[:]

    def allowed(self, tokens: Many[int], draft: Many[int], num_words: int, is_forced: bool) -> Ids:
        """The bits of the tokens that may follow these and a draft, int32 [num_words]; with `is_forced` the one that
        must follow alone, where there is one. Nothing follows what may not stand, and what ends the sequence."""
        row = np.zeros(num_words, np.int32)
        with self._lock:
            if (state := self._after(tokens)) is None:
                return row
            moved = 0
            try:
                for token in draft:
                    if token in self._ends or not state.advance(token):
                        return row
                    moved += 1
                forced = state.jump_forward() if is_forced else []
                if forced:
                    row.view(np.uint32)[forced[0] // 32] = 1 << (forced[0] % 32)
                else:
                    state.fill(row)
            finally:
                state.rollback(moved)
        return row

    def _after(self, tokens: Many[int]) -> GrammarState | None:
        """The state after all tokens; None where nothing may follow them."""
        if self._state is None:
            self._state = self._start()
        for token in tokens[self._num_read :]:
            if not self._state.advance(token):
                return None
            self._num_read += 1
        return self._state
