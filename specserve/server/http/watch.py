"""Ends connections whose clients neither ask nor read."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
import time
from collections.abc import Callable, Iterable

from aiohttp import web

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 1.0  # between two looks


class Watch:
    """Looks at all connections from time to time; what it allows is exceeded by a pause between two looks at most.

    aiohttp itself waits for a first request as long as it takes to come, and for a client to read a whole body as long
    as that takes. `header_s`: until a new connection has sent the head of a request. `write_s`: without one byte taken
    by the client, however slowly it takes them.
    """

    def __init__(self, header_s: float, write_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._header_s = header_s
        self._write_s = write_s
        self._clock = clock
        self._heads: set[web.RequestHandler] = set()
        self._silent: dict[web.RequestHandler, float] = {}  # since when
        self._unread: dict[web.RequestHandler, tuple[int, float]] = {}  # bytes that wait, and since when so many

    def note_head(self, connection: web.RequestHandler) -> None:
        """The head of a request has come."""
        self._heads.add(connection)

    async def run(self, connections: Callable[[], Iterable[web.RequestHandler]]) -> None:
        """Look at what `connections` gives until cancelled."""
        pause = min(_LONGEST_PAUSE_S, self._header_s / 4, self._write_s / 4)
        while True:
            await asyncio.sleep(pause)
            self.look(connections())

    def look(self, connections: Iterable[web.RequestHandler]) -> None:
        """End those that are too slow; whoever is not among the connections has gone and is forgotten."""
        now, open_ = self._clock(), set(connections)
        self._heads &= open_
        self._silent = {each: self._silent.get(each, now) for each in open_ - self._heads}
        unread = {each: each.transport for each in open_ if each.transport and each.transport.get_write_buffer_size()}
        self._unread = {each: self._waiting(each, transport, now) for each, transport in unread.items()}
        for connection, since in self._silent.items():
            if now - since > self._header_s:
                connection.force_close()
        for connection, (_, since) in self._unread.items():
            if now - since > self._write_s and connection.transport is not None:
                _log.info("A client does not read its answer and is left.")
                connection.transport.abort()

    def _waiting(self, connection: web.RequestHandler, transport: asyncio.Transport, now: float) -> tuple[int, float]:
        num_bytes = _num_unread(transport)
        before = self._unread.get(connection)
        return before if before is not None and before[0] == num_bytes else (num_bytes, now)


def _num_unread(transport: asyncio.Transport) -> int:
    """Bytes that the client has not taken: here, and in the kernel, which takes megabytes at a time from here and gives
    them to a slow reader for a minute."""
    num_waiting, connection = transport.get_write_buffer_size(), transport.get_extra_info("socket")
    if connection is None:
        return num_waiting
    try:
        held = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    except OSError:  # not every kind of socket can tell
        return num_waiting
    return num_waiting + int.from_bytes(held, sys.byteorder)
