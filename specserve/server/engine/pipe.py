"""An end of the socket between the API process and an engine's: messages as bytes, each after its length.

A plain pair of sockets: with ZeroMQ, whose threads are on the way in both processes, a first token took 0.2 ms more.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_LENGTH = struct.Struct("<I")
_MOST_AT_ONCE = 2**18  # bytes


class Pipe:
    """One end. Nothing waits: what the other side does not take yet is kept, and sent later, in order."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def is_behind(self) -> bool:
        """Whether there is something that `flush` has to send."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        self._unsent += _LENGTH.pack(len(message))
        self._unsent += message
        self.flush()

    def flush(self) -> None:
        """Send as much as goes. For nobody nothing is kept."""
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()

    def receive(self) -> list[bytes]:
        """Messages that are whole now; a call reads no more than 256 KiB. Raises EOFError when nothing will come any
        more."""
        try:
            piece = self._end.recv(_MOST_AT_ONCE)
        except BlockingIOError:
            return []
        except ConnectionError:
            piece = b""
        if not piece:
            raise EOFError("The other end is closed.")
        self._unread += piece
        return self._whole()

    def close(self, wait_s: float = 0.0) -> None:
        """What is unsent may take so long."""
        if self._unsent and wait_s:
            self._end.settimeout(wait_s)
            with suppress(OSError):
                self._end.sendall(self._unsent)
        self._end.close()

    def _whole(self) -> list[bytes]:
        found: list[bytes] = []
        first, size = 0, len(self._unread)
        while size - first >= _LENGTH.size:
            begin = first + _LENGTH.size
            end = begin + _LENGTH.unpack_from(self._unread, first)[0]
            if end > size:
                break
            found.append(bytes(self._unread[begin:end]))
            first = end
        del self._unread[:first]
        return found
