"""Finite automata over the bytes of a text, and the tokens that may follow each of their states, computed once for a
vocabulary.

A table of tokens would take states x vocabulary entries. Tokens are bytes, so the state after one is found by walking
them: a few look-ups in a table of states x 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.structured.base import RefusedError, Vocabulary
from specserve.types import Ids

# States that every table has: what may not come leads nowhere, what ends a text leads to its end. Nothing follows them.
NOWHERE, ENDED, START = 0, 1, 2
MAX_STATES = 4096
MAX_BYTES = 2**26  # of a table
_MOST_FORCED = 512  # bytes that are split at once: more than any draft holds
_STATES_AT_ONCE = 16  # more of them fit no cache


class _Level(NamedTuple):
    """The nodes of the tree of all tokens that lie equally deep, in the order of those above. The children of a node
    above are `first_child[node] : first_child[node + 1]`; the tokens that end at a node of this level likewise."""

    first_child: NDArray[np.int64]  # [nodes above + 1]
    bytes: NDArray[np.int64]  # [nodes]
    first_token: NDArray[np.int64]  # [nodes + 1]
    tokens: NDArray[np.int64]  # [tokens that end here], ids


class TokenTree:
    """All tokens of a vocabulary that are text, with their common beginnings taken together."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.spellings = list(vocabulary.tokens)
        for token in set(vocabulary.eos_ids) & set(range(len(self.spellings))):
            self.spellings[token] = b""  # it ends a text, and spells nothing of it
        self.lengths = np.array([len(spelling) for spelling in self.spellings])
        self._levels = list(self._grown())

    def _grown(self) -> Iterator[_Level]:
        at, num_above = np.zeros(len(self.spellings), np.int64), 1
        for depth in range(int(self.lengths.max())):
            reaching = np.flatnonzero(self.lengths > depth)
            following = np.array([self.spellings[token][depth] for token in reaching.tolist()], np.int64)
            nodes, at[reaching] = np.unique(at[reaching] << 8 | following, return_inverse=True)
            ending = np.flatnonzero(self.lengths == depth + 1)
            ending = ending[np.argsort(at[ending], kind="stable")]
            first_child = np.searchsorted(nodes >> 8, np.arange(num_above + 1))
            first_token = np.searchsorted(at[ending], np.arange(len(nodes) + 1))
            yield _Level(first_child, nodes & 255, first_token, ending)
            num_above = len(nodes)

    def after(self, following: Ids, states: Ids) -> tuple[Ids, Ids]:
        """The tokens that may follow any of the states, int32 [found], and the state after each, int32 [states,
        found]: NOWHERE if it may not follow this one."""
        tokens, after = [np.zeros(0, np.int64)], [np.zeros((len(states), 0), np.int32)]
        at, nodes = states[:, None], np.zeros(1, np.int64)  # at: [states, nodes]
        for level in self._levels:
            above, nodes = _members(level.first_child, nodes)
            at = following.take(at[:, above] << 8 | level.bytes[nodes])
            possible = at.any(axis=0)
            nodes, at = nodes[possible], at[:, possible]
            if not len(nodes):
                break
            ends, found = _members(level.first_token, nodes)
            tokens.append(level.tokens[found])
            after.append(at[:, ends])
        return np.concatenate(tokens).astype(np.int32), np.concatenate(after, axis=1)


