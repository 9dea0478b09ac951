"""A client that does nothing but read: what a client's library costs is no cost of the server's. One connection, one
request at a time, streams in chunks; knows as much of HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

from client import Reading

_HEAD = "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
_END = b"0\r\n\r\n"  # an event cannot end like this


class _Pieces(asyncio.Protocol):
    """What comes, with the time when it came."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if data.endswith(_END):
            self.ended.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()


class BareClient:
    """Streams from one server, each after the other's end."""

    def __init__(self, transport: asyncio.Transport, pieces: _Pieces, host: str) -> None:
        self._transport, self._pieces, self._host = transport, pieces, host

    @classmethod
    async def to(cls, url: str) -> BareClient:
        parts = urlsplit(url)
        assert parts.hostname is not None, "the server tells its whole address"
        loop = asyncio.get_running_loop()
        transport, pieces = await loop.create_connection(_Pieces, parts.hostname, parts.port or 80)
        return cls(transport, pieces, parts.netloc)

    async def ask(self, path: str, body: dict[str, Any]) -> Reading:
        """The stream; it is taken apart when it has ended."""
        reading = Reading(time.perf_counter())
        sent = json.dumps(body).encode()
        head = _HEAD.format(path=path, host=self._host, length=len(sent))
        self._pieces.pieces, self._pieces.ended = [], asyncio.Event()
        self._transport.write(head.encode() + sent)
        await self._pieces.ended.wait()
        reading.ended = time.perf_counter()
        _take_apart(self._pieces.pieces, reading)
        return reading

    def close(self) -> None:
        self._transport.close()


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
