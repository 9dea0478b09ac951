"""Who may use an engine: the process that made it, one thread after another, and no Ctrl-C in the middle."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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


@contextmanager
def interrupted_between() -> Iterator[Callable[[], None]]:
    """Let the first SIGINT wait until the block calls what it is given, or has ended; the second does not wait. In
    Python's main thread, the only one that is interrupted, and where SIGINT has a handler of Python's."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    waiting: list[FrameType | None] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(frame)
        if len(waiting) > 1:
            handler(number, frame)

    def interrupt() -> None:
        if len(waiting) == 1:
            handler(signal.SIGINT, waiting.pop())

    signal.signal(signal.SIGINT, wait)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupt()


@contextmanager
def interrupted_after() -> Iterator[None]:
    """Let the first SIGINT wait until the block has ended. For a loop interrupted_between takes 0.1 ms less a turn."""
    with interrupted_between():
        yield
