"""Frames of KV from engine to engine over TCP: the engine that has one is asked for it piece by piece, so that neither
side holds more on its way than it wants."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from specserve.cluster.connection import Connection, connect
from specserve.parallel.address import Address
from specserve.parallel.handshake import Agreed, LinkError, Welcome, server_handshake

PIECE_BYTES = 2**18  # which takes either side about half a millisecond, in which it does nothing else
_NUM_ASKED = 8  # pieces that are on their way at once
_HEARTBEAT_S = 3.0
_LEAST_BYTES_PER_S = 10 * 2**20  # slower than that computing is worth more
_MORE_S = 10.0

_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=2**42)]


class Fetch(msgspec.Struct, frozen=True, tag="fetch", forbid_unknown_fields=True):
    """Send what the frame with that name holds from there on, PIECE_BYTES or the rest."""

    name: _Name
    start: _Place


class Piece(msgspec.Struct, frozen=True, tag="piece", forbid_unknown_fields=True):
    """What Fetch asked for, of a frame of so many bytes in all."""

    start: _Place
    num_bytes: _Place
    data: Annotated[bytes, msgspec.Meta(max_length=PIECE_BYTES)]


class Missing(msgspec.Struct, frozen=True, tag="missing", forbid_unknown_fields=True):
    """There is no frame of that name, or not any more."""


_Answer: TypeAlias = Piece | Missing
_encode = msgspec.msgpack.Encoder().encode
_read_fetch = msgspec.msgpack.Decoder(Fetch).decode
_read_answer = msgspec.msgpack.Decoder(_Answer).decode


def answer(message: bytes, frames: Mapping[str, memoryview]) -> bytes:
    """What an engine that has these frames says to another one. Raises LinkError for what asks for none of them."""
    try:
        asked = _read_fetch(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LinkError("It asked for KV in words that cannot be read.") from error
    frame = frames.get(asked.name)
    if frame is None:
        return _encode(Missing())
    if asked.start >= len(frame):
        raise LinkError(f"It asked for byte {asked.start} of {len(frame)} bytes of KV.")
    return _encode(Piece(asked.start, len(frame), bytes(frame[asked.start : asked.start + PIECE_BYTES])))


def longest_s(num_bytes: int) -> float:
    """How long it may take to fetch so much."""
    return _MORE_S + num_bytes / _LEAST_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches frames from other engines. `digest` is that of the model's files here; `check_address` raises ConfigError
    for a place that must not be connected to without TLS."""

    secret: bytes
    digest: str
    tls: ssl.SSLContext | None
    check_address: Callable[[Address], None]

    async def fetch(self, address: Address, name: str, num_bytes: int, put: Callable[[int, bytes], None]) -> None:
        """Bring a frame that an engine has there, and `put` each piece in its place. Raises LinkError, ConfigError, and
        what `put` does."""
        if self.tls is None:
            self.check_address(address)
        incoming = _Incoming(name, num_bytes, put)
        connection = Connection(server_handshake(self.secret, _HEARTBEAT_S, self._check, "kv"), incoming)
        incoming.connection = connection
        try:
            async with asyncio.timeout(longest_s(num_bytes)):
                await connect(connection, address, self.tls, "--peer-ca")
                await incoming.whole
        except TimeoutError:
            raise LinkError(f"It did not send {num_bytes} bytes in {longest_s(num_bytes):.0f} s.") from None
        finally:
            connection.close("All that was wanted has come.")

    def _check(self, welcome: Welcome) -> None:
        if welcome.digest != self.digest:
            raise LinkError(f"It serves {welcome.model!r} from other files than those here.", is_final=True)


class _Incoming:
    """A Receiver of one frame."""

    connection: Connection

    def __init__(self, name: str, num_bytes: int, put: Callable[[int, bytes], None]) -> None:
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._name, self._num_bytes, self._put = name, num_bytes, put
        self._num_asked = self._num_here = 0  # bytes

    def opened(self, agreed: Agreed) -> None:
        for _ in range(_NUM_ASKED):
            self._ask()

    def received(self, message: bytes) -> None:
        """Raises LinkError, as what comes is not what was asked for."""
        if self.whole.done():  # given up here
            return
        try:
            self._take(_read_answer(message))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LinkError("It sent KV in words that cannot be read.") from error
        except OSError as error:
            self.whole.set_exception(error)

    def closed(self, error: LinkError) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)
            self.whole.exception()  # looked at: whoever waited may have gone

    def _take(self, found: _Answer) -> None:
        if isinstance(found, Missing):
            raise LinkError("It does not hold that KV any more.")
        due = min(PIECE_BYTES, self._num_bytes - self._num_here)
        if (found.start, found.num_bytes, len(found.data)) != (self._num_here, self._num_bytes, due):
            raise LinkError(
                f"It sent {len(found.data)} bytes at {found.start} of {found.num_bytes}; asked for were {due} at "
                f"{self._num_here} of {self._num_bytes}."
            )
        self._put(found.start, found.data)
        self._num_here += due
        if self._num_here == self._num_bytes:
            self.whole.set_result(None)
        else:
            self._ask()

    def _ask(self) -> None:
        if self._num_asked < self._num_bytes:
            self.connection.send(_encode(Fetch(self._name, self._num_asked)))
            self._num_asked += PIECE_BYTES
