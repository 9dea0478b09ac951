"""Frames of KV over TCP, without an engine: whole, or an error in time, whatever the other side is or says."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specserve.cluster import kv_link
from specserve.cluster.connection import Connection
from specserve.cluster.kv_link import PIECE_BYTES, Fetch, Fetcher, Missing, Piece, answer
from specserve.errors import ConfigError
from specserve.parallel.address import Address
from specserve.parallel.handshake import Agreed, LinkError, engine_handshake
from specserve.parallel.security import check_plaintext, engine_tls, peer_tls
from specserve.parallel.shared_frames import SharedFrames, read_shared

SECRET = b"0123456789abcdef0123456789abcdef"
FRAME = os.urandom(3 * PIECE_BYTES + 77)
Say = Callable[[bytes], list[bytes]]  # what to send in answer to a message


def told(message: bytes) -> list[bytes]:
    return [answer(message, {"frame": memoryview(FRAME)})]


class Holder:
    """The other side: an engine that says this."""

    def __init__(self, say: Say) -> None:
        self.error: LinkError | None = None
        self._say = say
        shake = engine_handshake(SECRET, "tiny", "abc", _nothing, _nothing)
        self.connection = Connection(shake, self)

    def opened(self, agreed: Agreed) -> None:
        assert agreed.purpose == "kv"

    def received(self, message: bytes) -> None:
        for each in self._say(message):
            self.connection.send(each)

    def closed(self, error: LinkError) -> None:
        self.error = error


def _nothing() -> None:
    return None


def fetched(say: Say = told, secret: bytes = SECRET, digest: str = "abc", **options: Any) -> bytes:
    """The frame as it came."""

    async def play() -> bytes:
        loop, frames = asyncio.get_running_loop(), SharedFrames()
        server = await loop.create_server(lambda: Holder(say).connection, "127.0.0.1", 0, ssl=options.get("there"))
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        frames.begin("x", len(FRAME))
        fetcher = Fetcher(secret, digest, options.get("here"), _nothing_of)
        try:
            await fetcher.fetch(
                address, options.get("name", "frame"), len(FRAME), lambda *piece: frames.fill("x", *piece)
            )
            return bytes(read_shared(frames.finish("x"), len(FRAME)))
        finally:
            frames.close()
            server.close()
            await asyncio.sleep(0)

    return asyncio.run(play())


def _nothing_of(address: Address) -> None:
    return None


def test_a_frame_comes_whole() -> None:
    assert fetched() == FRAME


def test_over_tls(certificates: Path) -> None:
    """Both ask for a certificate."""
    ca = certificates / "ca.pem"
    there = engine_tls(certificates / "engine.pem", certificates / "engine.key", ca)
    own = certificates / "server.pem", certificates / "server.key"
    assert fetched(there=there, here=peer_tls(ca, *own)) == FRAME
    with pytest.raises(LinkError, match=r"certificate is not accepted: .* See --peer-ca\."):
        fetched(there=there, here=peer_tls(certificates / "other.pem", *own))
    with pytest.raises(LinkError, match="It may speak TLS"):
        fetched(there=there)
    with pytest.raises(LinkError, match="Was it started with --tls-cert"):
        fetched(here=peer_tls(ca, *own))


def test_without_tls_no_other_machine_is_asked() -> None:
    def check(address: Address) -> None:
        check_plaintext(address, False, "--peer-ca", "--insecure-no-tls")

    async def play() -> None:
        with pytest.raises(ConfigError, match="--peer-ca"):
            await Fetcher(SECRET, "abc", None, check).fetch(Address("10.0.0.2", 7000), "frame", 1, lambda *piece: None)

    asyncio.run(play())


def test_who_cannot_give_it() -> None:
    with pytest.raises(LinkError, match="It refused: The other side has another secret"):
        fetched(secret=b"another secret, long enough")
    with pytest.raises(LinkError, match="from other files"):
        fetched(digest="other")
    with pytest.raises(LinkError, match="does not hold that KV any more"):
        fetched(name="gone")


def encoded(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Piece(0, len(FRAME), b"short"), "It sent 5 bytes at 0"),
        (Piece(0, len(FRAME) + 1, bytes(PIECE_BYTES)), f"of {len(FRAME) + 1}"),
        (Piece(PIECE_BYTES, len(FRAME), bytes(PIECE_BYTES)), f"at {PIECE_BYTES} of"),
        (Missing(), "does not hold"),
        (Fetch("x", 0), "cannot be read"),
    ],
    ids=["short", "longer", "elsewhere", "missing", "a-question"],
)
def test_what_was_not_asked_for(wrong: msgspec.Struct, says: str) -> None:
    with pytest.raises(LinkError, match=says):
        fetched(lambda message: [encoded(wrong)])


def test_a_side_that_says_nothing_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_link, "_MORE_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(LinkError, match=rf"did not send {len(FRAME)} bytes in"):
        fetched(lambda message: [])
    assert time.monotonic() - begun < 5


def test_damaged_answers_are_an_error_or_the_frame() -> None:
    draw = random.Random(5)
    for _ in range(60):

        def say(message: bytes) -> list[bytes]:
            (piece,) = told(message)
            damaged = bytearray(piece[:200])
            for _ in range(draw.randrange(1, 4)):
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            return [bytes(damaged) + piece[200:]] if draw.random() < 0.5 else [piece]

        try:
            found = fetched(say)
        except LinkError:
            continue
        assert len(found) == len(FRAME)


def test_questions_that_no_engine_asks() -> None:
    draw, frames = random.Random(7), {"frame": memoryview(FRAME)}
    good = encoded(Fetch("frame", PIECE_BYTES))
    assert msgspec.msgpack.decode(answer(good, frames), type=Piece).data == FRAME[PIECE_BYTES : 2 * PIECE_BYTES]
    for wrong in (
        encoded(Fetch("frame", len(FRAME))),
        encoded(Fetch("frame", 2**42)),
        encoded(Missing()),
        b"",
        b"\xff",
    ):
        with pytest.raises(LinkError):
            answer(wrong, frames)
    for _ in range(2000):
        damaged = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.randrange(2)] = draw.randbytes(draw.randrange(2))
        try:
            found = msgspec.msgpack.decode(answer(bytes(damaged), frames), type=Piece | Missing)
        except LinkError:
            continue
        if isinstance(found, Piece):
            assert found.data == FRAME[found.start : found.start + PIECE_BYTES]
