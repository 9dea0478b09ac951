"""The cache's promises one by one: prefixes, eviction order, copy on write, what is kept, and what integrity means."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from specserve.cache import prefix
from specserve.cache.cache import CacheStats, KVCache
from specserve.cache.pool import BlockPool
from specserve.cache.storage import KVShape, KVStorage
from specserve.testing import check_integrity
from specserve.types import BlockTable, SamplingParams, Sequence


def make_cache(num_blocks: int = 12, prefix_caching: bool = True) -> KVCache:
    return KVCache(KVStorage([KVShape(1, 2)] * 2, num_blocks, 4, torch.float32, "cpu"), prefix_caching)


def layers(cache: KVCache) -> list[torch.Tensor]:
    assert isinstance(cache.slots, KVStorage)
    return cache.slots.layers


def make_seq(tokens: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(
        request_id="r", index=0, tokens=list(tokens), num_prompt=len(tokens),
        params=SamplingParams(), seed=0, max_tokens=99, salt=salt,
    )  # fmt: skip


def run(cache: KVCache, seq: Sequence) -> Sequence:
    """Admit and compute all but the last token."""
    cache.match_prefix(seq)
    count = len(seq.tokens) - 1 - seq.cached
    assert cache.reserve(seq, count)
    cache.keep(seq, count)
    return seq


def hit(cache: KVCache, tokens: list[int], salt: bytes = b"") -> int:
    """How many tokens of a prompt are in the cache; leaves no references."""
    seq = make_seq(tokens, salt)
    found = cache.match_prefix(seq)
    cache.free(seq)
    return found


A, B = list(range(100, 117)), list(range(200, 217))  # 16 tokens in four blocks, and one that must run


# --- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_prompt_is_found_by_whole_blocks_and_never_its_last_token() -> None:
    cache = make_cache()
    run(cache, make_seq(A))
    assert hit(cache, A) == 16
    assert hit(cache, A[:16]) == 12, "the 16th token must run"
    assert hit(cache, A[:9]) == 8
    assert hit(cache, A[:8]) == 4
    assert hit(cache, A[:4]) == 0
    assert hit(cache, [*A[:6], 0, *A[7:]]) == 4
    assert hit(cache, [0, *A[1:]]) == 0, "later blocks are named after everything before them"
    assert cache.stats == CacheStats(), "only what is admitted counts"


def test_running_sequences_share_blocks_and_the_table_names_them() -> None:
    cache = make_cache()
    first, second = run(cache, make_seq(A)), run(cache, make_seq(A[:9] + B))
    assert second.blocks.ids[:2] == first.blocks.ids[:2]
    assert second.blocks.hashes[:2] == first.blocks.hashes[:2]
    assert len(second.blocks.hashes) == second.cached // 4
    check_integrity(cache, [first, second])


def test_salts_separate() -> None:
    cache = make_cache()
    run(cache, make_seq(A, b"one"))
    assert hit(cache, A, b"one") == 16
    assert hit(cache, A, b"two") == 0
    assert hit(cache, A) == 0


def test_a_salt_cannot_be_crafted_to_start_in_another_chain() -> None:
    """With root = sha256(salt), a salt of (digest, token bytes) would equal the victim's first block."""
    cache = make_cache()
    run(cache, make_seq(A))
    crafted = np.asarray(A[:4], "<i4").tobytes()
    for start in (b"", hashlib.sha256(b"").digest(), prefix.root(b"")):
        assert hit(cache, A[4:], start + crafted) == 0


def test_digests_are_pinned() -> None:
    """sha256 over (parent digest, little-endian int32 ids): stable across runs and machines."""
    root = hashlib.sha256(hashlib.sha256(b"salt").digest()).digest()
    first = hashlib.sha256(root + b"\x01\0\0\0\x02\0\0\0").digest()
    second = hashlib.sha256(first + b"\0\x01\0\0\xff\xff\x01\0").digest()
    assert list(prefix.chain(b"salt", [1, 2, 256, 131071, 9], 2, 2)) == [first, second]


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    cache = make_cache(prefix_caching=False)
    seq = run(cache, make_seq(A))
    assert seq.blocks.hashes == []
    assert hit(cache, A) == 0
    assert cache.pool.num_published == 0


