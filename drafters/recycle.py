"""Token Recycling: continue with what the target itself held likeliest behind each token, the last time it read it.

Method: arXiv 2408.08696. There the tree has a fixed shape; here it has the nodes that are likeliest by their ranks and
by which rank came the last time.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator
from struct import Struct

import numpy as np

from specserve.errors import ConfigError
from specserve.ops import MOST_TOP_K
from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceReport, SequenceView, StepReport
from specserve.speculation.retrieval import checked_mib, likeliest_tree
from specserve.types import Draft

# What came after a token the last time: nothing yet, the best of its row, the second or third, or another.
_UNSEEN, _BEST, _NEAR, _OTHER = range(4)
# By that, how likely the best and the second are; each later one is 0.6 times as likely. 60 answers replayed, 5 and
# 8 drafted: 1.56 and 1.62 tokens a step, as with chances counted online; 1.53 and 1.60 where the last is ignored.
_CHANCES = tuple(
    (best, *(second * 0.6**rank for rank in range(MOST_TOP_K - 1)))
    for best, second in ((0.45, 0.08), (0.6, 0.05), (0.27, 0.15), (0.18, 0.09))
)
_TABLE_MIB = 32.0  # 800,000 tokens of all tenants
_SMALLEST = 256  # ids that a table has places for at first: 1 KB
_FIRST = Struct("=i")  # of a row's tokens
_LEAST_MIB = 1 / 64  # room for one such


class RecycleDrafter:
    """A tree of the target's last `top_k` best tokens behind each token.

    Whatever a step has verified, accepted or not, says what follows its token now. Each tenant (salt) has a table,
    kept across its requests; the tables of all tenants together take `table_mib` MiB, and those that were not used for
    longest go first. A step costs a look-up and a copy of some bytes for each of its rows, a proposal one look-up a
    node. Raises ConfigError unless 1 <= top_k <= MOST_TOP_K and 1/64 <= table_mib < 2^20.
    """

    def __init__(self, context: DraftContext, top_k: int = 8, table_mib: float | None = None) -> None:
        if type(top_k) is not int or not 1 <= top_k <= MOST_TOP_K:
            raise ConfigError(f"top_k is {top_k!r}; it must be a whole number from 1 to {MOST_TOP_K}.")
        table_mib = checked_mib("table_mib", table_mib, _TABLE_MIB, _LEAST_MIB, context)
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
        top = step.top.tobytes()
        for salt, reports in tenants.items():
            table = self._drop(salt) or _Table(self.needs.top_k)
            table.observe(reports, top)
            self._tables[salt] = table
            self._num_bytes += table.num_bytes
        while self._num_bytes > self.needs.memory_bytes:
            self._drop(next(iter(self._tables)))

    def end(self, seq: SequenceView) -> None:
        """Its tenant may have other sequences, and others later; a private request has its completions alone."""
        if seq.is_private:
            self._num_open[seq.salt] -= 1
            if not self._num_open[seq.salt]:
                del self._num_open[seq.salt]
                self._drop(seq.salt)

    def _drop(self, salt: bytes) -> _Table | None:
        table = self._tables.pop(salt, None)
        self._num_bytes -= 0 if table is None else table.num_bytes
        return table


class _Table:
    """What the target held likeliest after the tokens of one tenant. In bytes, as a step reads and writes but a
    handful of rows."""

    def __init__(self, top_k: int) -> None:
        self._row = Struct(f"={top_k}iB")  # best first, then what came the last time
        self._num_best_bytes = self._row.size - 1
        self._places = array("i", bytes(4 * _SMALLEST))  # of tokens' rows, in bytes; 0: nothing is known
        self._rows = bytearray(self._row.size)

    @property
    def num_bytes(self) -> int:
        return len(self._places) * self._places.itemsize + len(self._rows)

    def tree(self, token: int, most: int) -> Draft:
        """The `most` likeliest nodes after a token. A node is as likely as its parent times what its rank is worth."""
        tokens, parents, confidence = likeliest_tree(self.children(token), self.children, most)
        return Draft(np.array(tokens, np.int32), parents, confidence=confidence)

    def children(self, token: int) -> Iterator[tuple[float, int]]:
        """What may follow a token, the likeliest first, and how likely it does; nothing if nothing is known."""
        place = self._place(token)
        *row, last = self._row.unpack_from(self._rows, place) if place else (_UNSEEN,)
        return zip(_CHANCES[last], row, strict=False)

    def observe(self, reports: list[SequenceReport], top: bytes) -> None:
        """Note which ranks came, then take in what may follow all tokens that were verified, of which `top` has the
        rows. Of equal tokens the last stays: that is one of the sequence itself, where there is one."""
        size = self._num_best_bytes
        new: list[tuple[int, int]] = []  # tokens, and where in `top` their rows begin
        for each in reports:
            assert each.verdict is not None
            tokens = [*each.draft.tokens.tolist(), each.seq.tokens[each.start + each.num_new - 1]]  # node -1 is its own
            kept = [-1, *each.verdict.path]
            for node, said in zip(kept, each.verdict.tokens, strict=True):
                if place := self._place(tokens[node]):
                    row = self._row.unpack_from(self._rows, place)[:-1]
                    rank = row.index(said) if said in row else len(row)
                    came = _BEST if rank == 0 else _NEAR if rank < 3 else _OTHER
                    self._rows[place + size] = came
            order = [*(node for node in range(len(each.draft)) if node not in kept), *kept]
            new += [(tokens[node], size * (each.logits_start + 1 + node)) for node in order]
        for token, start in new:
            if _FIRST.unpack_from(top, start)[0] >= 0:  # else the row says nothing
                place = self._place(token) or self._add(token)
                self._rows[place : place + size] = top[start : start + size]

    def _place(self, token: int) -> int:
        return self._places[token] if token < len(self._places) else 0

    def _add(self, token: int) -> int:
        """Make room for a token that nothing is known of; returns its place."""
        if token >= len(self._places):
            count = max(token + 1, 2 * len(self._places))
            self._places.frombytes(bytes(self._places.itemsize * (count - len(self._places))))
        place = self._places[token] = len(self._rows)
        self._rows += bytes(self._row.size)  # _UNSEEN
        return place
