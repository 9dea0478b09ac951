"""Where the processes of neighbouring stages tell each other that a step's states are there, and what they took."""

from __future__ import annotations

import time
from contextlib import suppress

from specserve.parallel.messages import Connection, HandOn


class Link:
    """Where a process hears that the stage before its own has computed a step, and tells those of the next that its own
    has. Before the first stage comes the last. Steps come in their order."""

    def __init__(self, before: Connection, after: list[Connection]) -> None:
        self._before, self._after = before, after
        self._received_at = self._seconds = 0.0
        self.more_s = 0.0  # what the stages before took for the step that came last, less how long this one waited

    def begin(self, broken: list[int]) -> None:
        """The first stage has computed a step, in which these rows are broken. To those that have ended it is nothing;
        the first process hears of it otherwise."""
        self._send(HandOn(broken))

    def receive(self) -> list[int]:
        """Waits for the next step; the rows of it that are broken by now. Raises EOFError where nothing will come any
        more."""
        begun = time.perf_counter()
        found: HandOn = self._before.receive()
        self._received_at, self._seconds = time.perf_counter(), found.seconds
        self.more_s = found.seconds - (self._received_at - begun)
        return found.broken

    def hand_on(self, broken: list[int]) -> None:
        """A later stage has computed the step that came last."""
        self._send(HandOn(broken, self._seconds + time.perf_counter() - self._received_at))

    def close(self) -> None:
        for connection in (self._before, *self._after):
            connection.close()

    def _send(self, found: HandOn) -> None:
        for connection in self._after:
            with suppress(OSError):
                connection.send(found)
