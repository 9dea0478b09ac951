"""How much is let in at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specserve.server.wire.errors import overloaded, unavailable

SMALL_BYTES = 64 * 1024  # bodies that are never refused for memory: those of most requests


class Admission:
    """Counts completions between arrival and end. Whoever comes when there is no room is told at once, before anything
    of the request was expanded: waiting in a queue without end helps nobody.

    `num_inside` are those that the engine has to do, `num_unread` those that it has done and whose client has yet to
    take the answer: as many as `capacity` take no room from others.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_inside = 0
        self.num_unread = 0
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
    def enter(self, num_completions: int) -> Iterator[Place]:
        """Takes room until the end of the block, or until the completions have ended. Raises WireError as `check`
        does."""
        self.check(num_completions)
        self.num_inside += num_completions
        self.num_requests += 1
        place = Place(self, num_completions)
        try:
            yield place
        finally:
            self.num_inside -= place.num_inside
            self.num_unread -= num_completions - place.num_inside
            self.num_requests -= 1


class Place:
    """What one request takes of the room for completions."""

    def __init__(self, admission: Admission, num_completions: int) -> None:
        self._admission = admission
        self.num_inside = num_completions

    def end_one(self) -> None:
        """The engine has nothing more to do for one of the completions. Its room is free, unless so many answers are
        read that they would fill the memory."""
        admission = self._admission
        if self.num_inside and admission.num_unread < admission.capacity:
            self.num_inside -= 1
            admission.num_inside -= 1
            admission.num_unread += 1


class BodyBudget:
    """Counts the bytes of all bodies that were read and not yet checked, and of what they are parsed to. Large ones
    share `capacity`; small ones always find room."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0

    @contextmanager
    def reserve(self) -> Iterator[BodyReservation]:
        """One body's share, given back at the end of the block."""
        reservation = BodyReservation(self)
        try:
            yield reservation
        finally:
            self.num_bytes -= reservation.num_bytes


class BodyReservation:
    """What one body takes of the room for bodies."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """The body has so many bytes now. Raises WireError, 429, when it is large and others leave no room for it."""
        if num_bytes <= SMALL_BYTES:
            return
        more = num_bytes - self.num_bytes
        if self._budget.num_bytes + more > self._budget.capacity:
            raise overloaded("The server is reading as many large requests as it can. Send this one again in a moment.")
        self._budget.num_bytes += more
        self.num_bytes = num_bytes
