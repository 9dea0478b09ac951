"""Token Recycling: continue with what the target itself held likeliest behind each token, the last time it read it.

Method: arXiv 2408.08696. There the tree has a fixed shape; here it has the nodes that are likeliest by what ranks have
been worth so far.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np

from specserve.errors import ConfigError
from specserve.ops import MOST_TOP_K
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceReport, SequenceView, StepReport
from specserve.types import Draft, Ids

# What came behind a token the last time it was read: of its row the best, the second or third, a later one, or another.
_UNSEEN, _BEST, _NEAR, _FAR, _OTHER = range(5)
# How likely the best, the second and the third of a row come at first, by that; later ones come more and more seldom.
_FIRST_GUESS = (0.45, 0.08, 0.04), (0.6, 0.05, 0.025), (0.27, 0.15, 0.07), (0.22, 0.12, 0.07), (0.18, 0.09, 0.05)
_GUESS_WEIGHT = 32.0  # tokens that a first guess counts as
_MOST_COUNTED = 2048.0  # tokens of a kind; then those before are halved
_STEPS_PER_LOOK = 16  # between two looks at the counts
_TABLE_MIB = 32.0
_SMALLEST = 256  # tokens that a table begins with


class _Children(NamedTuple):
    """What may follow a token."""

    chances: list[tuple[float, int]]  # probability and rank, the likeliest first
    row: list[int]  # tokens by rank


class RecycleDrafter:
    """A tree of the target's last `top_k` best tokens behind each token.

    Whatever a step has verified, accepted or not, says what follows its token now. Each tenant (salt) has a table,
    kept across its requests; the tables of all tenants together take `table_mib` MiB, and those that were not used for
    longest go first. A step costs a few array operations for each tenant in it, a proposal one look-up a node. Raises
    ConfigError unless 1 <= top_k <= MOST_TOP_K and 0 < table_mib < 2^20.
    """

    def __init__(self, context: DraftContext, top_k: int = 8, table_mib: float | None = None) -> None:
        if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= MOST_TOP_K:
            raise ConfigError(f"top_k is {top_k!r}; it must be a whole number from 1 to {MOST_TOP_K}.")
        if table_mib is None:
            table_mib = _TABLE_MIB if context.memory_bytes is None else min(_TABLE_MIB, context.memory_bytes / 2**20)
        if not isinstance(table_mib, (int, float)) or isinstance(table_mib, bool) or not 0 < table_mib < 2**20:
            raise ConfigError(f"table_mib is {table_mib!r}; it must be a number of MiB above 0 and below 2^20.")
        self.needs = Needs(top_k=min(top_k, context.vocab_size), memory_bytes=int(table_mib * 2**20))
        self._tables: OrderedDict[bytes, _Table] = OrderedDict()  # least recently used first
        self._num_bytes = 0  # of all of them
        self._num_open: Counter[bytes] = Counter()  # sequences of private tenants

    def begin(self, seq: SequenceView) -> None:
        """What is known is known of tokens."""
        if seq.is_private:
            self._num_open[seq.salt] += 1

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        drafts = []
        for seq, most in requests:
            table = self._tables.get(seq.salt)
            drafts.append(Draft.empty() if table is None else table.tree(seq.tokens[-1], most))
        return drafts

    def observe(self, step: StepReport) -> None:
        assert step.top is not None, "it was asked for"
        tenants: dict[bytes, list[SequenceReport]] = {}
        for each in step.seqs:
            if each.verdict is not None:
                tenants.setdefault(each.seq.salt, []).append(each)
        for salt, reports in tenants.items():
            table = self._tables.pop(salt, None)
            self._num_bytes -= 0 if table is None else table.num_bytes
            table = self._tables[salt] = table or _Table(self.needs.top_k)
            table.observe(reports, step.top)
            self._num_bytes += table.num_bytes
        while self._num_bytes > self.needs.memory_bytes:
            self._num_bytes -= self._tables.popitem(last=False)[1].num_bytes

    def end(self, seq: SequenceView) -> None:
        """Its tenant may have other sequences, and others later; a private request has its completions alone."""
        if not seq.is_private:
            return
        self._num_open[seq.salt] -= 1
        if not self._num_open[seq.salt]:
            del self._num_open[seq.salt]
            table = self._tables.pop(seq.salt, None)
            self._num_bytes -= 0 if table is None else table.num_bytes


class _Table:
    """What followed the tokens of one tenant, and what ranks have been worth to it: by what the token's row was worth
    the last time, and whether the token ends the sequence or is a draft's, where all before it was right."""

    def __init__(self, top_k: int) -> None:
        self._places = np.zeros(_SMALLEST, np.int32)  # of tokens among the rows; 0: nothing is known
        self._rows = np.full((_SMALLEST, top_k), -1, np.int32)  # best first
        self._worth = np.full(_SMALLEST, _UNSEEN, np.int32)  # of rows, the last time
        self._num_rows = 1
        kinds = [(*guess, *(guess[-1] * 0.7**n for n in range(1, top_k)))[:top_k] for guess in _FIRST_GUESS]
        self._hits = [[share * _GUESS_WEIGHT for share in kind] for kind in kinds for _ in range(2)]  # [kind][rank]
        self._trials = [_GUESS_WEIGHT] * len(self._hits)
        self._num_steps = 0
        self._look()

    @property
    def num_bytes(self) -> int:
        return self._places.nbytes + self._rows.nbytes + self._worth.nbytes

    def tree(self, token: int, most: int) -> Draft:
        """The `most` likeliest nodes behind a token. A node is as likely as its parent times what its rank is worth."""
        tokens: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        # Minus a node's probability, its parent, which child of that it is, the parent's probability, all its children.
        likely: list[tuple[float, int, int, float, _Children]] = []
        children = self._children(token, False)
        if children is not None:
            likely.append((-children.chances[0][0], -1, 0, 1.0, children))
        while likely and len(tokens) < most:
            value, parent, nth, above, (chances, row) = entry = heapq.heappop(likely)
            chance, rank = chances[nth]
            if nth + 1 < len(row):
                heapq.heappush(likely, (-above * chances[nth + 1][0], parent, nth + 1, above, entry[4]))
            children = self._children(row[rank], True)
            if children is not None:
                heapq.heappush(likely, (value * children.chances[0][0], len(tokens), 0, -value, children))
            tokens.append(row[rank])
            parents.append(parent)
            confidence.append(chance)
        sure = np.array(confidence, np.float32)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), confidence=sure)

    def observe(self, reports: list[SequenceReport], top: Ids) -> None:
        """Count the ranks of the tokens that came, then take in what may follow all tokens that were verified. Of equal
        tokens the last stays: that is one of the sequence itself, where there is one."""
        read: list[int] = []
        rows: list[int] = []
        for each in reports:
            assert each.verdict is not None
            tokens = [*each.draft.tokens.tolist(), each.seq.tokens[each.start + each.num_new - 1]]  # node -1 is its own
            kept = [-1, *each.verdict.path]
            for node, said in zip(kept, each.verdict.tokens, strict=True):
                self._count(tokens[node], node >= 0, said)
            order = [*(node for node in range(len(each.draft)) if node not in kept), *kept]
            read += [tokens[node] for node in order]
            rows += [each.logits_start + 1 + node for node in order]
        self._store(read, top[rows])
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LOOK == 0:
            self._look()

    def _count(self, token: int, is_drafted: bool, said: int) -> None:
        """That `said` followed a token."""
        children = self._children(token, is_drafted)
        if children is None:
            return
        place = self._places.item(token)
        kind = 2 * self._worth.item(place) + is_drafted
        rank = children.row.index(said) if said in children.row else len(children.row)
        self._trials[kind] += 1
        if rank < len(children.row):
            self._hits[kind][rank] += 1
        self._worth[place] = _OTHER if rank == len(children.row) else (_BEST, _NEAR, _NEAR, _FAR)[min(rank, 3)]

    def _store(self, tokens: list[int], top: Ids) -> None:
        """Let rows `top` [n, top_k] be those of the tokens, but for those that say nothing."""
        if top[:, 0].min() < 0:
            usable = np.flatnonzero(top[:, 0] >= 0).tolist()
            tokens, top = [tokens[i] for i in usable], top[usable]
        self._places = _grown(self._places, max(tokens, default=0) + 1, 0)
        for token in tokens:
            if not self._places.item(token):
                self._places[token] = self._num_rows
                self._num_rows += 1
        self._rows = _grown(self._rows, self._num_rows, -1)
        self._worth = _grown(self._worth, self._num_rows, _UNSEEN)
        self._rows[self._places[tokens]] = top

    def _children(self, token: int, is_drafted: bool) -> _Children | None:
        """What may follow a token; None where nothing is known."""
        place = self._places.item(token) if token < len(self._places) else 0
        if not place:
            return None
        return _Children(self._chances[2 * self._worth.item(place) + is_drafted], self._rows[place].tolist())

    def _look(self) -> None:
        """Settle what ranks are worth, and let new counts weigh more than old ones."""
        self._chances: list[list[tuple[float, int]]] = []
        for kind, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
            self._chances.append(sorted(((hit / trials, rank) for rank, hit in enumerate(hits)), reverse=True))
            if trials > _MOST_COUNTED:
                self._trials[kind] /= 2
                self._hits[kind] = [hit / 2 for hit in hits]


def _grown(array: Ids, length: int, fill: int) -> Ids:
    """The array, made at least twice as long with `fill` where it is shorter than `length`."""
    if length <= len(array):
        return array
    more = np.full((max(length, 2 * len(array)) - len(array), *array.shape[1:]), fill, np.int32)
    return np.concatenate((array, more))
