"""Connections over real sockets: TLS, silence, noise, and what is left of them."""

from __future__ import annotations

import asyncio
import random
import resource
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specserve.cluster.connection import Connection
from specserve.errors import ConfigError
from specserve.parallel import handshake
from specserve.parallel.address import Address
from specserve.parallel.handshake import (
    LENGTH,
    PREAMBLE,
    Agreed,
    LinkError,
    Session,
    engine_handshake,
    server_handshake,
)
from specserve.parallel.security import check_plaintext, engine_tls, read_secret, server_tls

SECRET = b"a secret of enough characters"


class Ear:
    """A Receiver that keeps what it hears."""

    def __init__(self, echo: bool = False) -> None:
        self.messages: list[bytes] = []
        self.agreed: asyncio.Future[Agreed] = asyncio.get_running_loop().create_future()
        self.over: asyncio.Future[LinkError] = asyncio.get_running_loop().create_future()
        self.connection: Connection | None = None
        self._echo = echo

    def opened(self, agreed: Agreed) -> None:
        self.agreed.set_result(agreed)

    def received(self, message: bytes) -> None:
        self.messages.append(message)
        if self._echo and self.connection is not None:
            self.connection.send(message)

    def closed(self, error: LinkError) -> None:
        self.over.set_result(error)


def an_engine() -> tuple[Connection, Ear]:
    ear = Ear(echo=True)
    ear.connection = Connection(engine_handshake(SECRET, "tiny", "abc", lambda: None), ear)
    return ear.connection, ear


def a_server(heartbeat_s: float = 3.0, secret: bytes = SECRET) -> tuple[Connection, Ear]:
    ear = Ear()
    ear.connection = Connection(server_handshake(secret, heartbeat_s, lambda welcome: None), ear)
    return ear.connection, ear


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[Ear]]]:
    """The port of an engine that says all again, and who has come."""
    ears: list[Ear] = []

    def accept() -> Connection:
        connection, ear = an_engine()
        ears.append(ear)
        return connection

    server = await asyncio.get_running_loop().create_server(accept, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], ears
    finally:
        server.close()
        for ear in ears:
            if ear.connection is not None:
                ear.connection.cut(LinkError("The test is over."))
        await asyncio.sleep(0.01)


async def connected(port: int, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", **options: object) -> Ear:
    connection, ear = a_server(**options)  # type: ignore[arg-type]
    named = {} if tls is None else {"server_hostname": host}
    await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port, ssl=tls, **named)
    return ear


