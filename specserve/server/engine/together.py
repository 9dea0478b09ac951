"""What engines share that step together: memory, and a bell for each. When one of them ends the others end with it,
and the next ones share something new."""

from __future__ import annotations

import os

from specserve.parallel.begun import behind
from specserve.server.engine.spawn import Inheritance


class Together:
    """The descriptors of so many engines, by their numbers. `close` lets go of them; processes keep theirs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._descriptors: list[int] = []
        self._members: set[int] = set()  # that were given these
        self._lost = 0  # the one that ended those before them

    def inheritance(self, number: int) -> Inheritance:
        """For the process of that engine, which is about to be started. Raises OSError."""
        if not self._descriptors:
            self._descriptors.append(os.memfd_create("specserve-experts"))
        while len(self._descriptors) <= self._count:
            self._descriptors.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self._members.add(number)
        return Inheritance(number, tuple(self._descriptors))

    def end(self, number: int) -> int | None:
        """The process of that engine has ended. The one whose end ended it, or None: those that share with it have to
        end."""
        if number not in self._members:
            return self._lost
        self._lost = number
        self.close()
        return None

    def behind(self) -> list[int]:
        """Engines that have not begun a step that others have."""
        return behind(self._descriptors[0], self._count) if self._descriptors else []

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._members.clear()
