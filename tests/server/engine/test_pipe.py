"""The socket between the two processes: whatever is sent arrives whole and in order, and nobody ever waits for it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from specserve.engine.request import Request
from specserve.errors import CapacityError, ConfigError, EngineError, ModelError, NotFetchedError, SpecserveError
from specserve.server.engine.client import LocalClient
from specserve.server.engine.messages import Failed, Gauges, ResetPrefixCache, Stepped, Stop, Wake
from specserve.server.engine.pipe import Pipe
from specserve.server.engine.process import Wire
from specserve.types import Event, SamplingParams

LARGE = 2**21  # bytes; more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[Pipe, Pipe]]:
    one, other = map(Pipe, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def heard(pipe: Pipe, other: Pipe, count: int) -> list[bytes]:
    """So many messages, while the other end goes on sending."""
    found: list[bytes] = []
    while len(found) < count:
        other.flush()
        found += pipe.receive()
    return found


@given(
    messages=st.lists(st.binary(max_size=300), min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_messages_come_whole_however_they_are_cut(messages: list[bytes], sizes: list[int]) -> None:
    ours, theirs = socket.socketpair()
    written, writing = socket.socketpair()
    with written, theirs:
        source, pipe = Pipe(writing), Pipe(ours)
        for message in messages:
            source.send(message)
        stream = written.recv(2**20)
        found: list[bytes] = []
        for size in itertools.cycle(sizes):
            if not stream:
                break
            theirs.sendall(stream[:size])
            stream = stream[size:]
            found += pipe.receive()
        source.close()
        pipe.close()
    assert found == messages


def test_what_the_other_side_does_not_take_waits(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    messages = [bytes([i]) * size for i, size in enumerate((3, LARGE, 0, LARGE, 5))]
    for message in messages:
        one.send(message)
    assert one.is_behind
    assert heard(other, one, len(messages)) == messages
    assert not one.is_behind
    assert other.receive() == [], "nothing more has come"


def test_both_sides_may_be_behind(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    for pipe in ends:
        pipe.send(b"x" * LARGE)
    assert heard(one, other, 1) == [b"x" * LARGE]
    assert heard(other, one, 1) == [b"x" * LARGE]


def test_the_end(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    one.send(b"last")
    one.close()
    assert other.receive() == [b"last"]
    for _ in range(2):
        with pytest.raises(EOFError):
            other.receive()
    other.send(b"x" * LARGE)  # to nobody
    assert not other.is_behind


def test_half_a_message_is_none() -> None:
    ours, theirs = socket.socketpair()
    pipe = Pipe(ours)
    theirs.sendall(b"\x05\x00\x00\x00half")
    assert pipe.receive() == []
    theirs.close()
    with pytest.raises(EOFError):
        pipe.receive()
    pipe.close()


def test_closing_may_send_the_rest(ends: tuple[Pipe, Pipe]) -> None:
    one, other = ends
    one.send(b"x" * LARGE)
    closing = threading.Thread(target=one.close, args=(60.0,))
    closing.start()
    found: list[bytes] = []
    with pytest.raises(EOFError):
        while True:
            found += other.receive()
    closing.join()
    assert found == [b"x" * LARGE]


def test_closing_waits_no_longer_than_it_may(ends: tuple[Pipe, Pipe]) -> None:
    one, _ = ends
    one.send(b"x" * LARGE)
    begun = time.monotonic()
    one.close(wait_s=0.05)
    assert time.monotonic() - begun < 5


def test_an_engine_stops_with_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(theirs)
    assert wire.commands(0) == []
    ours.close()
    assert wire.commands(60_000) == [Stop()]
    with pytest.raises(SystemExit):
        wire.configuration()
    wire.send(Failed("nobody hears this"))
    wire.close()


class Silent:
    """An observer that ignores everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_commands_that_an_engine_does_not_read_yet() -> None:
    """It is told all of them, in order, once it reads; meanwhile the event loop goes on."""

    async def play() -> None:
        ours, theirs = socket.socketpair()
        client = LocalClient(ours, Silent())
        client.configure({"text": "x" * LARGE})
        for _ in range(100):
            client.reset_prefix_cache()
        await asyncio.sleep(0.05)
        wire = Wire(theirs)
        assert (await asyncio.to_thread(wire.configuration)).options["text"] == "x" * LARGE
        found: list[Any] = []
        async with asyncio.timeout(60):
            while len(found) < 100:
                found += await asyncio.to_thread(wire.commands, 100)
        client.close()
        wire.close()
        assert found == [ResetPrefixCache()] * 100

    asyncio.run(play())