def test_reset_drops_what_nobody_uses() -> None:
    cache = make_cache()
    first, second = run(cache, make_seq(A)), run(cache, make_seq(B))
    cache.free(second)
    assert cache.reset_prefix_cache() == 4, "the running one's"
    assert hit(cache, B) == 0
    assert hit(cache, A) == 16
    cache.free(first)
    assert cache.reset_prefix_cache() == 0
    assert hit(cache, A) == 0
    assert cache.num_free == cache.num_blocks
    assert cache.pool.num_evictions == 0, "a reset is no eviction"


def drafting(cache: KVCache, tokens: list[int], chunk: int = 99) -> Sequence:
    """Admit and compute all but the last token, chunk by chunk, beside a drafter whose KV of a token is the next one.
    What it has of the tokens found must be of those that follow them."""
    kv = layers(cache)[-1]
    seq = make_seq(tokens)
    cache.match_prefix(seq)
    slots = [seq.blocks.ids[i // 4] * 4 + i % 4 for i in range(seq.draft_cached)]
    assert kv[0, slots, 0, 0].tolist() == tokens[1 : seq.draft_cached + 1]
    while (count := min(chunk, len(tokens) - 1 - seq.cached)) > 0:
        assert cache.reserve(seq, count)
        cache.keep(seq, count)
        for i in range(seq.draft_cached, seq.cached):
            kv[:, seq.blocks.ids[i // 4] * 4 + i % 4] = tokens[i + 1]
        seq.draft_cached = seq.cached
    cache.keep(seq, 0)
    return seq


def test_what_a_drafter_read_in_the_last_step_is_found() -> None:
    """It reads after `keep`, and no other one follows: the blocks say so when they are given back."""
    cache = make_cache(20)
    cache.reads_next = True
    seq = make_seq(list(range(13)))
    assert cache.reserve(seq, 12)
    cache.keep(seq, 12)
    seq.draft_cached = 9
    check_integrity(cache, [seq])
    cache.free(seq)
    again = make_seq(list(range(13)))
    cache.match_prefix(again)
    assert (again.cached, again.draft_cached) == (12, 8)
    seq = make_seq(list(range(50, 63)))
    assert cache.reserve(seq, 13)
    cache.keep(seq, 6)
    seq.draft_cached = 12  # of nodes, too, that a step which failed did not accept
    cache.free(seq)
    assert cache.pool.drafted.count(True) == 2 + 1


def test_drafters_kv_for_another_next_token_is_not_found() -> None:
    """Where a drafter's KV of a token depends on the next one: two texts part behind a whole block. Whoever goes on as
    the second did finds all of it, and not the first one's block where they part."""
    cache = make_cache(20)
    cache.reads_next = True
    other = [*A[:8], *B]
    first, second = drafting(cache, A), drafting(cache, other)
    third = drafting(cache, [*other, 5])
    assert third.blocks.ids[:6] == second.blocks.ids[:6]
    assert second.blocks.ids[:1] == first.blocks.ids[:1] != second.blocks.ids[1:2]
    assert hit(cache, [*A[:8], 7, 7]) == 4
    check_integrity(cache, [first, second, third])


texts = st.builds(lambda n, rest: [1] * n + rest, st.sampled_from([3, 4, 8]), st.lists(st.integers(1, 2), min_size=1))


@given(st.lists(st.tuples(texts.filter(lambda tokens: len(tokens) < 24), st.integers(1, 6)), max_size=8))
def test_drafters_kv_that_is_found_is_of_the_tokens_that_follow(texts: list[tuple[list[int], int]]) -> None:
    cache = make_cache(9)
    cache.reads_next = True
    for tokens, chunk in texts:
        seq = drafting(cache, tokens, chunk)
        check_integrity(cache, [seq])
        cache.free(seq)
        assert hit(cache, tokens) == (len(tokens) - 1) // 4 * 4, "and all that was computed is found"
    assert cache.num_free == cache.num_blocks


def test_a_drafter_that_reads_the_next_token_has_prefixes_of_its_own() -> None:
    """What an engine computed before it took the drafter is named otherwise, whatever the tokens."""
    cache = make_cache()
    run(cache, make_seq(A))
    cache.reads_next = True
    assert hit(cache, A) == 0


def test_what_a_failed_step_wrote_is_not_found_and_all_else_is() -> None:
    """Two sequences share a prompt; a step of one of them fails in its third block."""
    cache = make_cache()
    running, failed = run(cache, make_seq(A[:9])), run(cache, make_seq(A))
    cache.free(failed)
    failed = make_seq(A)
    cache.match_prefix(failed)
    failed.tokens += B
    assert cache.reserve(failed, 17)
    cache.free(failed)
    assert (hit(cache, A), hit(cache, A + B)) == (16, 16)
    check_integrity(cache, [running])


# --- order of eviction ----------------------------------------------------------------------------------------------


def peek(cache: KVCache, tokens: list[int]) -> list[bool]:
    """Which blocks of a prompt are published; unlike a look-up it does not make them recent."""
    digests = prefix.chain(b"", tokens, 4, (len(tokens) - 1) // 4)
    return [cache.pool.find(digest) is not None for digest in digests]


def least_recently_used_goes_first() -> None:
    """Nine blocks: A fills four, B fills four. B is freed first, then A: B's go first, each last block before first."""
    cache = make_cache(num_blocks=9)
    first, second = run(cache, make_seq(A)), run(cache, make_seq(B))
    cache.free(second)
    cache.free(first)
    order = [(tokens, num_left) for tokens in (B, A) for num_left in (3, 2, 1, 0)]
    filler = make_seq([7] * 99)
    for evicted, (tokens, num_left) in enumerate(order, 1):
        assert cache.reserve(filler, 4 * evicted)
        assert cache.pool.num_evictions == evicted
        assert peek(cache, tokens) == [True] * num_left + [False] * (4 - num_left)
        assert tokens is A or all(peek(cache, A)), "the more recent is whole until the older is gone"
    check_integrity(cache, [filler])


def test_a_hit_makes_a_prefix_recent() -> None:
    cache = make_cache(num_blocks=9)
    first, second = run(cache, make_seq(A)), run(cache, make_seq(B))
    cache.free(first)
    cache.free(second)
    assert hit(cache, A) == 16
    assert cache.reserve(make_seq([7] * 99), 16)
    assert (hit(cache, A), hit(cache, B)) == (16, 0)


def test_least_recently_used_goes_first() -> None:
    least_recently_used_goes_first()


def _free_head_first(self: KVCache, seq: Sequence) -> None:
    for block in seq.blocks.ids:
        self.pool.release(block)
    seq.blocks, seq.cached = BlockTable(), 0


def _release_to_the_front(self: BlockPool, block: int) -> None:
    self.references[block] -= 1
    if self.references[block] == 0:
        self.free.prepend(block)


def _pop_the_newest(self: BlockPool) -> int:
    block = self.free.walk()[-1]
    self.free.remove(block)
    self.num_evictions += self.withdraw(block)
    self.references[block] = 1
    return block


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (KVCache, "free", _free_head_first),
        (BlockPool, "release", _release_to_the_front),
        (BlockPool, "allocate", _pop_the_newest),
    ],
)
def test_a_wrong_order_of_eviction_is_found(
    owner: type, name: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        least_recently_used_goes_first()


# --- reserve, fork, keep --------------------------------------------------------------------------------------------


def test_reserve_is_all_or_nothing() -> None:
    cache = make_cache(num_blocks=5)
    seq = make_seq(A)
    assert cache.reserve(seq, 16)
    assert not cache.reserve(seq, 17)
    assert len(seq.blocks.ids) == 4
    other = make_seq(B)
    assert not cache.reserve(other, 1)
    assert cache.reserve(other, 0)
    assert len(other.blocks.ids) == 0


def test_reserving_again_needs_nothing_more() -> None:
    cache = make_cache()
    seq = make_seq(A)
    assert cache.reserve(seq, 6)
    before = list(seq.blocks.ids)
    assert cache.reserve(seq, 8)
    assert list(seq.blocks.ids) == before


def test_copy_on_write_takes_a_block_and_refuses_without_one() -> None:
    cache = make_cache(num_blocks=4)
    parent = make_seq(A)
    cache.reserve(parent, 6)
    cache.keep(parent, 6)
    child = make_seq(A[:7])
    cache.fork(parent, child, 6)
    assert child.blocks.ids == parent.blocks.ids
    filler = make_seq(B)
    assert cache.reserve(filler, 1)
    assert not cache.reserve(child, 1), "the copy needs a block"
    check_integrity(cache, [parent, child, filler])
    cache.free(filler)
    assert cache.reserve(child, 1)
    assert child.blocks.ids[0] == parent.blocks.ids[0]
    assert child.blocks.ids[1] != parent.blocks.ids[1]
    assert cache.reserve(parent, 1), "the last owner writes in place"
    assert cache.stats.num_copies_on_write == 1
    assert cache.stats.num_forked_blocks == 2


def test_a_prompt_shared_by_n_costs_n_minus_one_copies() -> None:
    cache = make_cache(num_blocks=20)
    parent = run(cache, make_seq(A[:7]))
    children = [make_seq(A[:7]) for _ in range(3)]
    for child in children:
        cache.fork(parent, child, 6)
    everyone = [parent, *children]
    assert cache.usage() == (6, 8)
    for seq in everyone:
        assert cache.reserve(seq, 1)
    assert cache.stats.num_copies_on_write == 3
    assert cache.usage() == (4 + 4 * 2, 4 + 4 * 4)
    check_integrity(cache, everyone)
    for seq in everyone:
        cache.free(seq)
    assert cache.num_free == cache.num_blocks


def test_a_fork_inside_a_published_block_leaves_it_as_published() -> None:
    """The child may go another way where the parent's block goes on; the parent is gone by then."""
    cache = make_cache()
    parent = run(cache, make_seq(A[:9]))
    child = make_seq([*A[:7], 999])
    cache.fork(parent, child, 7)
    cache.free(parent)
    assert cache.reserve(child, 1)
    cache.keep(child, 1)
    assert hit(cache, [*A[:7], 999, 0]) == 8
    assert hit(cache, A[:9]) == 4
    check_integrity(cache, [child])


def fill(cache: KVCache, seq: Sequence, values: dict[int, float]) -> None:
    for index, value in values.items():
        slot = seq.blocks.ids[index // 4] * 4 + index % 4
        for number, kv in enumerate(layers(cache)):
            kv[:, slot] = value + 1000 * number


def stored(cache: KVCache, seq: Sequence, layer: int = 0) -> list[float]:
    slots = [seq.blocks.ids[i // 4] * 4 + i % 4 for i in range(seq.cached)]
    return layers(cache)[layer][1, slots, 0, 0].tolist()


def test_a_tree_path_is_moved_to_where_a_chain_would_lie() -> None:
    cache = make_cache()
    seq = make_seq([1, 2, 3])
    assert cache.reserve(seq, 3 + 6)
    fill(cache, seq, {i: float(i) for i in range(9)})
    cache.keep(seq, 3, [0, 2, 5], [10, 12, 15, 99])  # nodes at 3, 5 and 8
    assert stored(cache, seq) == [0, 1, 2, 3, 5, 8]
    assert stored(cache, seq, layer=1) == [1000, 1001, 1002, 1003, 1005, 1008]


@pytest.mark.parametrize("extended", [True, False])
def test_only_accepted_tokens_name_a_block(extended: bool) -> None:
    """Whether the engine appends the tokens before or after keep, the digests are of the accepted ones."""
    cache = make_cache()
    seq = make_seq(A[:3])
    assert cache.reserve(seq, 3 + 5)
    if extended:
        seq.tokens += [50, 51, 52]
    cache.keep(seq, 3, [0, 1], [50, 51, 52])
    if not extended:
        seq.tokens += [50, 51, 52]
    assert seq.cached == 5
    assert hit(cache, [*A[:3], 50, 0]) == 4
    assert cache.pool.num_published == 1, "the second block holds one accepted token and three stale ones"


def test_a_rejected_draft_publishes_nothing() -> None:
    cache = make_cache()
    seq = make_seq(A[:3])
    assert cache.reserve(seq, 3 + 5)
    cache.keep(seq, 3, [], [77])
    assert cache.pool.num_published == 0
    assert seq.cached == 3


@pytest.mark.skipif(not __debug__, reason="assert statements are off")
def test_keeping_more_than_was_reserved_is_refused() -> None:
    cache = make_cache()
    seq = make_seq(A)
    cache.reserve(seq, 4)
    with pytest.raises(AssertionError, match="more than was reserved"):
        cache.keep(seq, 5)


# --- integrity ------------------------------------------------------------------------------------------------------


def _lose_a_block(cache: KVCache, seq: Sequence) -> None:
    cache.pool.free.pop()


def _count_wrong(cache: KVCache, seq: Sequence) -> None:
    cache.pool.free._length += 1


def _break_a_link(cache: KVCache, seq: Sequence) -> None:
    last = cache.pool.free.walk()[-1]
    cache.pool.free._previous[last] = 0


def _make_a_loop(cache: KVCache, seq: Sequence) -> None:
    first, second = cache.pool.free.walk()[:2]
    cache.pool.free._next[second] = first


def _leak_a_reference(cache: KVCache, seq: Sequence) -> None:
    cache.pool.references[seq.blocks.ids[0]] += 1


def _use_the_null_block(cache: KVCache, seq: Sequence) -> None:
    seq.blocks.ids[0] = 0


def _hold_twice(cache: KVCache, seq: Sequence) -> None:
    block = seq.blocks.ids[0]
    cache.pool.release(seq.blocks.ids[1])
    cache.pool.take(block)
    seq.blocks.ids[1] = block


def _cache_too_much(cache: KVCache, seq: Sequence) -> None:
    seq.cached = len(seq.blocks.ids) * 4 + 1


def _publish_the_null_block(cache: KVCache, seq: Sequence) -> None:
    cache.pool.publish(0, b"null")


def _find_the_wrong_block(cache: KVCache, seq: Sequence) -> None:
    digest = seq.blocks.hashes[0]
    cache.pool._published[digest] = seq.blocks.ids[1]


def _publish_without_a_block(cache: KVCache, seq: Sequence) -> None:
    cache.pool._published[b"nowhere"] = 3


def _rename_a_block(cache: KVCache, seq: Sequence) -> None:
    cache.pool.withdraw(seq.blocks.ids[0])
    cache.pool.publish(seq.blocks.ids[0], b"other")


def _name_the_future(cache: KVCache, seq: Sequence) -> None:
    seq.cached -= 4


def _change_a_token(cache: KVCache, seq: Sequence) -> None:
    seq.tokens[0] += 1


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_lose_a_block, "Free and unreferenced differ"),
        (_count_wrong, "free list says"),
        (_break_a_link, "forwards and backwards"),
        (_make_a_loop, "forwards and backwards"),
        (_leak_a_reference, "counts 2 references and 1 tables"),
        (_use_the_null_block, "null block was handed out"),
        (_hold_twice, "counts 2 references|a block twice"),
        (_cache_too_much, "tokens cached in"),
        (_publish_the_null_block, "null block is published"),
        (_find_the_wrong_block, "its digest finds"),
        (_publish_without_a_block, "digests name"),
        (_rename_a_block, "published as other tokens"),
        (_name_the_future, "named 4 blocks"),
        (_change_a_token, "not those of its tokens"),
    ],
)
def test_every_invariant_is_checked(damage: Callable[[KVCache, Sequence], None], sentence: str) -> None:
    cache = make_cache()
    seq = run(cache, make_seq(A))
    check_integrity(cache, [seq])
    damage(cache, seq)
    with pytest.raises(AssertionError, match=sentence):
        check_integrity(cache, [seq])
