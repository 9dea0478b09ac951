"""Drafts that a model writes pass by pass: chains where tokens are drawn, else the likeliest tree of what it says."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.speculation.base import DraftRequest, SequenceView
from specserve.speculation.draft_sampler import ChainDraft, DraftSampler, GrowingChains
from specserve.speculation.models import DraftInput, DraftOutput, DraftRunner
from specserve.types import Draft

ROOT = -1  # the sequence's last token
_MOST_CANDIDATES = 10  # tokens behind a node, as the published trees have them


def checked_top_k(value: int) -> int:
    """The option top_k of a drafter of trees. Raises ConfigError for what is no number from 1 to 10."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_CANDIDATES:
        raise ConfigError(f"top_k is {value!r}; it must be a whole number from 1 to {_MOST_CANDIDATES}.")
    return value


class LikeliestTree:
    """A draft of the `most` likeliest nodes, none below `least`; a node is as likely as the product of what the model
    gives to the tokens on its path. What follows a node is asked of the model when it is `opened`, and only where a
    child may be among the likeliest: children are never likelier than their parent (the search of EAGLE-2, arXiv
    2406.16858, without a fixed number of nodes in each depth)."""

    def __init__(self, seq: SequenceView, most: int, least: float = 0.0) -> None:
        self.seq, self._most, self._least = seq, most, least
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._own: list[float] = []  # the chance of each node if its parent is right
        self._chances: list[float] = []
        self._opened: set[int] = set()

    def wanted(self) -> list[int]:
        """The nodes to open next, the likeliest first; all that stands before them is among the likeliest too."""
        if ROOT not in self._opened:
            return [ROOT]
        best = self._best()
        least = self._chances[best[-1]] if len(best) == self._most else 0.0
        return [node for node in best if node not in self._opened and self._chances[node] > least]

    def open(self, node: int, tokens: Many[int], chances: Many[float]) -> None:
        """These tokens may follow the node, which was wanted, with these chances; the likeliest first."""
        self._opened.add(node)
        before = 1.0 if node == ROOT else self._chances[node]
        for token, own in zip(tokens, chances, strict=True):
            own = min(own, 1.0)
            if not own or before * own < self._least:
                break
            self._tokens.append(token)
            self._parents.append(node)
            self._own.append(own)
            self._chances.append(before * own)

    def node(self, node: int) -> tuple[int, int]:
        """Its token and its parent."""
        return self._tokens[node], self._parents[node]

    def tokens(self, node: int) -> list[int]:
        """From the root to that one."""
        return [self._tokens[each] for each in self.path(node)]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to that one."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self._parents[node]
        return nodes[::-1]

    def draft(self) -> Draft:
        best = self._best()
        places = {node: i for i, node in enumerate(best)} | {ROOT: ROOT}
        return Draft(
            np.array([self._tokens[node] for node in best], np.int32),
            np.array([places[self._parents[node]] for node in best], np.int32),
            confidence=np.array([self._own[node] for node in best], np.float32),
            own=range(len(best)),
        )

    def _best(self) -> list[int]:
        """The likeliest nodes so far, parents before children."""
        return sorted(range(len(self._tokens)), key=lambda node: -self._chances[node])[: self._most]


