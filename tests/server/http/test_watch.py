"""Connections that are ended for what they do not do, on a clock of our own; and Unix sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from specserve.errors import ConfigError
from specserve.server.http.listen import Listener
from specserve.server.http.watch import Watch
from specserve.server.options import ServeOptions


@dataclass
class Transport:
    waiting: int = 0
    connection: socket.socket | None = None
    aborted: bool = False

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def get_extra_info(self, name: str) -> socket.socket | None:
        assert name == "socket"
        return self.connection

    def abort(self) -> None:
        self.aborted = True


@dataclass(eq=False)
class Connection:
    transport: Transport = field(default_factory=Transport)
    closed: bool = False

    def force_close(self) -> None:
        self.closed = True


class Play:
    """A watch with 10 s for a head and 30 s for a write, looked at once a second."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watch = Watch(10, 30, lambda: self.now)

    def run(self, seconds: int, *connections: Any) -> None:
        for _ in range(seconds):
            self.watch.look(connections)
            self.now += 1


def test_who_says_nothing_is_left() -> None:
    play, silent, asking = Play(), Connection(), Connection()
    play.run(5, silent, asking)
    play.watch.note_head(asking)  # type: ignore[arg-type]
    play.run(6, silent, asking)
    assert not silent.closed
    play.run(1, silent, asking)
    assert (silent.closed, asking.closed) == (True, False)
    play.run(1000, asking)
    assert not asking.closed, "one that has asked may think"


def test_who_comes_later_has_as_long() -> None:
    play, early, late = Play(), Connection(), Connection()
    play.run(8, early)
    play.run(4, early, late)
    assert (early.closed, late.closed) == (True, False)
    play.run(8, late)
    assert late.closed


def test_who_asks_between_two_looks_is_known() -> None:
    play, quick = Play(), Connection()
    play.watch.note_head(quick)  # type: ignore[arg-type]
    play.run(50, quick)
    assert not quick.closed


def test_who_does_not_read_is_cut() -> None:
    play, reader, still = Play(), Connection(), Connection()
    for each in (reader, still):
        play.watch.note_head(each)  # type: ignore[arg-type]
        each.transport.waiting = 1000
    for step in range(31):
        reader.transport.waiting = 1000 - step
        play.run(1, reader, still)
    assert not still.transport.aborted
    play.run(1, reader, still)
    assert (reader.transport.aborted, still.transport.aborted) == (False, True)


def test_who_takes_what_the_kernel_holds_is_not_cut() -> None:
    """The kernel holds megabytes for a slow reader, and takes no more from here until much of that is gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(100))
        play, each = Play(), Connection(Transport(1000, ours))
        play.watch.note_head(each)  # type: ignore[arg-type]
        for _ in range(50):
            theirs.recv(200)
            play.run(2, each)
        assert not each.transport.aborted
        play.run(31, each)
        assert each.transport.aborted


def test_what_waited_and_was_taken_does_not_count() -> None:
    play, each = Play(), Connection()
    play.watch.note_head(each)  # type: ignore[arg-type]
    for waiting in (1000, 0, 1000, 0, 1000):
        each.transport.waiting = waiting
        play.run(20, each)
    assert not each.transport.aborted


def test_who_has_gone_is_forgotten() -> None:
    play, each = Play(), Connection()
    play.watch.note_head(each)  # type: ignore[arg-type]
    each.transport.waiting = 1
    play.run(3, each)
    play.run(1)
    assert not play.watch._heads
    assert not play.watch._silent
    assert not play.watch._unread


# --- sockets ----------------------------------------------------------------------------------------------------------


async def nothing(request: web.Request) -> web.Response:
    return web.Response(status=204)


def listener(path: Path) -> Listener:
    app = web.Application()
    app.add_routes([web.get("/nothing", nothing)])
    return Listener(app, ServeOptions(uds=path))


def test_a_unix_socket_is_its_owners_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"

    async def play() -> None:
        first = listener(path)
        await first.start()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert first.address == f"unix:{path}"
        second = listener(path)
        with pytest.raises(ConfigError, match="another server listens on it"):
            await second.start()
        await second.close()
        assert path.is_socket(), "it is the first one's"
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 204")
        writer.close()
        await first.close()
        assert not path.exists()

    asyncio.run(play())


def test_a_unix_socket_is_never_anybody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can connect between the moment that it is there and one in which its mode would be changed."""
    path = tmp_path / "server.sock"
    monkeypatch.setattr(Path, "chmod", lambda *arguments: None)
    monkeypatch.setattr(os, "chmod", lambda *arguments: None)
    before = os.umask(0)

    async def play() -> None:
        listening = listener(path)
        await listening.start()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await listening.close()

    try:
        asyncio.run(play())
        assert os.umask(0) == 0, "what else this process makes has the mode that it had"
    finally:
        os.umask(before)


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    async def play() -> None:
        listening = listener(tmp_path / ("x" * 200))
        with pytest.raises(ConfigError, match="too long"):
            await listening.start()
        await listening.close()

    asyncio.run(play())


def test_a_socket_that_was_left_is_taken(tmp_path: Path) -> None:
    """By a server that was killed, for one."""
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    async def play() -> None:
        again = listener(path)
        await again.start()
        await again.close()

    asyncio.run(play())
    assert not path.exists()


def test_a_file_is_no_socket(tmp_path: Path) -> None:
    """What lies at the path stays there, whatever it is."""
    path = tmp_path / "notes"
    path.write_text("mine", "utf-8")

    async def play() -> None:
        listening = listener(path)
        with pytest.raises(ConfigError, match="--uds"):
            await listening.start()
        await listening.close()

    asyncio.run(play())
    assert path.read_text("utf-8") == "mine"
