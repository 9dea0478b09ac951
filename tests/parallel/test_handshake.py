"""The handshake of server and engine, without a socket: who is let in, and what frames refuse."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from specserve.errors import ConfigError
from specserve.parallel import handshake
from specserve.parallel.address import Address
from specserve.parallel.handshake import (
    MOST_MESSAGE_BYTES,
    PREAMBLE,
    PREAMBLE_BYTES,
    Agreed,
    Handshake,
    LinkError,
    Session,
    Welcome,
    check_preamble,
    engine_handshake,
    refusal,
    server_handshake,
)

SECRET = b"a secret of enough characters"


def nothing(*_: object) -> None:
    pass


def agree(server: Handshake, engine: Handshake) -> tuple[Agreed, Agreed]:
    """What both sides have at the end."""
    next(server)
    hello = server.send(next(engine))
    with pytest.raises(StopIteration) as end:
        engine.send(hello)
    engine_has: Agreed = end.value.value
    with pytest.raises(StopIteration) as end:
        server.send(engine_has.last_words)
    return end.value.value, engine_has


def both(secret: bytes = SECRET, check: Callable[[Welcome], None] = nothing) -> tuple[Handshake, Handshake]:
    return server_handshake(secret, 3.0, check), engine_handshake(SECRET, "tiny", "abc", nothing)


def test_they_agree_and_frames_go_both_ways() -> None:
    seen: list[Welcome] = []
    server, engine = agree(*both(check=seen.append))
    assert (seen[0].model, seen[0].digest) == ("tiny", "abc")
    assert (engine.heartbeat_s, server.clock_offset) == (3.0, 0.0), "the same clock, on the same machine"
    for sender, receiver in ((server.session, engine.session), (engine.session, server.session)):
        for message in (b"", b"one", b"two" * 1000):
            frame = sender.seal(message)
            assert receiver.frame_bytes(frame[: Session.HEADER_BYTES]) == len(frame)
            assert receiver.open(frame) == message


def test_the_secret_is_never_sent() -> None:
    server, engine = both()
    next(server)
    challenge = next(engine)
    hello = server.send(challenge)
    with pytest.raises(StopIteration) as end:
        engine.send(hello)
    assert all(SECRET not in said for said in (challenge, hello, end.value.value.last_words))


def test_a_server_with_another_secret_is_told() -> None:
    server, engine = both(b"another secret, long enough")
    next(server)
    with pytest.raises(LinkError, match="another secret") as found:
        engine.send(server.send(next(engine)))
    assert found.value.is_final and found.value.is_told
    with pytest.raises(LinkError, match="refused: The other side has another secret") as told:
        server.send(refusal(found.value))
    assert told.value.is_final


def test_an_engine_that_does_not_know_the_secret_is_found_out() -> None:
    """It lets everybody in, or sends back what it was sent."""
    server = server_handshake(SECRET, 3.0, nothing)
    next(server)
    hello = server.send(msgspec.msgpack.encode(handshake.Challenge(handshake.__version__, b"n" * 32)))
    with pytest.raises(LinkError, match="did not prove"):
        server.send(hello)


def test_proofs_of_another_connection_prove_nothing() -> None:
    server, engine = both()
    next(server)
    hello = server.send(next(engine))
    other = engine_handshake(SECRET, "tiny", "abc", nothing)
    next(other)
    with pytest.raises(LinkError, match="another secret"):
        other.send(hello)


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    challenge = msgspec.msgpack.encode(handshake.Challenge("0.0.1", b"n" * 32))
    server = server_handshake(SECRET, 3.0, nothing)
    next(server)
    with pytest.raises(LinkError, match=r"specserve 0\.0\.1.*Run the same release") as found:
        server.send(challenge)
    assert found.value.is_final


def test_a_model_that_is_another_is_refused() -> None:
    def check(welcome: Welcome) -> None:
        raise LinkError(f"no {welcome.model}", is_final=True)

    server, engine = both(check=check)
    next(server)
    hello = server.send(next(engine))
    with pytest.raises(StopIteration) as end:
        engine.send(hello)
    with pytest.raises(LinkError, match="no tiny"):
        server.send(end.value.value.last_words)


@pytest.mark.parametrize(
    ("received", "words"),
    [
        pytest.param(PREAMBLE[:-2] + b"\x07\x00", "version 7 of the protocol, and this side version 1", id="version"),
        pytest.param(b"HTTP/1.1 400", "no engine of specserve: it began with b'HTTP", id="http"),
        pytest.param(b"\x15\x03\x03\x00\x02\x02\x32", "speaks TLS, and this side does not", id="tls"),
        pytest.param(bytes(12), "no engine", id="zeros"),
    ],
)
def test_what_begins_otherwise(received: bytes, words: str) -> None:
    with pytest.raises(LinkError, match=words) as found:
        check_preamble(received[:PREAMBLE_BYTES])
    assert found.value.is_final


def test_a_beginning_that_is_cut_is_waited_for() -> None:
    for size in range(PREAMBLE_BYTES + 1):
        check_preamble(PREAMBLE[:size])


def test_any_changed_bit_of_a_frame_is_found() -> None:
    """In the length, too, before so much is waited for."""
    server, engine = agree(*both())
    server.session.seal(b"lost")
    with pytest.raises(LinkError, match="not of this session"):
        engine.session.frame_bytes(server.session.seal(b"after it")[: Session.HEADER_BYTES])
    server, engine = agree(*both())
    frame = server.session.seal(b"message")
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LinkError, match="changed on its way"):
            engine.session.frame_bytes(changed[: Session.HEADER_BYTES])
            engine.session.open(changed)
    assert engine.session.open(frame) == b"message"
    with pytest.raises(LinkError):
        engine.session.frame_bytes(frame[: Session.HEADER_BYTES])  # the same again


def test_a_frame_back_to_its_sender_is_none() -> None:
    server, _ = agree(*both())
    frame = server.session.seal(b"message")
    with pytest.raises(LinkError):
        server.session.frame_bytes(frame[: Session.HEADER_BYTES])


def test_a_frame_that_is_too_large_is_refused_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even by one who knows the keys."""
    server, engine = agree(*both())
    monkeypatch.setattr(handshake, "MOST_MESSAGE_BYTES", 8)
    with pytest.raises(LinkError, match="a frame of 9 bytes; 8 are allowed"):
        engine.session.frame_bytes(server.session.seal(b"123456789")[: Session.HEADER_BYTES])
    assert MOST_MESSAGE_BYTES < 2**32