class Passes:
    """Drafts for some sequences, which a model is asked for in passes over all that still grow: trees of `top_k`
    candidates behind each node, where that is more than one, and chains for all others and for those to whose drafts a
    distribution belongs. `seqs` are in the order of the rows that the first pass shall have, one each. A model that
    `reads_hidden` stands one token behind: it reads a token beside what it said of the hidden state before that.
    `second_best` is for chains, as ChainDraft has it."""

    def __init__(
        self,
        sampler: DraftSampler,
        requests: Many[DraftRequest],
        top_k: int,
        least: float,
        ids: Tensor | None = None,
        reads_hidden: bool = False,
        second_best: bool = False,
    ) -> None:
        self._sampler, self._top_k, self._ids, self._reads_hidden = sampler, top_k, ids, reads_hidden
        is_tree = [top_k > 1 and sampler.is_chosen([each.seq]) for each in requests]
        trees = [LikeliestTree(*each, least) for each, is_one in zip(requests, is_tree, strict=True) if is_one]
        others = [each for each, is_one in zip(requests, is_tree, strict=True) if not is_one]
        chains = [ChainDraft(*each, least, second_best) for each in others]
        self._all: list[ChainDraft | LikeliestTree] = [*chains, *trees]
        self.seqs = [each.seq for each in self._all]
        self._growing = GrowingChains(sampler, chains, ids)
        self._trees = [(tree, tree.wanted()) for tree in trees]
        self._states: dict[tuple[LikeliestTree, int], Tensor] = {}  # what the model said behind opened nodes

    def after(self, out: DraftOutput) -> list[DraftInput]:
        """What the next pass shall read, now that one has said this; nothing when all drafts have ended."""
        count = len(self._growing.chains)
        rows = self._growing.grow(out.logits[:count]) if count else []
        states = out.hidden[rows].clone() if self._reads_hidden else None  # the next pass overwrites it
        if self._trees:
            self._open(out.logits[count:], out.hidden[count:])
        inputs = []
        for i, chain in enumerate(self._growing.chains):
            at = len(chain.seq.tokens) + len(chain.tokens) - 1 - self._reads_hidden
            features = None if states is None else states[i : i + 1]
            # A head reads all tokens again behind the target's own hidden states: these here are never the sequence's.
            inputs.append(DraftInput(chain.seq, at, [chain.last], features=features, is_scratch=self._reads_hidden))
        return inputs + [self._tree_input(tree, wanted) for tree, wanted in self._trees]

    def write_chains(self, runner: DraftRunner, out: DraftOutput) -> bool:
        """Write all drafts at once, behind the first pass, of a model that `reads_hidden`; returns whether that could
        be done."""
        if self._trees or not self._sampler.is_chosen(self.seqs) or any(seq.has_grammar for seq in self.seqs):
            return False
        return runner.write_chains(self._growing.chains, out, self._sampler)

    def drafts(self) -> dict[SequenceView, Draft]:
        return {each.seq: each.draft() for each in self._all}

    def _open(self, logits: Tensor, hidden: Tensor) -> None:
        """Open the nodes that were wanted, a row for each."""
        opened = [(tree, node) for tree, wanted in self._trees for node in wanted]
        behind = [(tree.seq, tree.tokens(node)) for tree, node in opened]
        seqs, depths = [seq for seq, _ in behind], [len(tokens) for _, tokens in behind]
        scores = self._sampler.noisy(seqs, depths, logits, self._ids)
        allowed = self._sampler.allowed_logits(behind, scores, self._ids)
        best = self._sampler.best(allowed, min(self._top_k, logits.shape[1]), self._ids)
        for row, (tree, node) in enumerate(opened):
            tree.open(node, best[0][row], best[1][row])
            if self._reads_hidden:
                self._states[tree, node] = hidden[row].clone()
        self._trees = [(tree, wanted) for tree, _ in self._trees if (wanted := tree.wanted())]

    def _tree_input(self, tree: LikeliestTree, wanted: list[int]) -> DraftInput:
        """These nodes, and once more those that they stand behind."""
        before = sorted({node for each in wanted for node in tree.path(each)} - set(wanted))
        nodes = before + wanted
        places = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        tokens, parents = zip(*(tree.node(node) for node in nodes), strict=True)
        features = torch.stack([self._states[tree, parent] for parent in parents]) if self._reads_hidden else None
        at = len(tree.seq.tokens) - self._reads_hidden
        ordered = [places[parent] for parent in parents]
        return DraftInput(tree.seq, at, tokens, ordered, len(wanted), features, is_scratch=True)
