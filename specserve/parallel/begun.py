"""How many steps each of several replicas has begun that take every step together: at the beginning of memory that they
share, where whoever watches them reads it, too. Needs nothing that takes time to import."""

from __future__ import annotations

import mmap
import os

NUM_BYTES = 2**13
_APART = 8  # numbers: each has a cache line to itself, so that nobody waits for it


class Begun:
    """The numbers of so many replicas in `memory`, which is zeros at first."""

    def __init__(self, memory: mmap.mmap | memoryview, count: int) -> None:
        self._numbers = memoryview(memory)[:NUM_BYTES].cast("Q")
        self._count = count

    def __getitem__(self, rank: int) -> int:
        return self._numbers[rank * _APART]

    def add(self, rank: int) -> None:
        self._numbers[rank * _APART] += 1

    @property
    def behind(self) -> list[int]:
        """Those that have not begun what others have."""
        numbers = [self[rank] for rank in range(self._count)]
        return [rank for rank, number in enumerate(numbers) if number < max(numbers)]


def behind(descriptor: int, count: int) -> list[int]:
    """Those of replicas that share the memory of this descriptor."""
    if os.fstat(descriptor).st_size < NUM_BYTES:  # nobody has got so far
        return []
    with mmap.mmap(descriptor, NUM_BYTES, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        return Begun(view, count).behind
