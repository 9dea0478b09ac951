"""Who may use an engine: the process that made it, one thread after another."""

from __future__ import annotations

import os
import threading

from specserve.errors import EngineError


class Ownership:
    """A lock that goes to who waits for it: one thread takes it step after step, and others must come in between. The
    same thread may take it twice, as it does when a stream that nobody holds any more is collected within a step.

    Taking it raises EngineError in a process that was forked since: threads that an engine needs are not there, nor
    those that may have held the lock.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._queue, self._turn = threading.RLock(), threading.RLock()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process

    def check(self) -> None:
        if not self.is_here:
            raise EngineError(
                f"This engine was made by process {self._process}, before a fork, and its threads are not in this "
                'process. Make one in each process, or start processes with multiprocessing\'s "spawn".'
            )

    def __enter__(self) -> None:
        self.check()
        with self._queue:
            self._turn.acquire()

    def __exit__(self, *exception: object) -> None:
        self._turn.release()
