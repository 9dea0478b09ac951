"""How much is let in at once. Knows numbers of completions; knows no requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specserve.server.wire.errors import overloaded, unavailable


class Admission:
    """Counts completions between arrival and end. Whoever comes when there is no room is told at once, before anything
    of the request was expanded: waiting in a queue without end helps nobody."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_inside = 0
        self.num_requests = 0
        self.draining = False

    def check(self, num_completions: int = 1) -> None:
        """Raises WireError: 503 while draining, 429 when there is no room for so many."""
        if self.draining:
            raise unavailable("The server is shutting down. Send the request to another one.", code="draining")
        if self.num_inside + num_completions > self.capacity:
            raise overloaded(
                f"The server has {self.num_inside} completions to do and takes {self.capacity} at most. Send the "
                "request again in a moment."
            )

    @contextmanager
    def enter(self, num_completions: int) -> Iterator[None]:
        """Takes room until the end of the block. Raises WireError as `check` does."""
        self.check(num_completions)
        self.num_inside += num_completions
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_inside -= num_completions
            self.num_requests -= 1
