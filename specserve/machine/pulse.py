"""Counters in memory that two processes share: the engine counts up inside its steps, and whoever watches it can tell
a long step from one that hangs. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import os

_NUM_COUNTERS, _APART = 64, 8  # each has a cache line of 8 numbers to itself, so that threads do not wait for it


class Pulse:
    """Unsigned 64-bit counters, one for each thread of native code, which counts at `address`; `beat` uses the first.
    `count` is their sum. Another process that makes a Pulse of the same descriptor sees it; without one nobody does."""

    def __init__(self, descriptor: int = -1) -> None:
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._counters = (ctypes.c_uint64 * (_NUM_COUNTERS * _APART)).from_buffer(self._memory)

    @property
    def count(self) -> int:
        return sum(self._counters[::_APART])

    @property
    def address(self) -> int:
        """Of the first counter, valid for as long as this object."""
        return ctypes.addressof(self._counters)

    def beat(self) -> None:
        self._counters[0] += 1


def shared_memory() -> int:
    """A descriptor of new memory for a Pulse, to be inherited and closed. Raises OSError when there are no means."""
    descriptor = os.memfd_create("specserve-pulse")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor
