"""A draft walked node by node, with the grammar's state moved over each token and taken back: the plain form of what
some backends do in one call."""

from __future__ import annotations

from collections.abc import Callable

from specserve.types import GrammarState, Ids


def fill_draft(state: GrammarState, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
    """What GrammarState.fill_draft promises, by `fill`, `advance` and `rollback` alone."""
    rows[:] = 0
    state.fill(rows[0])

    def fill_after(node: int) -> None:
        if int(tokens[node]) not in ends:
            state.fill(rows[node + 1])

    visit(state, tokens, parents, ends, fill_after)


def visit(
    state: GrammarState, tokens: Ids, parents: Ids, ends: frozenset[int], at_node: Callable[[int], object]
) -> None:
    """Call `at_node` for each node that may stand, with the state after it; parents go first, and the state is where it
    was in the end. Nothing stands after a token that ends the sequence."""
    if not len(tokens):
        return
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents.tolist()):
        children.setdefault(parent, []).append(node)
    depth, ahead = 0, [(node, 0) for node in reversed(children[-1])]
    while ahead:
        node, level = ahead.pop()
        state.rollback(depth - level)
        depth = level
        token = int(tokens[node])
        if state.advance(token):
            depth += 1
            at_node(node)
            if token not in ends:
                ahead += [(child, depth) for child in reversed(children.get(node, ()))]
    state.rollback(depth)
