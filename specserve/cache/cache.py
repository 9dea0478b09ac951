"""The KV cache of all sequences: block tables, prefix sharing, copy on write, and which KV of a verified draft
stays."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specserve.cache import prefix
from specserve.cache.pool import BlockPool
from specserve.types import BlockTable, Sequence


@dataclass(slots=True)
class CacheStats:
    """Counted since the cache was made. Evictions are counted by the pool that makes them."""

    num_prefix_queries: int = 0  # sequences admitted after a look-up
    num_prefix_query_tokens: int = 0  # tokens they had
    num_prefix_hit_tokens: int = 0  # tokens of these that needed no prefill
    num_copies_on_write: int = 0  # blocks
    num_forked_blocks: int = 0  # blocks a child shared with its parent instead of filling its own


class Usage(NamedTuple):
    """How full the blocks in use are. Waste is 1 - live_tokens / allocated_tokens."""

    live_tokens: int  # slots with valid KV, a shared slot counted once
    allocated_tokens: int  # slots of all referenced blocks


class Slots(Protocol):
    """Where KV lies: a KVStorage, or the executor that has one."""

    num_blocks: int  # the null block included
    block_size: int

    def copy_slots(self, sources: list[int], targets: list[int]) -> None: ...


class KVCache:
    """Block tables over slots, after PagedAttention (arXiv 2309.06180) with hashed prefix blocks.

    Logical index i of a sequence lies in slot `blocks.ids[i // block_size] * block_size + i % block_size`. Life of a
    sequence: `match_prefix` (or `fork`), then `reserve` before and `keep` after every step, and `free`, after which it
    may begin again. Methods assume what they document; a wrong call is a bug of the engine and fails an assertion.

    Steps may be under way meanwhile. Slots change in the order of what an executor is told, so a block that is given
    back may be written by a later step at once, also while an earlier one is under way that reads or writes it.

    `reads_next`: the drafter's KV of a token depends on the next one, too. Blocks are named after the token that
    follows them then, so that one is found where all its KV is right; it may change while there is no sequence.
    """

    def __init__(self, slots: Slots, prefix_caching: bool) -> None:
        self.slots = slots
        self.prefix_caching = prefix_caching
        self.reads_next = False
        self.block_size = slots.block_size
        self.pool = BlockPool(slots.num_blocks)
        self.stats = CacheStats()

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block. Equals num_free when nothing runs."""
        return self.slots.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self.pool.free)

    def match_prefix(self, seq: Sequence) -> int:
        """Give an empty sequence the longest published chain that covers at most len(tokens) - 1 of its tokens (the
        last one must run to have logits). Sets seq.blocks and seq.cached; returns the tokens found. A sequence that may
        begin with them is to be counted."""
        assert _is_empty(seq), "only a sequence without blocks can be admitted"
        if not self.prefix_caching:
            return 0
        limit = (len(seq.tokens) - 1) // self.block_size
        for digest in prefix.chain(seq.salt, seq.tokens, self.block_size, limit, seq.digests, int(self.reads_next)):
            block = self.pool.find(digest)
            if block is None:
                break
            self.pool.take(block)
            seq.blocks.ids.append(block)
            seq.blocks.hashes.append(digest)
        table = seq.blocks
        while table.num_drafted < len(table.ids) and self.pool.drafted[table.ids[table.num_drafted]]:
            table.num_drafted += 1
        seq.cached = len(table.ids) * self.block_size
        seq.draft_cached = table.num_drafted * self.block_size
        return seq.cached

    def count_match(self, num_tokens: int, num_found: int) -> None:
        """Count a look-up whose sequence, of so many tokens, begins with those that were found."""
        if self.prefix_caching:
            self.stats.num_prefix_queries += 1
            self.stats.num_prefix_query_tokens += num_tokens
            self.stats.num_prefix_hit_tokens += num_found

    def would_match(self, seq: Sequence, block: int) -> bool:
        """Whether that block of its tokens, which `match_prefix` has looked for, would be found now. O(1)."""
        return block < len(seq.digests) and self.pool.find(seq.digests[block]) is not None

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make `num_tokens` logical indexes from begun(seq) on writable: blocks that nobody else sees. All or nothing:
        False, when free blocks do not suffice, leaves everything as it was."""
        assert num_tokens >= 0
        ids, start = seq.blocks.ids, begun(seq)
        first = start // self.block_size
        written = range(first, self._blocks_for(start + num_tokens) if num_tokens else first)
        shared = [i for i in written if i < len(ids) and self.pool.references[ids[i]] > 1]
        num_new = sum(i >= len(ids) for i in written)
        if len(shared) + num_new > self.num_free:
            return False
        for i in shared:
            self._copy_on_write(seq, i)
        for i in written[: len(written) - num_new]:
            self.pool.withdraw(ids[i])  # it will not hold for long what it was published for
        ids.extend(self.pool.allocate() for _ in range(num_new))
        return True

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let an empty child share the KV of the parent's first `num_tokens` tokens; child.cached = num_tokens. Whoever
        writes a shared block first copies it."""
        assert _is_empty(child), "only a sequence without blocks can share a parent's"
        assert child.salt == parent.salt, "different salts share nothing"
        assert num_tokens <= parent.cached, "the parent's KV must be written"
        num_read = num_tokens + self.reads_next
        assert child.tokens[:num_read] == parent.tokens[:num_read], "shared KV is of equal tokens"
        shared = parent.blocks.ids[: self._blocks_for(num_tokens)]
        for block in shared:
            self.pool.take(block)
        num_whole = num_tokens // self.block_size
        child.blocks = BlockTable(shared, parent.blocks.hashes[:num_whole], min(parent.blocks.num_drafted, num_whole))
        child.draft_cached = min(parent.draft_cached, num_tokens)
        child.digests = parent.digests[:num_whole]
        child.cached = num_tokens
        self.stats.num_forked_blocks += len(shared)

    def keep(self, seq: Sequence, num_own: int, path: Many[int] = (), tokens: Many[int] = ()) -> None:
        """After a step that wrote `num_own` of the sequence's own tokens from logical index `cached` on, and draft node
        i at index cached + num_own + i: the own tokens and the nodes of `path` stay, in that order; the rest is stale.

        `tokens` are the accepted ids, one for each node of `path` (a Verdict's, whose last one is ignored); seq.tokens
        may hold them already or not. A chain is kept where it lies, a tree's path is moved to contiguous slots. Full
        blocks below the new `cached` are published; nothing unaccepted or unwritten ever is.
        """
        assert len(tokens) >= len(path), "every accepted node has a token"
        start = seq.cached + num_own
        moves = [(start + node, start + depth) for depth, node in enumerate(path) if node != depth]
        if moves:
            self.slots.copy_slots(
                [self._slot(seq, src) for src, _ in moves], [self._slot(seq, dst) for _, dst in moves]
            )
        first = seq.cached // self.block_size
        num_computed = seq.draft_cached - start  # of the draft's nodes, by the drafter's model
        if num_computed > 0:  # parents come before their children, so those of the path that were lead it
            seq.draft_cached = start + sum(node < num_computed for node in path)
        seq.cached = start + len(path)
        assert seq.cached <= len(seq.blocks.ids) * self.block_size, "kept more than was reserved"
        for i in range(first, self._blocks_for(seq.cached)):
            self.pool.fill(seq.blocks.ids[i], min(seq.cached - i * self.block_size, self.block_size))
        self._count_drafted(seq)
        if self.prefix_caching:
            self._publish(seq, start, tokens)

    def free(self, seq: Sequence) -> None:
        """Give all blocks back; the last block is evicted before the first. Those that are published stay so, also of a
        sequence that failed: they hold what was kept, and its failed step was not."""
        self._count_drafted(seq)  # a drafter reads what a step computed after that was kept, its last step's too
        for block in reversed(seq.blocks.ids):
            self.pool.release(block)
        seq.blocks = BlockTable()
        seq.cached = seq.draft_cached = 0

    def reset_prefix_cache(self) -> int:
        """Forget every published block that no sequence uses. Returns how many stay published: 0 when idle."""
        self.pool.withdraw_free()
        return self.pool.num_published

    def usage(self) -> Usage:
        """How full the blocks in use are; a shared block counts once. O(1)."""
        return Usage(self.pool.num_filled, (self.num_blocks - self.num_free) * self.block_size)

    def _count_drafted(self, seq: Sequence) -> None:
        """Let its blocks say so that lie below `cached` and have all their KV of the drafter's model."""
        for i in range(seq.blocks.num_drafted, min(seq.draft_cached, seq.cached) // self.block_size):
            self.pool.drafted[seq.blocks.ids[i]] = True
            seq.blocks.num_drafted = i + 1

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _slot(self, seq: Sequence, index: int) -> int:
        return seq.blocks.ids[index // self.block_size] * self.block_size + index % self.block_size

    def _copy_on_write(self, seq: Sequence, i: int) -> None:
        """Replace the shared block `i` of the table by a private copy of its valid tokens."""
        old, new = seq.blocks.ids[i], self.pool.allocate()
        valid = range(min(seq.cached - i * self.block_size, self.block_size))
        if valid:
            self.slots.copy_slots(
                [old * self.block_size + o for o in valid], [new * self.block_size + o for o in valid]
            )
            self.pool.fill(new, len(valid))
        self.pool.release(old)
        seq.blocks.ids[i] = new
        self.stats.num_copies_on_write += 1

    def _publish(self, seq: Sequence, start: int, accepted: Many[int]) -> None:
        """Publish the blocks that lie wholly below `cached` and whose names are known: after seq.tokens, up to index
        `start` where there are `accepted` ones, then these."""
        table, num_ahead, stop = seq.blocks, int(self.reads_next), start if accepted else len(seq.tokens)
        num_named = min(seq.cached, stop + len(accepted) - num_ahead) // self.block_size
        for i in range(len(table.hashes), num_named):
            if i == len(seq.digests):
                span = prefix.span(i, self.block_size, num_ahead)
                low, high = max(span.start - start, 0), max(span.stop - start, 0)
                tokens = [*seq.tokens[span.start : min(span.stop, stop)], *accepted[low:high]]
                seq.digests.append(prefix.link(seq.digests[-1] if i else prefix.root(seq.salt), tokens))
            table.hashes.append(seq.digests[i])
            self.pool.publish(table.ids[i], seq.digests[i])


def begun(seq: Sequence) -> int:
    """Leading tokens that have KV, or get it in steps under way."""
    return seq.cached + seq.under_way


def _is_empty(seq: Sequence) -> bool:
    return not seq.blocks.ids and seq.cached == 0
