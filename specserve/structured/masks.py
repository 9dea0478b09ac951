"""The bits of the tokens that grammars allow after each row of a step, made while the target works.

A state stands at its sequence's last committed token. It walks a draft and is rolled back; nothing else is copied.

What a sequence without a draft may say next is made while the target works. Of a draft's rows hardly any is needed by
a sequence that takes best tokens: none where its best token may come, which one bit tells, for less than a row of them,
and none after a token that is not the draft's. So these wait for what the target says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from specserve.sampling.edits import changes_logits
from specserve.sampling.inputs import num_logit_rows
from specserve.types import Draft, Failure, GuardedState, Ids, ScheduledSeq, Sequence


class Masks:
    """The bits of the tokens that may come at each row of a step. `fill` makes those that are needed whatever the
    target says, while it works; `finish` those that hang on what it has said.

    What follows a node that may not stand, or that ends the sequence, is nothing at all.
    """

    def __init__(self, sampled: list[ScheduledSeq], num_words: int) -> None:
        self._sampled = sampled
        self._num_words = num_words
        self._bits: Ids | None = None  # int32 [sampled rows, num_words]
        self._late: list[tuple[GuardedState, Draft, frozenset[int], slice]] = []

    def fill(self) -> None:
        for each in self._sampled:
            seq, draft = each.seq, each.draft
            own = slice(each.logits_start, each.logits_start + len(draft) + 1)
            if seq.grammar is None:
                continue
            if not len(draft):
                seq.grammar.fill(self._made(own)[0])
            elif draft.is_chain and _takes_best(seq):
                self._late.append((seq.grammar, draft, seq.stop_ids, own))
            else:
                seq.grammar.fill_draft(draft.tokens, draft.parents, seq.stop_ids, self._made(own))

    def finish(self, best: Tensor | None) -> Ids | None:
        """All rows, int32 [sampled rows, num_words]; None where none needs any. `best` int64 [so many rows, or more]
        are the rows' best tokens, -1 for none: chains of sequences that take them keep rows whole where theirs may
        come, and where no token that is taken leads. Where it is None, all rows are made."""
        known = None if best is None or not self._late else best.tolist()
        for state, draft, ends, own in self._late:
            if known is None:
                state.fill_draft(draft.tokens, draft.parents, ends, self._made(own))
            else:
                _fill_rest(state, draft, known[own], ends, partial(self._made, own))
        return self._bits

    def _made(self, own: slice) -> Ids:
        """Some of the rows, which are whole at first."""
        if self._bits is None:
            num_rows = num_logit_rows(self._sampled)
            self._bits = np.empty((num_rows, self._num_words), np.int32)
            self._bits.fill(-1)
        return self._bits[own]


def _takes_best(seq: Sequence) -> bool:
    return seq.params.temperature == 0 and seq.beams is None and not changes_logits(seq)


def _fill_rest(
    state: GuardedState, draft: Draft, best: list[int], ends: frozenset[int], rows: Callable[[], Ids]
) -> None:
    """The rows of a chain from the first on whose best token may not come; none, if the best tokens depart from the
    chain before."""
    tokens, at = draft.tokens.tolist(), 0
    while state.allows(best[at]):
        if at == len(tokens) or best[at] != tokens[at]:
            break
        if best[at] in ends:
            rows()[at + 1 :] = 0
            break
        state.advance(best[at])
        at += 1
    else:
        state.fill_draft(draft.tokens[at:], draft.parents[at:] - at, ends, rows()[at:])
    state.rollback(at)


def advance(seq: Sequence, tokens: list[int]) -> Failure | None:
    """Move a sequence's grammar over tokens that were emitted. Returns why it cannot go on, None if it can: sampled
    under its mask every token fits, so only a fault of the grammar stops it."""
    assert seq.grammar is not None, "free sequences have no grammar to advance"
    for token in tokens:
        if token in seq.stop_ids and seq.finished:
            break
        if not seq.grammar.advance(token):
            unknown = f"The grammar does not know the token {token} that it had allowed."
            return seq.grammar.fault or Failure(unknown)
    return seq.grammar.fault