async def until(condition: Callable[[], object], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def whole_or_over(ear: Ear, count: int) -> None:
    """Until so many messages have come, or nothing more will."""
    await until(lambda: len(ear.messages) == count or ear.over.done(), 20)


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await play()

    asyncio.run(bounded())


def test_messages_of_all_sizes_come_in_order() -> None:
    async def play() -> None:
        async with listening() as (port, _):
            ear = await connected(port)
            await ear.agreed
            assert ear.connection is not None
            sent = [bytes([i]) * size for i, size in enumerate((1, 100, 70_000, 2_000_000, 3))]
            for message in sent:
                ear.connection.send(message)
            await until(lambda: len(ear.messages) == len(sent), 20)
            assert ear.messages == sent
            ear.connection.close()
            assert "closed" in str(await ear.over)

    run(play)


@pytest.mark.parametrize("mutual", [False, True])
def test_over_tls(certificates: Path, mutual: bool) -> None:
    async def play() -> None:
        ca = certificates / "ca.pem"
        engine = engine_tls(certificates / "engine.pem", certificates / "engine.key", ca if mutual else None)
        own = (certificates / "server.pem", certificates / "server.key") if mutual else (None, None)
        async with listening(engine) as (port, ears):
            ear = await connected(port, server_tls(ca, *own))
            await ear.agreed
            assert ear.connection is not None
            message = bytes(range(256)) * 5000
            ear.connection.send(message)
            await until(lambda: ear.messages == [message], 20)
            ear.connection.close()
            await ear.over
            await ears[0].over

    run(play)


def test_what_tls_refuses(certificates: Path) -> None:
    """Another authority, another name, no certificate where one is asked for, no TLS on one of the two sides."""

    async def play() -> None:
        cert, key, ca = (certificates / name for name in ("engine.pem", "engine.key", "ca.pem"))
        async with listening(engine_tls(cert, key, None)) as (port, _):
            with pytest.raises(ssl.SSLCertVerificationError):
                await connected(port, server_tls(certificates / "other.pem", None, None))
            with pytest.raises(ssl.SSLCertVerificationError, match="engine2"):
                await connected(port, server_tls(ca, None, None), host="engine2.example")
            assert (await (await connected(port, server_tls(ca, None, None), host="engine.example")).agreed).session
            plain = await connected(port)
            assert "TLS" in str(await plain.over)
        async with listening(engine_tls(cert, key, ca)) as (port, _):
            nameless = await connected(port, server_tls(ca, None, None))
            error = await nameless.over
            assert "TLS failed" in str(error) or "--engine-cert" in str(error)
        async with listening() as (port, _):
            with pytest.raises(ssl.SSLError):
                await connected(port, server_tls(ca, None, None))

    run(play)


def test_another_secret_is_told_to_both() -> None:
    async def play() -> None:
        async with listening() as (port, ears):
            ear = await connected(port, secret=b"another secret, long enough")
            error = await ear.over
            assert "It refused: The other side has another secret." in str(error)
            assert error.is_final and not ear.agreed.done()
            assert "another secret" in str(await ears[0].over)

    run(play)


def test_who_falls_silent_is_cut_off_in_time(proxy: Any) -> None:
    """A connection that stays, through which nothing comes; one that is only idle stays."""

    async def play() -> None:
        async with listening() as (port, ears), proxy(port) as frozen:
            idle = await connected(port, heartbeat_s=0.6)
            ear = await connected(frozen.port, heartbeat_s=0.6)
            await ear.agreed
            await asyncio.sleep(1.5)
            assert not ear.over.done() and not idle.over.done()
            frozen.freeze()
            begun = time.monotonic()
            error = await ear.over
            assert "Nothing was heard of it for 0.6 s" in str(error)
            assert 0.2 < time.monotonic() - begun < 1.0
            assert "Nothing was heard" in str(await ears[1].over)
            assert not idle.over.done()

    run(play)


def test_bytes_changed_on_the_way_end_it_and_are_never_taken_for_others(proxy: Any) -> None:
    """One bit of all that goes either way, wherever: what comes out is what was sent, or an end."""

    async def play() -> None:
        draw, ends = random.Random(1), set[str]()
        for _ in range(60):
            remaining = draw.randrange(1, 900)  # bytes until then

            def change(piece: bytes) -> bytes:
                nonlocal remaining
                at, remaining = remaining, remaining - len(piece)
                if not 0 <= at < len(piece):
                    return piece
                changed = bytearray(piece)
                changed[at] ^= 1 << draw.randrange(8)
                return bytes(changed)

            async with listening() as (port, ears), proxy(port, change) as between:
                ear = await connected(between.port)
                sent = [b"%d" % number * 20 for number in range(6)]
                await asyncio.wait([ear.agreed, ear.over], return_when=asyncio.FIRST_COMPLETED)
                for message in sent:
                    assert ear.connection is not None
                    ear.connection.send(message)
                await whole_or_over(ear, len(sent))
                assert ear.messages == sent[: len(ear.messages)]
                if ears:
                    assert ears[0].messages == sent[: len(ears[0].messages)]
                if ear.over.done():
                    ends.add(str(ear.over.result())[:24])
        assert len(ends) > 2

    run(play)


def noise(draw: random.Random) -> bytes:
    """What a stranger may send, up to 64 KiB."""
    kind = draw.randrange(5)
    tail = draw.randbytes(draw.choice([0, 3, 60, 5000, 60_000]))
    if kind == 0:
        return tail
    if kind == 1:
        return PREAMBLE[: draw.randrange(len(PREAMBLE))]
    if kind == 2:
        return PREAMBLE + LENGTH.pack(draw.choice([0, 1, 4096, 4097, 2**31, 2**32 - 1])) + tail
    if kind == 3:
        return PREAMBLE + LENGTH.pack(len(tail) % 4096) + tail
    signed = handshake.msgspec.msgpack.encode(handshake.Signed(tail[:100], b"p" * 32))
    return PREAMBLE + LENGTH.pack(len(signed)) + signed + tail


def test_noise_ends_a_connection_and_nothing_else() -> None:
    """At an engine and at a server: a stranger's bytes, however many, however they lie about their length."""

    async def play() -> None:
        draw = random.Random(2)
        async with listening() as (port, ears):
            good = await connected(port)
            await good.agreed
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(150):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(noise(draw))
                writer.write_eof()
                try:
                    while await reader.read(2**16):
                        pass
                except ConnectionError:
                    pass
                writer.close()
            await until(lambda: all(ear.over.done() for ear in ears[1:]))
            assert not any(ear.agreed.done() for ear in ears[1:])

            async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(noise(draw))
                writer.write_eof()
                await asyncio.sleep(0.01)
                writer.close()

            stranger = await asyncio.start_server(strange, "127.0.0.1", 0)
            for _ in range(150):
                ear = await connected(stranger.sockets[0].getsockname()[1])
                await ear.over
                assert not ear.agreed.done()
            stranger.close()
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB
            assert good.connection is not None
            good.connection.send(b"still here")
            await until(lambda: good.messages == [b"still here"])

    run(play)


def test_one_who_knows_the_secret_cannot_lie_about_lengths() -> None:
    """A frame that is announced and does not come takes no memory; one that is too long is refused at once."""

    async def play() -> None:
        async with listening() as (port, ears):
            ear = await connected(port, heartbeat_s=0.6)
            agreed = await ear.agreed
            assert ear.connection is not None and ear.connection._transport is not None
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            huge = LENGTH.pack(handshake.MOST_MESSAGE_BYTES)
            tag = handshake._tag(agreed.session._send_key, agreed.session._num_sent, huge, 8)
            ear.connection._transport.write(huge + tag + bytes(1000))
            await asyncio.sleep(0.1)
            assert not ears[0].over.done()
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024
            ear.connection._transport.abort()
            await ears[0].over

            ear = await connected(port)
            session: Session = (await ear.agreed).session
            assert ear.connection is not None and ear.connection._transport is not None
            more = LENGTH.pack(handshake.MOST_MESSAGE_BYTES + 1)
            ear.connection._transport.write(more + handshake._tag(session._send_key, session._num_sent, more, 8))
            assert "are allowed" in str(await ears[1].over)

    run(play)


def test_what_a_receiver_cannot_take_ends_its_connection() -> None:
    async def play() -> None:
        async with listening() as (port, ears):
            ear = await connected(port)
            await ear.agreed

            def failing(message: bytes) -> None:
                raise ZeroDivisionError("a slip")

            ears[0].received = failing  # type: ignore[method-assign]
            assert ear.connection is not None
            ear.connection.send(b"x")
            assert "ZeroDivisionError: a slip" in str(await ears[0].over)
            await ear.over

    run(play)


def test_who_says_nothing_at_first_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.cluster.connection.HANDSHAKE_S", 0.2)

    async def play() -> None:
        async with listening() as (port, ears):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PREAMBLE)
            await until(lambda: ears and ears[0].over.done(), 2)
            assert "No handshake" in str(ears[0].over.result())
            writer.close()

    run(play)


