"""The free list and the block pool alone: order of eviction, reference counts, and constant cost by structure."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from specserve.cache.pool import BlockPool, FreeList


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    free = FreeList(6)
    assert [free.pop() for _ in range(5)] == [1, 2, 3, 4, 5]
    assert len(free) == 0


@given(st.lists(st.tuples(st.sampled_from(["pop", "remove", "append", "prepend"]), st.integers(1, 8)), max_size=60))
def test_free_list_is_a_list(operations: list[tuple[str, int]]) -> None:
    """Against a Python list, which is slow and obvious."""
    free, model = FreeList(9), list(range(1, 9))
    for name, block in operations:
        if name == "pop" and model:
            assert free.pop() == model.pop(0)
        elif name == "remove" and block in model:
            free.remove(block)
            model.remove(block)
        elif name == "append" and block not in model:
            free.append(block)
            model.append(block)
        elif name == "prepend" and block not in model:
            free.prepend(block)
            model.insert(0, block)
        assert free.walk() == model == free.walk(forwards=False)[::-1]
        assert len(free) == len(model)
        assert all((b in free) == (b in model) for b in range(1, 9))


class Counting(list):  # type: ignore[type-arg]
    """A list that counts how often its entries are touched."""

    touched = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        self.touched += 1
        return super().__getitem__(key)

    def __setitem__(self, key, value):  # type: ignore[no-untyped-def]
        self.touched += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("operation", ["pop", "remove", "append", "prepend"])
def test_cost_does_not_grow_with_the_number_of_free_blocks(operation: str) -> None:
    def cost(num_blocks: int) -> int:
        free = FreeList(num_blocks)
        middle = num_blocks // 2
        if operation in ("append", "prepend"):
            free.remove(middle)
        free._next, free._previous = Counting(free._next), Counting(free._previous)
        getattr(free, operation)(*([] if operation == "pop" else [middle]))
        return free._next.touched + free._previous.touched

    assert cost(16) == cost(4096) < 16


@pytest.mark.skipif(not __debug__, reason="assert statements are off")
def test_misuse_is_refused() -> None:
    with pytest.raises(AssertionError, match="no free block"):
        FreeList(1).pop()
    free = FreeList(4)
    free.remove(2)
    with pytest.raises(AssertionError, match="not free"):
        free.remove(2)
    with pytest.raises(AssertionError, match="free already"):
        free.append(1)
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="no reference"):
        pool.release(1)
    block = pool.allocate()
    pool.publish(block, b"a")
    with pytest.raises(AssertionError, match="published already"):
        pool.publish(block, b"b")


def test_unpublished_blocks_are_used_before_any_published_one_is_evicted() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(4)]
    pool.publish(blocks[0], b"first")
    pool.publish(blocks[2], b"second")
    for block in blocks:
        pool.release(block)
    assert {pool.allocate(), pool.allocate()} == {blocks[1], blocks[3]}
    assert pool.num_evictions == 0
    assert pool.allocate() == blocks[0], "the one released longest ago"
    assert pool.num_evictions == 1
    assert pool.find(b"first") is None
    assert pool.find(b"second") == blocks[2]


def test_taking_a_free_block_saves_it_from_eviction() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for block, digest in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, digest)
        pool.release(block)
    pool.take(blocks[0])
    pool.release(blocks[0])  # used again: now the most recent
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_the_first_of_two_equal_blocks_stays_published() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.find(b"same") == first
    assert pool.digest(second) is None
    assert list(pool.digests()) == [(first, b"same")]
    assert pool.withdraw(first)
    assert not pool.withdraw(second)
    assert pool.num_published == 0
