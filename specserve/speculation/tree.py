"""Merges what drafters propose for one sequence into one tree, every node with its probability of acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence as Many

import numpy as np

from specserve.speculation.constants import FORCED
from specserve.speculation.stats import Acceptance, OwnAcceptance
from specserve.types import JUMP_FORWARD, Draft


class Proposals:
    """The merged tree of one sequence. Node i follows node parents[i] < i, -1 is the last committed token; no two
    siblings are equal. `survival[i]` is the estimated probability that node i is accepted, no higher than its parent's;
    `owners[i]` are the sources that proposed it, each with its cell of Acceptance."""

    __slots__ = (
        *("_at", "_own"),
        *("depths", "jump_forward", "owners", "parents", "survival", "tokens"),
    )

    def __init__(self, drafts: Many[tuple[str, Draft]] = ()) -> None:
        """Of drafts, each with the name of its source."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.survival: list[float] = []
        self.owners: list[list[tuple[str, int]]] = []
        self._at: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        self._own: set[int] = set()  # Draft.own, of any source
        self.jump_forward: frozenset[int] = frozenset()  # nodes that a grammar leaves no choice of
        for source, draft in drafts:
            self.add(source, draft)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, source: str, draft: Draft) -> None:
        """Take in a source's draft; nodes that are there already have one owner more."""
        confidence = None if draft.confidence is None else draft.confidence.tolist()
        places: list[int] = []
        for i, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True)):
            above = places[parent] if parent >= 0 else -1
            node = self._at.get((above, token))
            if node is None:
                node = self._at[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.depths.append(self.depths[above] + 1 if above >= 0 else 0)
                self.owners.append([])
            places.append(node)
            if i in draft.own:
                self._own.add(node)
            cell = Acceptance.cell(None if confidence is None else confidence[i], self.depths[node])
            self.owners[node].append((source, cell))

    def compute_survival(self, acceptance: Mapping[str, Acceptance], own: Mapping[str, OwnAcceptance]) -> None:
        """Work out the survival of all nodes, with what is in so far. Siblings are never likelier together than what is
        certain: the likeliest keep their chances."""
        self.survival, chances = [], list[float]()
        for owners in self.owners:
            chances.append(max(own[source].probability(acceptance[source].rates[cell]) for source, cell in owners))
        if len(set(self.parents)) < len(self):
            left: dict[int, float] = {}
            for node in sorted(range(len(self)), key=lambda node: -chances[node]):
                rest = left.get(self.parents[node], 1.0)
                chances[node] = min(chances[node], rest)
                left[self.parents[node]] = rest - chances[node]
        for node, parent in enumerate(self.parents):
            self.survival.append(chances[node] * (self.survival[parent] if parent >= 0 else 1.0))

    def constrained(self, draft: Draft) -> Proposals:
        """What a grammar made of the draft of all nodes: those that were there keep their owners."""
        found = Proposals()
        found.jump_forward = draft.jump_forward
        found.add(JUMP_FORWARD, draft)
        there: dict[int, int] = {-1: -1}  # node -> its like here
        for node, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
            like = self._at.get((there[parent], token)) if parent in there else None
            if like is not None:
                there[node] = like
                found.owners[node] = self.owners[like]
            if node in draft.jump_forward:
                found.owners[node] = [(JUMP_FORWARD, Acceptance.cell(FORCED, found.depths[node]))]
        return found

    def draft(self, nodes: Many[int]) -> Draft:
        """The draft of these nodes, ascending, each with its parent."""
        place = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return Draft(
            np.array([self.tokens[node] for node in nodes], np.int32),
            np.array([place[self.parents[node]] for node in nodes], np.int32),
            jump_forward=frozenset(place[node] for node in self.jump_forward if node in place),
            sources=[[source for source, _ in self.owners[node]] for node in nodes],
            own=frozenset(place[node] for node in nodes if node in self._own),
        )

    def by_depth(self) -> list[float]:
        """How many nodes of each depth are expected to be accepted."""
        found = [0.0] * (1 + max(self.depths, default=-1))
        for depth, survival in zip(self.depths, self.survival, strict=True):
            found[depth] += survival
        return found

    def by_source(self) -> Counter[str]:
        """How many nodes each source proposed."""
        return Counter(source for owners in self.owners for source, _ in owners)

    def judged(self, tokens: Many[int]) -> list[tuple[list[tuple[str, int]], int, bool]]:
        """The nodes that these tokens, which came, say something of: those behind accepted ones. Of each its owners,
        its depth and whether it was accepted."""
        found: list[tuple[list[tuple[str, int]], int, bool]] = []
        on_path = [False] * len(self)
        for node, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            if (parent < 0 or on_path[parent]) and depth < len(tokens):
                on_path[node] = self.tokens[node] == tokens[depth]
                found.append((self.owners[node], depth, on_path[node]))
        return found