def test_who_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, proxy: Any) -> None:
    """Before what is kept for it fills the memory."""
    monkeypatch.setattr("specserve.cluster.connection._MOST_UNSENT_BYTES", 2**20)

    async def play() -> None:
        async with listening() as (port, _), proxy(port) as frozen:
            ear = await connected(frozen.port, heartbeat_s=30.0)
            await ear.agreed
            frozen.freeze()
            assert ear.connection is not None
            for _ in range(300):
                if ear.connection.is_open:
                    ear.connection.send(bytes(2**16))
                    await asyncio.sleep(0)
            assert "takes nothing" in str(await ear.over)

    run(play)


def test_secrets_are_read_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("  0123456789abcdef\n", "utf-8")
    assert read_secret(path, "--secret-file") == b"0123456789abcdef"
    path.write_text("0123456789abcde\n", "utf-8")
    with pytest.raises(ConfigError, match=r"holds 15 characters.*at least 16") as found:
        read_secret(path, "--secret-file")
    assert "0123" not in str(found.value)
    for missing, words in ((None, "--secret-file is missing"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            read_secret(missing, "--secret-file")
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(path, "--secret-file")


def test_files_for_tls_that_cannot_be_used(certificates: Path, tmp_path: Path) -> None:
    cert, key, ca = (certificates / name for name in ("engine.pem", "engine.key", "ca.pem"))
    empty = tmp_path / "empty.pem"
    empty.write_bytes(b"")
    for make, words in (
        (lambda: engine_tls(cert, None, None), "belong together"),
        (lambda: engine_tls(None, None, ca), "--tls-ca is for TLS"),
        (lambda: engine_tls(cert, certificates / "server.key", None), "cannot be used"),
        (lambda: engine_tls(cert, key, empty), "--tls-ca .*empty.pem cannot be used"),
        (lambda: server_tls(tmp_path / "none", None, None), "--engine-ca .* cannot be used"),
        (lambda: server_tls(None, cert, key), "--engine-cert is for TLS"),
        (lambda: server_tls(ca, cert, None), "belong together"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    subprocess.run(["openssl", "ec", "-aes256", "-passout", "pass:x", "-in", key, "-out", tmp_path / "locked.key"],
                   check=True, capture_output=True)  # fmt: skip
    with pytest.raises(ConfigError, match="encrypted"):
        engine_tls(cert, tmp_path / "locked.key", None)
    assert engine_tls(None, None, None) is None and server_tls(None, None, None) is None


def test_without_tls_only_this_machine() -> None:
    check_plaintext(Address("127.0.0.1", 1), False, "--tls", "--insecure")
    check_plaintext(Address("10.0.0.1", 1), True, "--tls", "--insecure")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:1 is not a loopback address.*Give --tls, or --insecure"):
        check_plaintext(Address("10.0.0.1", 1), False, "--tls", "--insecure")
