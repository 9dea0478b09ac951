"""The cache under any order of calls, checked by content: each written slot says which prefix its token ends, so a
stale block, a bad copy or a wrong publication shows at once. Ends with planted faults that the machine must find."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from specserve.cache import prefix
from specserve.cache.cache import KVCache
from specserve.cache.pool import BlockPool, FreeList
from specserve.cache.storage import KVShape, KVStorage
from specserve.testing import check_integrity, path_to
from specserve.types import Draft, SamplingParams, Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 10
STREAMS = [np.random.default_rng(s).integers(0, 50, 64).tolist() for s in range(2)]
GARBAGE = -1.0  # what a slot holds after a write nobody may see


def content(salt: bytes, tokens: list[int]) -> list[float]:
    """The KV of the last of `tokens`: like the real one it depends on all before it, and here on the salt too."""
    return [float(zlib.crc32(salt + b"/" + np.asarray(tokens, "<i4").tobytes())), float(len(tokens) - 1)]


class CacheMachine(RuleBasedStateMachine):
    """Admits, forks, prefills, drafts, preempts and ends sequences over a real storage of one layer."""

    reads_next = False

    def __init__(self) -> None:
        super().__init__()
        self.storage = KVStorage([KVShape(1, 2)] * 1, NUM_BLOCKS, BLOCK_SIZE, torch.float64, "cpu")
        self.cache = KVCache(self.storage, prefix_caching=True)
        self.cache.reads_next = self.reads_next
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.num_made = 0
        self.num_refused = 0
        self.num_tree_moves = 0
        self.by_digest: dict[bytes, list[list[float]]] = {}  # what a block published under a digest must hold

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(
        stream=st.integers(0, 1), length=st.integers(1, 20), salt=st.sampled_from([b"", b"tenant"]), whole=st.booleans()
    )
    def admit(self, stream: int, length: int, salt: bytes, whole: bool) -> None:
        """A new prompt, a prefix of a stream; half of them run in the same step."""
        seq = self._sequence(STREAMS[stream][:length], salt)
        self._admit(seq)
        if whole:
            self._verify(seq, Draft.empty(), [], False)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self._admit(self.preempted.pop(data.draw(st.integers(0, len(self.preempted) - 1))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def prefill_chunk(self, data: st.DataObject) -> None:
        seq = self._pick(data)
        count = data.draw(st.integers(0, len(seq.tokens) - seq.cached - 1))
        if self._reserve(seq, count):
            self._write_own(seq, count)
            self.cache.keep(seq, count, [], [])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.integers(0, 6), follow=st.booleans(), early=st.booleans())
    def verify_chain(self, data: st.DataObject, length: int, follow: bool, early: bool) -> None:
        seq = self._pick(data)
        draft = Draft.chain(self._guess(seq, length, follow))
        self._verify(seq, draft, list(range(data.draw(st.integers(0, length)))), early)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.integers(1, 7), early=st.booleans())
    def verify_tree(self, data: st.DataObject, length: int, early: bool) -> None:
        seq = self._pick(data)
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(length)]
        tokens = data.draw(st.lists(st.integers(0, 50), min_size=length, max_size=length))
        draft = Draft(np.array(tokens, np.int32), np.array(parents, np.int32))
        self._verify(seq, draft, path_to(draft, data.draw(st.integers(-1, length - 1))), early)

    @precondition(lambda self: any(seq.cached for seq in self.running))
    @rule(data=st.data(), token=st.integers(0, 50))
    def fork(self, data: st.DataObject, token: int) -> None:
        parent = data.draw(st.sampled_from([i for i, seq in enumerate(self.running) if seq.cached]))
        source = self.running[parent]
        num_tokens = data.draw(st.integers(1, source.cached))
        last = source.tokens[num_tokens] if self.reads_next else token
        child = self._sequence([*source.tokens[:num_tokens], last], source.salt)
        self.cache.fork(source, child, num_tokens)
        assert child.cached == num_tokens
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(0, 9))
    def reserve_and_fail(self, data: st.DataObject, count: int) -> None:
        """A step that writes rubbish and then fails keeps nothing; half of them are their sequence's last."""
        seq = self._pick(data)
        if self._reserve(seq, count):
            for index in range(seq.cached, seq.cached + count):
                self._write(seq, index, [GARBAGE, GARBAGE])
            if data.draw(st.booleans()):
                self.cache.free(seq)
                self.running.remove(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq = self._pick(data)
        self.cache.free(seq)
        self.running.remove(seq)
        self.preempted.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq = self._pick(data)
        self.cache.free(seq)
        self.running.remove(seq)

    @rule()
    def reset_prefix_cache(self) -> None:
        left = self.cache.reset_prefix_cache()
        assert left == 0 or self.running
        assert all(self.cache.pool.references[block] for block, _ in self.cache.pool.digests())

    # --- what must hold after every rule ----------------------------------------------------------------------------

    @invariant()
    def integrity(self) -> None:
        check_integrity(self.cache, self.running)

    @invariant()
    def every_sequence_sees_its_own_kv(self) -> None:
        for seq in self.running:
            seen = [self._read(self._slot(seq, i)) for i in range(seq.cached)]
            assert seen == [content(seq.salt, seq.tokens[: i + 1]) for i in range(seq.cached)]

    @invariant()
    def published_blocks_hold_what_they_are_named_after(self) -> None:
        for block, digest in self.cache.pool.digests():
            seen = [self._read(block * BLOCK_SIZE + offset) for offset in range(BLOCK_SIZE)]
            assert seen == self.by_digest[digest]

    @invariant()
    def usage_adds_up(self) -> None:
        usage = self.cache.usage()
        assert usage.allocated_tokens == (self.cache.num_blocks - self.cache.num_free) * BLOCK_SIZE
        filled: dict[int, int] = {}
        for seq in self.running:
            for i, block in enumerate(seq.blocks.ids):
                own = min(max(seq.cached - i * BLOCK_SIZE, 0), BLOCK_SIZE)
                filled[block] = max(filled.get(block, 0), own)
        # A forked block may still count what a parent that has gone had in it.
        assert sum(filled.values()) <= usage.live_tokens <= usage.allocated_tokens
        if not self.cache.stats.num_forked_blocks:
            assert usage.live_tokens == sum(filled.values())

    # --- the shadow of an engine ------------------------------------------------------------------------------------

    def _sequence(self, tokens: list[int], salt: bytes) -> Sequence:
        self.num_made += 1
        return Sequence(
            request_id=str(self.num_made), index=0, tokens=list(tokens), num_prompt=len(tokens),
            params=SamplingParams(), seed=0, max_tokens=99, salt=salt,
        )  # fmt: skip

    def _pick(self, data: st.DataObject) -> Sequence:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def _admit(self, seq: Sequence) -> None:
        hit = self.cache.match_prefix(seq)
        assert hit == seq.cached < len(seq.tokens)
        self.cache.count_match(len(seq.tokens), hit)
        self.running.append(seq)

    def _guess(self, seq: Sequence, length: int, follow: bool) -> list[int]:
        """Draft tokens; those that follow the stream make equal texts, and so equal blocks, in several sequences."""
        at = len(seq.tokens)
        return (STREAMS[0] * 9)[at : at + length] if follow else [50 + i for i in range(length)]

    def _reserve(self, seq: Sequence, count: int) -> bool:
        before = [list(s.blocks.ids) for s in self.running], self.cache.pool.free.walk(), seq.cached
        done = self.cache.reserve(seq, count)
        if done:
            assert len(seq.blocks.ids) * BLOCK_SIZE >= seq.cached + count
        else:
            self.num_refused += 1
            assert before == ([list(s.blocks.ids) for s in self.running], self.cache.pool.free.walk(), seq.cached)
        return done

    def _verify(self, seq: Sequence, draft: Draft, path: list[int], extend_early: bool) -> None:
        num_own, committed = len(seq.tokens) - seq.cached, list(seq.tokens)
        if not self._reserve(seq, num_own + len(draft)):
            return
        self._write_own(seq, num_own)
        for node in range(len(draft)):
            upto = committed + [int(draft.tokens[i]) for i in path_to(draft, node)]
            self._write(seq, len(committed) + node, content(seq.salt, upto))
        bonus = (STREAMS[0] * 9)[len(committed) + len(path)]
        emitted = [int(draft.tokens[i]) for i in path] + [bonus]
        self._expect(seq.salt, committed + emitted)
        self.num_tree_moves += path != list(range(len(path)))
        if extend_early:
            seq.tokens.extend(emitted)
        self.cache.keep(seq, num_own, path, emitted)
        if not extend_early:
            seq.tokens.extend(emitted)
        assert seq.cached == len(seq.tokens) - 1

    def _write_own(self, seq: Sequence, count: int) -> None:
        for index in range(seq.cached, seq.cached + count):
            self._write(seq, index, content(seq.salt, seq.tokens[: index + 1]))
        self._expect(seq.salt, seq.tokens[: seq.cached + count + 1])

    def _expect(self, salt: bytes, tokens: list[int]) -> None:
        """`tokens` that were computed but for the last."""
        num_ahead = int(self.reads_next)
        num_blocks = (len(tokens) - 1) // BLOCK_SIZE
        for i, digest in enumerate(prefix.chain(salt, tokens, BLOCK_SIZE, num_blocks, num_ahead=num_ahead)):
            span = range(i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)
            self.by_digest[digest] = [content(salt, tokens[: index + 1]) for index in span]

    def _slot(self, seq: Sequence, index: int) -> int:
        return seq.blocks.ids[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE

    def _write(self, seq: Sequence, index: int, values: list[float]) -> None:
        self.storage.layers[0][:, self._slot(seq, index), 0] = torch.tensor(values, dtype=torch.float64)

    def _read(self, slot: int) -> list[float]:
        k, v = self.storage.layers[0][:, slot, 0].tolist()
        assert k == v
        return k  # type: ignore[no-any-return]


_QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
CacheMachine.TestCase.settings = settings(
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=_QUIET,
)
TestAnyOrderOfCalls = CacheMachine.TestCase


class NextReadingMachine(CacheMachine):
    """Blocks are named after the token behind them, too."""

    reads_next = True


NextReadingMachine.TestCase.settings = CacheMachine.TestCase.settings
TestAnyOrderOfCallsBesideADrafterThatReadsTheNextToken = NextReadingMachine.TestCase


# --- planted faults -------------------------------------------------------------------------------------------------


def _search(machine: type[CacheMachine] = CacheMachine, max_examples: int = 400) -> None:
    """Run the machine without shrinking: whether it finds anything is the question, not what."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=50, derandomize=True, database=None,
            phases=[Phase.generate], suppress_health_check=_QUIET, report_multiple_bugs=False,
        ),
    )  # fmt: skip


def _skip_reference(self: BlockPool, block: int) -> None:
    if self.references[block] == 0:
        self.free.remove(block)
        self.references[block] = 1


def _publish_one_too_many(self: KVCache, seq: Sequence, start: int, accepted: list[int]) -> None:
    table = seq.blocks
    last = min(-(-seq.cached // self.block_size), len(table.ids))
    for i in range(len(table.hashes), last):
        tokens = [*seq.tokens[:start], *accepted][i * self.block_size : (i + 1) * self.block_size]
        table.hashes.append(prefix.link(table.hashes[-1] if table.hashes else prefix.root(seq.salt), tokens))
        self.pool.publish(table.ids[i], table.hashes[-1])


def _forget_copy_on_write(self: KVCache, seq: Sequence, i: int) -> None:
    self.stats.num_copies_on_write += 1


def _copy_nothing(self: KVStorage, src_slots: list[int], dst_slots: list[int]) -> None:
    """The table changes and the KV stays behind."""


def _copy_one_by_one_backwards(self: KVStorage, src_slots: list[int], dst_slots: list[int]) -> None:
    for src, dst in reversed(list(zip(src_slots, dst_slots, strict=True))):
        for layer in self.layers:
            layer[:, dst] = layer[:, src]


def _half_unlink(self: FreeList, block: int) -> None:
    self._next[self._previous[block]] = self._next[block]
    self._next[block] = self._previous[block] = -1
    self._length -= 1


def _allocate_published(self: BlockPool) -> int:
    block = self.free.pop()
    self.references[block] = 1
    return block


def _release_twice_free(self: BlockPool, block: int) -> None:
    self.references[block] = 0
    if block not in self.free:
        self.free.append(block)


def _never_withdraw(self: BlockPool, block: int) -> bool:
    return False


def _root_without_salt(salt: bytes) -> bytes:
    return bytes(32)


def _hash_block_alone(parent: bytes, tokens: list[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


MUTANTS = {
    "a reference is not counted": (BlockPool, "take", _skip_reference),
    "the last reference is assumed": (BlockPool, "release", _release_twice_free),
    "one block too many is published": (KVCache, "_publish", _publish_one_too_many),
    "shared blocks are written in place": (KVCache, "_copy_on_write", _forget_copy_on_write),
    "copies copy nothing": (KVStorage, "copy_slots", _copy_nothing),
    "overlapping copies in the wrong order": (KVStorage, "copy_slots", _copy_one_by_one_backwards),
    "unlinking forgets one direction": (FreeList, "remove", _half_unlink),
    "an evicted block stays published": (BlockPool, "allocate", _allocate_published),
    "a rewritten block stays published": (BlockPool, "withdraw", _never_withdraw),
    "salts are ignored": (prefix, "root", _root_without_salt),
    "digests are not chained": (prefix, "link", _hash_block_alone),
}


def test_without_a_fault_nothing_is_found_and_everything_is_reached() -> None:
    """The control of the tests below: the same search passes, and meets each mechanism many times."""
    seen: Counter[str] = Counter()

    class Watched(CacheMachine):
        def teardown(self) -> None:
            seen.update(dataclasses.asdict(self.cache.stats))
            seen["evictions"] += self.cache.pool.num_evictions
            seen["refusals"] += self.num_refused
            seen["moves"] += self.num_tree_moves

    _search(Watched, max_examples=100)
    assert min(seen.values()) >= 10, seen
    assert {"num_prefix_hit_tokens", "num_copies_on_write", "num_forked_blocks"} < set(seen)


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[fault])
    with pytest.raises(AssertionError):
        _search()


def test_a_kept_tree_with_shifted_sources_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node i lies at cached + num_own + i; a path that is read one slot further brings a sibling's KV."""
    keep = KVCache.keep

    def shifted(self: KVCache, seq: Sequence, num_own: int, path: list[int], tokens: list[int]) -> None:
        is_chain = list(path) == list(range(len(path)))
        keep(self, seq, num_own, path if is_chain else [node - 1 for node in path], tokens)

    monkeypatch.setattr(KVCache, "keep", shifted)
    with pytest.raises(AssertionError):
        _search()