def test_an_engine_that_rests_is_told_of_what_is_about_to_come() -> None:
    """One that works is awake."""

    async def play() -> None:
        ours, theirs = socket.socketpair()
        client, wire = LocalClient(ours, Silent()), Wire(theirs)
        client.wake_engine()
        assert wire.commands(0) == [Wake()]
        request = Request(id="7", prompt_ids=[1], params=SamplingParams())
        client.submit(request, [].append)
        client.wake_engine()
        assert [type(command).__name__ for command in wire.commands(0)] == ["Request"]
        client.abort("7")
        client.wake_engine()
        assert [type(command).__name__ for command in wire.commands(0)] == ["Abort", "Wake"]
        client.close()
        wire.close()

    asyncio.run(play())


def test_what_is_left_behind_by_an_engine_that_has_gone() -> None:
    """Its last words are heard after its socket is closed. What they lead to, as a stop string does, reaches nobody."""

    async def play() -> None:
        ours, theirs = socket.socketpair()
        client, wire = LocalClient(ours, Silent()), Wire(theirs)
        request = Request(id="7", prompt_ids=[1], params=SamplingParams())
        client.submit(request, [].append)
        client.abort("7", 0)
        assert [type(command).__name__ for command in wire.commands(0)] == ["Request", "Abort"]
        client.fail(EngineError("gone"))
        client.close()
        client.abort("7", 0)
        client.abort("7")
        client.expire("7")
        assert wire.commands(0) == [Stop()]
        wire.close()

    asyncio.run(play())


def test_a_listener_that_raises_costs_nobody_an_event() -> None:
    async def play() -> None:
        ours, theirs = socket.socketpair()
        client, wire = LocalClient(ours, Silent()), Wire(theirs)
        got: list[Any] = []
        for name, listener in (("0", lambda _: 1 // 0), ("1", got.append)):
            client.submit(Request(id=name, prompt_ids=[1], params=SamplingParams()), listener)
        events = [Event(name, 0, [5]) for name in "01"]
        wire.send(Stepped(events, Gauges(*[0] * 11, {}, {})))
        async with asyncio.timeout(60):
            while not client.is_broken:
                await asyncio.sleep(0.01)
        client.close()
        wire.close()
        assert got == events[1:]

    asyncio.run(play())


def test_a_request_that_cannot_be_sent_is_not_waited_for() -> None:
    """An engine with an open request that makes no progress would be taken for one that hangs."""

    async def play() -> None:
        ours, theirs = socket.socketpair()
        client, wire = LocalClient(ours, Silent()), Wire(theirs)
        with pytest.raises(OverflowError):
            client.submit(Request(id="7", prompt_ids=[2**64], params=SamplingParams()), [].append)
        assert client.num_open == 0
        client.close()
        wire.close()

    asyncio.run(play())


def test_bytes_that_are_no_report() -> None:
    """What came before them was heard; from then on nothing is."""

    async def play() -> None:
        ours, theirs = socket.socketpair()
        client, other = LocalClient(ours, Silent()), Pipe(theirs)
        other.send(msgspec.msgpack.encode(Failed("first")))
        other.send(b"\xc1")
        other.send(msgspec.msgpack.encode(Failed("second")))
        async with asyncio.timeout(60):
            while not client.is_broken:
                await asyncio.sleep(0.01)
        assert client.failure == Failed("first")
        client.close()
        other.close()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ConfigError("c"), ConfigError),
        (NotFetchedError("n"), ModelError),
        (CapacityError("c"), CapacityError),
        (EngineError("e"), None),
    ],
)
def test_what_ends_all_starts_is_known_to_the_other_side(error: SpecserveError, final: type[Exception] | None) -> None:
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(Failed.of(error)), type=Failed)
    assert told.message == str(error)
    assert final is (None if told.error() is None else type(told.error()))
