"""How much is let in at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from specserve.server.wire.errors import overloaded, unavailable

SMALL_BYTES = 64 * 1024  # bodies that are never refused for memory: those of most requests


class Counts(Protocol):
    """What is inside now: completions that the engine has to do and answers that are yet to be read, the requests of
    both, bytes of bodies. `draining`: nothing new is taken."""

    draining: bool

    @property
    def num_inside(self) -> int: ...
    @property
    def num_unread(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def num_body_bytes(self) -> int: ...
    def add(self, *, inside: int = 0, unread: int = 0, requests: int = 0, body_bytes: int = 0) -> None: ...


class OwnCounts:
    """Counts of one process that answers alone."""

    def __init__(self) -> None:
        self.draining = False
        self.num_inside = self.num_unread = self.num_requests = self.num_body_bytes = 0

    def add(self, *, inside: int = 0, unread: int = 0, requests: int = 0, body_bytes: int = 0) -> None:
        self.num_inside += inside
        self.num_unread += unread
        self.num_requests += requests
        self.num_body_bytes += body_bytes


class Admission:
    """Counts completions between arrival and end. Whoever comes when there is no room is told at once, before anything
    of the request was expanded: waiting in a queue without end helps nobody. Others may share `counts`: no more than
    `capacity` are ever inside.

    `num_inside` are those that the engine has to do, `num_unread` those that it has done and whose client has yet to
    take the answer: as many as `capacity` take no room from others.
    """

    def __init__(self, capacity: int, counts: Counts | None = None, num_more: Callable[[], int] = lambda: 0) -> None:
        """`num_more` says by how much the capacity is above that now."""
        self._capacity, self._num_more = capacity, num_more
        self.counts = counts or OwnCounts()

    @property
    def capacity(self) -> int:
        return self._capacity + self._num_more()

    @property
    def num_inside(self) -> int:
        return self.counts.num_inside

    @property
    def num_unread(self) -> int:
        return self.counts.num_unread

    @property
    def num_requests(self) -> int:
        return self.counts.num_requests

    @property
    def draining(self) -> bool:
        return self.counts.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self.counts.draining = value

    def check(self, num_completions: int = 1) -> None:
        """Raises WireError: 503 while draining, 429 when there is no room for so many."""
        if self.draining:
            raise unavailable("The server is shutting down. Send the request to another one.", code="draining")
        self._check_room(num_completions)

    @contextmanager
    def enter(self, num_completions: int) -> Iterator[Place]:
        """Takes room until the end of the block, or until the completions have ended. Raises WireError as `check`
        does."""
        self.check(num_completions)
        self.counts.add(inside=num_completions, requests=1)
        place = Place(self, num_completions)
        try:
            self._check_room(0)  # another process may have come in between: then the last one to count leaves
            yield place
        finally:
            self.counts.add(inside=-place.num_inside, unread=place.num_inside - num_completions, requests=-1)

    def _check_room(self, num_more: int) -> None:
        if self.num_inside + num_more > self.capacity:
            raise overloaded(
                f"The server has {self.num_inside} completions to do and takes {self.capacity} at most. Send the "
                "request again in a moment."
            )


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
            admission.counts.add(inside=-1, unread=1)


class BodyBudget:
    """Counts the bytes of all bodies that were read and not yet checked, and of what they are parsed to. Large ones
    share `capacity`; small ones always find room."""

    def __init__(self, capacity: int, counts: Counts | None = None) -> None:
        self.capacity = capacity
        self._counts = counts or OwnCounts()

    @property
    def num_bytes(self) -> int:
        return self._counts.num_body_bytes

    @contextmanager
    def reserve(self) -> Iterator[BodyReservation]:
        """One body's share, given back at the end of the block."""
        reservation = BodyReservation(self, self._counts)
        try:
            yield reservation
        finally:
            self._counts.add(body_bytes=-reservation.num_bytes)


class BodyReservation:
    """What one body takes of the room for bodies."""

    def __init__(self, budget: BodyBudget, counts: Counts) -> None:
        self._budget, self._counts = budget, counts
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """The body has so many bytes now. Raises WireError, 429, when it is large and others leave no room for it."""
        if num_bytes <= SMALL_BYTES:
            return
        more = num_bytes - self.num_bytes
        self._counts.add(body_bytes=more)
        if self._budget.num_bytes > self._budget.capacity:
            self._counts.add(body_bytes=-more)
            raise overloaded("The server is reading as many large requests as it can. Send this one again in a moment.")
        self.num_bytes = num_bytes
