"""Who holds which block: a free list, reference counts, and the digests blocks are published under."""

from __future__ import annotations

from collections.abc import Iterator

_UNLINKED = -1


class FreeList:
    """Free blocks in the order they will be handed out: a circular doubly linked list over two arrays.

    Entry 0 is its head, which is why block 0 can never be handed out. Every operation but iteration is O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self._length = num_blocks - 1

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _UNLINKED

    def walk(self, forwards: bool = True) -> list[int]:
        """All free blocks, first to last or last to first; ends even if the links are broken. O(length)."""
        links = self._next if forwards else self._previous
        blocks: list[int] = []
        block = links[0]
        while block > 0 and len(blocks) < len(links):
            blocks.append(block)
            block = links[block]
        return blocks

    def pop(self) -> int:
        """Remove and return the first block. The list must not be empty."""
        first = self._next[0]
        assert first != 0, "no free block: reserve() checks before it allocates"
        self.remove(first)
        return first

    def remove(self, block: int) -> None:
        assert block in self, f"block {block} is not free"
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = _UNLINKED
        self._length -= 1

    def append(self, block: int) -> None:
        """Handed out last."""
        self._insert(block, self._previous[0])

    def prepend(self, block: int) -> None:
        """Handed out next."""
        self._insert(block, 0)

    def _insert(self, block: int, before: int) -> None:
        assert block not in self, f"block {block} is free already"
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._next[block], self._previous[block] = after, before
        self._length += 1


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each either free or referenced; a published block is found again by its digest.

    A free block may still be published: it keeps its KV until it is handed out (evicted). Those go to the end of the
    free list, least recently used first; blocks that nobody could find again go to its front, so nothing is evicted
    while a block without use is left.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = FreeList(num_blocks)
        self.references = [0] * num_blocks
        self.num_evictions = 0  # published blocks that were handed out for something else
        self.filled = [0] * num_blocks  # slots of each block whose KV is valid
        self.num_filled = 0  # their sum over referenced blocks
        self.drafted = [False] * num_blocks  # whether all slots of a block have KV of the drafter's model, too
        self._digests: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}

    @property
    def num_published(self) -> int:
        return len(self._published)

    def forget_drafted(self) -> None:
        """What blocks have of a drafter's KV is another drafter's from now on."""
        self.drafted = [False] * len(self.drafted)

    def allocate(self) -> int:
        """A block with one reference; what it was published under is forgotten."""
        block = self.free.pop()
        self.num_evictions += self.withdraw(block)
        self.references[block] = 1
        self.filled[block] = 0
        self.drafted[block] = False
        return block

    def fill(self, block: int, num_slots: int) -> None:
        """Of a referenced block the first `num_slots` slots are valid; no more than were so before is no news."""
        more = num_slots - self.filled[block]
        if more > 0:
            self.filled[block] = num_slots
            self.num_filled += more

    def take(self, block: int) -> None:
        """One more reference to a block, free or not."""
        if self.references[block] == 0:
            self.free.remove(block)
            self.num_filled += self.filled[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; without any the block is free, and still found if it is published."""
        assert self.references[block] > 0, f"block {block} has no reference to give back"
        self.references[block] -= 1
        if self.references[block] == 0:
            self.num_filled -= self.filled[block]
            place = self.free.prepend if self._digests[block] is None else self.free.append
            place(block)

    def find(self, digest: bytes) -> int | None:
        """The block published under `digest`."""
        return self._published.get(digest)

    def digest(self, block: int) -> bytes | None:
        """What `block` is published under."""
        return self._digests[block]

    def digests(self) -> Iterator[tuple[int, bytes]]:
        """Every published block with its digest, in block order."""
        return ((block, digest) for block, digest in enumerate(self._digests) if digest is not None)

    def publish(self, block: int, digest: bytes) -> None:
        """Let `block` be found by `digest`. A block with the same content that was there first stays the one found."""
        assert self._digests[block] is None, f"block {block} is published already"
        if digest not in self._published:
            self._published[digest] = block
            self._digests[block] = digest

    def withdraw(self, block: int) -> bool:
        """Let `block` no longer be found; says whether it could be."""
        digest = self._digests[block]
        if digest is None:
            return False
        del self._published[digest]
        self._digests[block] = None
        return True

    def withdraw_free(self) -> None:
        """Withdraw every published block that nobody references."""
        for block in self.free.walk():
            self.withdraw(block)
