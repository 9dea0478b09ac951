"""A client that does nothing but read: what a client's library costs is no cost of the server's. One connection, one
request at a time, streams in chunks."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

from client import Reading

_HEAD = "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
_MOST_AT_ONCE = 2**16  # bytes
_PATIENCE_S = 60.0  # with a server that says nothing
_END = b"0\r\n\r\n"  # an event cannot end like this


class BareClient:
    """Streams from one server, each after the other's end. It waits for them in a thread, in plain calls: an event loop
    would take a core from the server for longer than the reading itself. Raises TimeoutError when nothing comes."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self._connection, self._host = connection, host

    @classmethod
    async def to(cls, url: str) -> BareClient:
        parts = urlsplit(url)
        assert parts.hostname is not None, "the server tells its whole address"
        address = parts.hostname, parts.port or 80
        return cls(await asyncio.to_thread(socket.create_connection, address, _PATIENCE_S), parts.netloc)

    async def ask(self, path: str, body: dict[str, Any]) -> Reading:
        """The stream; it is taken apart when it has ended. Time begins when the request is written out."""
        sent = json.dumps(body).encode()
        head = _HEAD.format(path=path, host=self._host, length=len(sent))
        return await asyncio.to_thread(self._read, head.encode() + sent)

    def _read(self, request: bytes) -> Reading:
        reading, pieces = Reading(time.perf_counter()), list[tuple[float, bytes]]()
        self._connection.sendall(request)
        while piece := self._connection.recv(_MOST_AT_ONCE):
            pieces.append((time.perf_counter(), piece))
            if piece.endswith(_END):
                break
        reading.ended = time.perf_counter()
        _take_apart(pieces, reading)
        return reading

    def close(self) -> None:
        self._connection.close()


def _take_apart(pieces: list[tuple[float, bytes]], reading: Reading) -> None:
    """Head and chunks, each at the time of the piece that made it whole."""
    rest, head = b"", b""
    for now, piece in pieces:
        rest += piece
        if not head:
            head, _, rest = rest.partition(b"\r\n\r\n")
            reading.status = int(head.split(b" ", 2)[1])
        while b"\r\n" in rest:
            size, _, following = rest.partition(b"\r\n")
            length = int(size, 16)
            if len(following) < length + 2:
                break
            if length:
                reading.hear(following[:length], now)
            rest = following[length + 2 :]
    reading.end()
