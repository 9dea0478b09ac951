"""Fits drafts to grammars: takes out what may not stand, puts in what must."""

from __future__ import annotations

import numpy as np

from specserve.structured.walk import visit
from specserve.types import Draft, GuardedState, Sequence


def guide(seq: Sequence, draft: Draft, budget: int) -> Draft:
    """The draft as the grammar of its sequence leaves it, of at most `budget` tokens: without what may not stand, and
    with what is forced at its front, in its midst and at its end. A tree, or a draft with distributions, is cut and
    nothing is put into it."""
    assert seq.grammar is not None, "free sequences are not guided"
    if len(draft) and (draft.q is not None or not draft.is_chain):
        return _cut(seq.grammar, draft, seq.stop_ids)
    tokens, places = _led(seq.grammar, draft.tokens.tolist(), budget, seq.stop_ids)
    return draft if not places and tokens == draft.tokens.tolist() else Draft.chain(tokens, None, frozenset(places))


def _led(state: GuardedState, ahead: list[int], budget: int, ends: frozenset[int]) -> tuple[list[int], list[int]]:
    """A chain: what is forced, else what `ahead` says, as long as that agrees with what came before; and where in it
    are the forced ones."""
    tokens: list[int] = []
    places: list[int] = []
    while len(tokens) < budget and not (tokens and tokens[-1] in ends):
        forced = state.jump_forward()[: budget - len(tokens)]
        following = forced or ahead[:1]
        taken = _take(state, following)
        places += range(len(tokens), len(tokens) + taken if forced else 0)
        tokens += following[:taken]
        ahead = ahead[taken:] if ahead[:taken] == following[:taken] else []
        if not following or taken < len(following):
            break
    state.rollback(len(tokens))
    return tokens, places


def _take(state: GuardedState, tokens: list[int]) -> int:
    """How many of the tokens the grammar lets follow; it stands behind them."""
    for taken, token in enumerate(tokens):
        if not state.advance(token):
            return taken
    return len(tokens)


def _cut(state: GuardedState, draft: Draft, ends: frozenset[int]) -> Draft:
    kept: list[int] = []
    visit(state, draft.tokens, draft.parents, ends, kept.append)
    if len(kept) == len(draft):
        return draft
    kept.sort()
    at = {node: i for i, node in enumerate(kept)}
    parents = np.array([at.get(int(draft.parents[node]), -1) for node in kept], np.int32)
    return Draft(draft.tokens[kept], parents, None if draft.q is None else draft.q[kept])
