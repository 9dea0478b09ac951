"""A Pipe on the event loop: what is behind is sent when the other side takes it, what comes is given on."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from specserve.server.engine.pipe import Pipe

_log = logging.getLogger(__name__)


class Channel:
    """One end; `take` gets each message. `is_broken`: messages are not read any more, after a fault on this side, or
    one that is none. `lost` is called then, and when the other end is closed."""

    def __init__(
        self, end: socket.socket, take: Callable[[bytes], object], lost: Callable[[], object] = lambda: None
    ) -> None:
        self.is_broken = False
        self._take, self._lost = take, lost
        self._pipe = Pipe(end)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe, self._read)

    def send(self, message: bytes) -> None:
        self._pipe.send(message)
        if self._pipe.is_behind:
            self._loop.add_writer(self._pipe, self._flush)

    def close(self, wait_s: float = 0.0) -> None:
        """What is unsent may take so long."""
        self._loop.remove_reader(self._pipe)
        self._loop.remove_writer(self._pipe)
        self._pipe.close(wait_s)

    def _flush(self) -> None:
        self._pipe.flush()
        if not self._pipe.is_behind:
            self._loop.remove_writer(self._pipe)

    def _read(self) -> None:
        """Read some of what has come: who sends quicker than this must not keep everybody else from the event loop.
        That the other side has gone is for others to notice."""
        try:
            for message in self._pipe.receive():
                self._take(message)
        except EOFError:
            self._loop.remove_reader(self._pipe)
            self._lost()
        except Exception:
            _log.exception("What another process says cannot be read.")
            self.is_broken = True
            self._loop.remove_reader(self._pipe)
            self._lost()
