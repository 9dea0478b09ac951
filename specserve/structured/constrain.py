"""Fits drafts to grammars: takes out what may not stand, puts in what must."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specserve.types import JUMP_FORWARD, Draft, GuardedState, Sequence


class _Branch(NamedTuple):
    """A node of a draft, or -1 for the last committed token, and what the grammar forces behind it."""

    node: int
    before: int  # the node whose branch it follows
    tokens: list[int]  # its own, then the forced ones; of -1 the forced ones alone


def constrain(seq: Sequence, draft: Draft, budget: int) -> Draft:
    """The draft as the grammar of its sequence leaves it, of at most `budget` tokens: without what may not stand, and
    with what is forced in front of it, behind each node, and so at its ends. What contradicts a forced token is
    dropped, what agrees with one becomes it. Nodes keep their order, which is their priority; a forced token is as
    likely as the node that it follows and comes right behind it.

    A draft with distributions keeps what it has drawn, with nothing put in: a token that may not stand ends its branch.
    Without that token it would not be what its distributions say, and what is generated not what the target says."""
    assert seq.grammar is not None, "free sequences are not constrained"
    is_drawn = draft.q is not None and len(draft) > 0
    branches = _walk(seq.grammar, draft, budget, seq.stop_ids, is_drawn)
    placed: list[tuple[int, int, int]] = []  # token, parent, and node of `draft`; -1: forced
    last = {-1: -1}  # where the branch of a node ends
    for node, before, found in sorted(branches):  # parents come before their children
        at = last[before]
        for i, token in enumerate(found[: budget - len(placed)]):
            placed.append((token, at, -1 if i else node))
            at = len(placed) - 1
        last[node] = at
    origins = [origin for _, _, origin in placed]
    if origins == [*range(len(draft))]:
        return draft
    tokens, parents, _ = np.array(placed, np.int32).reshape(-1, 3).T.copy()
    confidence = None
    if draft.confidence is not None:
        confidence = np.append(draft.confidence, np.float32(1.0))[origins]  # 1 for what is forced
    return Draft(
        tokens,
        parents,
        draft.q[origins] if is_drawn and draft.q is not None else None,
        frozenset(i for i, origin in enumerate(origins) if origin < 0),
        confidence,
        [draft.sources[origin] if origin >= 0 else (JUMP_FORWARD,) for origin in origins] if draft.sources else (),
        frozenset(i for i, origin in enumerate(origins) if origin < 0 or origin in draft.own),
    )


def _walk(state: GuardedState, draft: Draft, budget: int, ends: frozenset[int], is_drawn: bool) -> list[_Branch]:
    """The branches of nodes that may stand, on paths of at most `budget` tokens; with `is_drawn` nothing is put in, and
    the first node of a path that may not stand is its last. The state is then where it was."""
    tokens = draft.tokens.tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(draft.parents.tolist()):
        children.setdefault(parent, []).append(node)
    branches: list[_Branch] = []
    depth, ahead = 0, [(-1, -1, 0)]
    while ahead:
        node, before, level = ahead.pop()
        if depth > level:
            state.rollback(depth - level)
        depth = level
        if node >= 0 and not state.advance(tokens[node]):
            if is_drawn:
                branches.append(_Branch(node, before, [tokens[node]]))
            continue
        found = tokens[node : node + 1] if node >= 0 else []
        following = children.get(node, [])
        while (room := budget - level - len(found)) > 0 and not (found and found[-1] in ends):
            forced = [] if is_drawn else state.jump_forward()[:room]
            if not forced:
                ahead += [(child, node, level + len(found)) for child in reversed(following)]
                break
            taken = _take(state, forced, ends)
            found += forced[:taken]
            if taken < len(forced):
                break
            for token in forced:
                following = next((children.get(child, []) for child in following if tokens[child] == token), [])
        branches.append(_Branch(node, before, found))
        depth = level + len(found)
    if depth:
        state.rollback(depth)
    return branches


def _take(state: GuardedState, tokens: list[int], ends: frozenset[int]) -> int:
    """How many of the tokens the grammar lets follow, up to one that ends the sequence; it stands behind them."""
    for taken, token in enumerate(tokens):
        if not state.advance(token):
            return taken
        if token in ends:
            return taken + 1
    return len(tokens)
