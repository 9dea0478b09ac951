"""What all processes of a server count together: in shared memory, where each has a row that it alone writes."""

from __future__ import annotations

import mmap
import time

_WIDTH = 8  # 64-bit numbers: a cache line
_BEAT, _INSIDE, _UNREAD, _REQUESTS, _BODY_BYTES, _DRAINING = range(6)
COORDINATOR = 0  # its row
MOST_ROWS = mmap.PAGESIZE // (8 * _WIDTH)


class Table:
    """One row for the coordinator and one for each of `num_processes` that answer HTTP, in the memory of a descriptor
    (see machine.pulse.shared_memory). A number is written in one piece, so whoever reads it has the old or the new
    one; a process that was killed leaves what it had written last."""

    def __init__(self, descriptor: int, num_processes: int) -> None:
        self._numbers = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")
        self._end = _WIDTH * (num_processes + 1)

    def beat(self, row: int) -> None:
        """The process of this row runs."""
        self._numbers[_WIDTH * row + _BEAT] = time.monotonic_ns()

    def last_beat(self, row: int) -> float:
        """When it said so for the last time, in seconds of time.monotonic(), which all processes share; 0: never."""
        return 1e-9 * self._numbers[_WIDTH * row + _BEAT]

    def clear(self, row: int) -> None:
        """The process of this row is gone, and what it counted with it."""
        for column in range(_WIDTH):
            self._numbers[_WIDTH * row + column] = 0

    def num_requests(self, row: int) -> int:
        return self._numbers[_WIDTH * row + _REQUESTS]

    def add(self, row: int, column: int, number: int) -> None:
        if number:
            self._numbers[_WIDTH * row + column] += number

    def total(self, column: int) -> int:
        """Over all rows. Whoever has added to its own row and then looks here sees what others added before."""
        return sum(self._numbers[column : self._end : _WIDTH])


class SharedCounts:
    """The Counts of admission.py over all processes, as the one of `row` has them."""

    def __init__(self, table: Table, row: int) -> None:
        self._table, self._row = table, row

    @property
    def num_inside(self) -> int:
        return self._table.total(_INSIDE)

    @property
    def num_unread(self) -> int:
        return self._table.total(_UNREAD)

    @property
    def num_requests(self) -> int:
        return self._table.total(_REQUESTS)

    @property
    def num_body_bytes(self) -> int:
        return self._table.total(_BODY_BYTES)

    @property
    def draining(self) -> bool:
        return bool(self._table.total(_DRAINING))

    @draining.setter
    def draining(self, value: bool) -> None:
        """For the coordinator."""
        self._table.add(self._row, _DRAINING, int(value) - self._table.total(_DRAINING))

    def add(self, *, inside: int = 0, unread: int = 0, requests: int = 0, body_bytes: int = 0) -> None:
        table, row = self._table, self._row
        table.add(row, _INSIDE, inside)
        table.add(row, _UNREAD, unread)
        table.add(row, _REQUESTS, requests)
        table.add(row, _BODY_BYTES, body_bytes)