def _members(first: NDArray[np.int64], groups: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All members of some groups, whose members are first[group] : first[group + 1]: for each of them the place of its
    group among `groups`, and itself."""
    counts = first[groups + 1] - first[groups]
    places = np.repeat(np.arange(len(groups)), counts)
    skipped = first[groups] - (np.cumsum(counts) - counts)
    return places, np.arange(len(places)) + skipped[places]


@dataclass(frozen=True, slots=True)
class Transitions:
    """An automaton: `following` is the state after each byte, int32 [states, 256]; `accepting` says where a text may
    end, bool [states]. The first states are those above."""

    following: Ids
    accepting: NDArray[np.bool_]

    def __post_init__(self) -> None:
        assert not self.following[[NOWHERE, ENDED]].any(), "nothing follows what may not come, and nothing an end"
        assert not self.accepting[[NOWHERE, ENDED]].any(), "a text ends once"


def check_size(num_states: int, vocabulary: Vocabulary) -> None:
    """Raise RefusedError if tables of so many states would be too large."""
    num_bytes = num_states * 4 * (vocabulary.num_words + 256)
    if num_states > MAX_STATES or num_bytes > MAX_BYTES:
        raise RefusedError(
            f"this has {num_states} states, whose tables take {num_bytes >> 20} MiB for this vocabulary; at most "
            f"{MAX_STATES} states and {MAX_BYTES >> 20} MiB are taken. Use smaller counts, or another backend."
        )


class Automaton:
    """A grammar as tables. Raises RefusedError if they would be too large, or if nothing fits."""

    def __init__(self, transitions: Transitions, tree: TokenTree) -> None:
        check_size(len(transitions.following), tree.vocabulary)
        self._tree = tree
        self._transitions = transitions
        self._eos_ids = tree.vocabulary.eos_ids
        self._after = transitions.following.ravel().data  # quicker to look at than an array
        self._forced: dict[int, list[int]] = {}  # as they are asked for: few states ever are
        self.masks = _masks(transitions, tree)  # int32 [states, words]
        self.num_bytes = self.masks.nbytes + transitions.following.nbytes
        if not self.masks[START].any():
            raise RefusedError("nothing fits this.")

    def start(self) -> AutomatonState:
        return AutomatonState(self)

    def after(self, state: int, token: int) -> int:
        """The state after a token, NOWHERE if that may not come."""
        if not 0 <= token < self._tree.vocabulary.size or not self.masks[state, token >> 5] >> (token & 31) & 1:
            return NOWHERE
        if token in self._eos_ids:
            return ENDED
        for byte in self._tree.spellings[token]:
            state = self._after[state << 8 | byte]
        return state

    def jump_forward(self, state: int) -> list[int]:
        """The tokens of the text that must follow, as the tokenizer splits it, as far as no token reaches beyond it."""
        if state not in self._forced:
            self._forced[state] = self._split(state)
        return self._forced[state]

    def _split(self, state: int) -> list[int]:
        forced, last = self._forced_text(state)
        ends = bool(self._transitions.accepting[last]) and not self._transitions.following[last].any()
        text = _whole_characters(forced)
        tokens = self._tree.vocabulary.encode(text.decode()) if text else []
        if b"".join(self._tree.spellings[token] for token in tokens) != text:
            return []
        certain: list[int] = []
        left = len(forced)
        for token in tokens:
            after = self.after(state, token)
            if after == NOWHERE or self._longest(state) > left:
                return certain
            certain.append(token)
            state, left = after, left - len(self._tree.spellings[token])
        return [*certain, self._eos_ids[0]] if ends and not left else certain

    def _forced_text(self, state: int) -> tuple[bytes, int]:
        """The bytes that must follow, and the state after them."""
        text = bytearray()
        following, accepting = self._transitions.following, self._transitions.accepting
        while not accepting[state] and len(text) < _MOST_FORCED:
            (choices,) = np.nonzero(following[state])
            if len(choices) != 1:
                break
            text.append(int(choices[0]))
            state = int(following[state, choices[0]])
        return bytes(text), state

    def _longest(self, state: int) -> int:
        """Bytes of the longest token that may come."""
        bits = np.unpackbits(self.masks[state].view(np.uint8), bitorder="little")[: len(self._tree.lengths)]
        return int(self._tree.lengths[bits.astype(bool)].max(initial=0))


class AutomatonState:
    """The states that one sequence came through. Every step is a look-up, and going back forgets."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._path = [START]

    def fill(self, row: Ids) -> None:
        row[:] = self._automaton.masks[self._path[-1]]

    def fill_draft(self, tokens: Ids, parents: Ids, ends: frozenset[int], rows: Ids) -> None:
        """The state's own row and what may follow each node of a draft, gathered at once. Nothing follows a node that
        may not stand or whose token is in `ends`."""
        states = [self._path[-1]]
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            states.append(NOWHERE if token in ends else self._automaton.after(states[parent + 1], token))
        rows[:] = self._automaton.masks[states]

    def allows(self, token: int) -> bool:
        row = self._automaton.masks[self._path[-1]]
        return 0 <= token < 32 * len(row) and bool(row.item(token // 32) >> token % 32 & 1)

    def advance(self, token: int) -> bool:
        state = self._automaton.after(self._path[-1], token)
        if state != NOWHERE:
            self._path.append(state)
        return state != NOWHERE

    def rollback(self, n: int) -> None:
        assert 0 <= n < len(self._path), "rolled back beyond the beginning"
        del self._path[len(self._path) - n :]

    def jump_forward(self) -> list[int]:
        return self._automaton.jump_forward(self._path[-1])


def _masks(transitions: Transitions, tree: TokenTree) -> Ids:
    """The bits of the tokens that may follow each state: those after which a text can still come to its end, in
    tokens of this vocabulary."""
    everywhere = np.ones(len(transitions.following), np.bool_)
    everywhere[NOWHERE] = False
    masks, sources = _rows(transitions, tree, everywhere)
    alive = _alive(transitions.accepting, sources)
    if not alive[START:].all():
        masks, _ = _rows(transitions, tree, alive)
    for token in tree.vocabulary.eos_ids:
        masks.view(np.uint32)[transitions.accepting, token >> 5] |= np.uint32(1 << (token & 31))
    return masks


def _rows(transitions: Transitions, tree: TokenTree, kept: NDArray[np.bool_]) -> tuple[Ids, NDArray[np.bool_]]:
    """Bits of the tokens that lead to states that are kept, and from which states a token leads to which, bool [to,
    from]."""
    num_states, num_words = len(transitions.following), tree.vocabulary.num_words
    masks = np.zeros((num_states, num_words), np.int32)
    packed = masks.view(np.uint8)
    sources = np.zeros((num_states, num_states), np.bool_)
    for first in range(START, num_states, _STATES_AT_ONCE):
        states = np.arange(first, min(first + _STATES_AT_ONCE, num_states), dtype=np.int32)
        tokens, after = tree.after(transitions.following, states)
        bits = np.zeros((len(states), 32 * num_words), np.bool_)
        bits[:, tokens] = kept[after]
        packed[states] = np.packbits(bits, axis=1, bitorder="little")
        sources[after, states[:, None]] = True
    return masks, sources


def _alive(accepting: NDArray[np.bool_], sources: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The states from which some way leads to one where a text may end."""
    alive = accepting.copy()
    left = np.flatnonzero(alive).tolist()
    while left:
        found = sources[left.pop()] & ~alive
        alive |= found
        left += np.flatnonzero(found).tolist()
    alive[[NOWHERE, ENDED]] = False
    return alive


def _whole_characters(text: bytes) -> bytes:
    """Without a character that is cut off, at the beginning or at the end."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text