def test_greetings_of_noise_are_refused() -> None:
    draw = random.Random(0)
    valid = msgspec.msgpack.encode(handshake.Signed(b"x" * 40, b"y" * 32))
    for number in range(2000):
        engine = engine_handshake(SECRET, "tiny", "abc", nothing)
        next(engine)
        noise = draw.randbytes(draw.randrange(200))
        if number % 2:
            changed = bytearray(valid)
            for _ in range(draw.randrange(1, 4)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            noise = bytes(changed[: draw.randrange(1, len(changed) + 1)])
        with pytest.raises(LinkError):
            engine.send(noise)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7000", "127.0.0.1", 7000),
        ("[::1]:0", "::1", 0),
        ("engine-1.example:65535", "engine-1.example", 65535),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = Address.parse(text, "--engine")
    assert (address.host, address.port, str(address)) == (host, port, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "::1:80",
        "[host]:1",
        "a b:1",
        "h:٣",
        "x" * 300 + ":1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--engine is .*HOST:PORT"):
        Address.parse(text, "--engine")


@pytest.mark.parametrize(("host", "is_loopback"), [
    ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("engine", False), ("localhost.example", False),
])  # fmt: skip
def test_what_is_loopback(host: str, is_loopback: bool) -> None:
    assert Address(host, 1).is_loopback == is_loopback
