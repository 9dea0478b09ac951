"""The state "awaiting KV": sequences that have blocks, and whose KV is on its way into them from another engine."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable

from specserve.cache.cache import KVCache
from specserve.parallel.connector import Connector, NoConnector
from specserve.types import Sequence

_log = logging.getLogger(__name__)


class Awaiting:
    """They have no seat, and hold up nobody: when their KV has come, or will not come, they wait for a seat again at
    their rank. What came is in the prefix cache then, where each finds it when it starts; what did not come is computed
    here. Whoever runs and lacks blocks takes those of one of these before it preempts another, whose KV would have to
    be computed again."""

    def __init__(self, cache: KVCache, rank: Callable[[Sequence], tuple[int, int]]) -> None:
        self.connector: Connector = NoConnector()
        self.seqs: list[Sequence] = []  # sorted by rank
        self.num_prompts = 0  # of which KV came
        self.num_tokens = 0  # that came
        self.num_failures = 0
        self.seconds = 0.0  # that KV which came was awaited
        self._cache, self._rank = cache, rank

    def reserve(self, seq: Sequence) -> bool | None:
        """Let a waiting sequence, which has the cached blocks of its prefix, await more; False where blocks for that do
        not suffice, None where there is nothing to be had."""
        num_tokens = self.connector.num_available(seq)
        if not num_tokens:
            return None
        if not self._cache.reserve(seq, num_tokens):
            return False
        bisect.insort(self.seqs, seq, key=self._rank)
        self.connector.begin(seq)
        return True

    def discard(self, seq: Sequence) -> bool:
        """Await nothing more for it; its blocks are its own again. Says whether it was one of these."""
        if seq not in self.seqs:
            return False
        self.seqs.remove(seq)
        self.connector.end(seq)
        return True

    def withdraw(self) -> Sequence | None:
        """Take the blocks of the one that ranks last. It is to wait, and may try again."""
        if not self.seqs:
            return None
        last = self.seqs[-1]
        self.discard(last)
        self._cache.free(last)
        return last

    def receive(self) -> list[Sequence]:
        """Those that are to wait for a seat now. Each keeps no block: those that came are found by their names."""
        news = self.connector.poll()
        for seq, num_tokens, num_drafted, seconds in news.arrivals:
            num_new = num_tokens - seq.cached
            assert num_new > 0, "what arrives was not there"
            if seq.draft_cached == seq.cached:
                seq.draft_cached = max(num_drafted, seq.cached)
            self._cache.keep(seq, num_new)
            seq.stats.num_received_tokens += num_new
            self.num_tokens += num_new
            self.num_prompts += 1
            self.seconds += seconds
        for seq, reason in news.failures:
            self.num_failures += 1
            _log.warning("KV of a prompt of %d tokens did not come, it is computed: %s", seq.num_prompt, reason)
        for seq in news.seqs:
            self.seqs.remove(seq)
            seq.num_elsewhere = 0
            self._cache.free(seq)
        return news.seqs
