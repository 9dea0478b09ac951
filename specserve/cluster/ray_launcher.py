"""Starts engines on the nodes of a Ray cluster, by way of a process that speaks to Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from contextlib import suppress

import msgspec

from specserve.cluster.launcher import AUTO, End, Lost, News, Order, Plan, Start, Unusable
from specserve.errors import ConfigError
from specserve.machine.lifeline import without_interrupts
from specserve.parallel.address import Address

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_END_S = 10.0  # that the process gets to end all engines
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class RayLauncher:
    """An EngineLauncher. Where Ray's head is lost all engines are, and they are started again once there is one.

    Its engines belong to a job of Ray that ends with the process that speaks to Ray, and that ends with this process:
    whatever happens here, Ray ends them.
    """

    def __init__(self, plan: Plan) -> None:
        """Raises ConfigError where Ray is not installed, and for an address that belongs to Ray's client."""
        check(plan.cluster)
        self._plan = plan
        self._wanted: set[int] = set()  # numbers that were started
        self._news: asyncio.Queue[News | ConfigError] = asyncio.Queue()
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._talk: asyncio.Task[None] | None = None
        self._was_usable = False
        self._keeper = asyncio.create_task(self._keep())

    def start(self, number: int) -> None:
        self._wanted.add(number)
        self._say(Start(number))

    def end(self, number: int) -> None:
        self._wanted.discard(number)
        self._say(End(number))

    async def news(self) -> News:
        """What has happened next. Raises ConfigError for a cluster that cannot be used from the start on."""
        found = await self._news.get()
        if isinstance(found, ConfigError):
            raise found
        return found

    async def close(self) -> None:
        """End all engines, and give back what was kept for them."""
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        await self._end()

    async def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while True:
            begun = asyncio.get_running_loop().time()
            try:
                cause = await self._listen(await self._begin())
            except OSError as error:  # no descriptors, no memory
                cause = f"The process that speaks to Ray cannot be started: {error}."
            await self._fail(cause)
            pause = _FIRST_PAUSE_S if asyncio.get_running_loop().time() - begun > _LONGEST_PAUSE_S else 2 * pause
            await asyncio.sleep(min(pause, _LONGEST_PAUSE_S))

    async def _listen(self, reader: asyncio.StreamReader) -> str:
        """Hear what there is as long as there is any; why there is none any more."""
        while line := await reader.readline():
            news = msgspec.json.decode(line, type=News)
            if isinstance(news, Unusable):
                return news.cause
            self._was_usable = True
            self._news.put_nowait(news)
        return "The process that speaks to Ray has ended."

    async def _begin(self) -> asyncio.StreamReader:
        """Start the process, and tell it what there is to do."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "specserve.cluster.ray_driver", str(theirs.fileno()), str(os.getpid())]
            with without_interrupts():
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, pass_fds=[theirs.fileno()]
                )
        self._talk = asyncio.create_task(_log_lines(self._process))
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(msgspec.json.encode(self._plan) + b"\n")
        for number in sorted(self._wanted):
            self._say(Start(number))
        return reader

    async def _fail(self, cause: str) -> None:
        """Ray cannot be spoken to: an error for a server that never could, else all engines are lost for now."""
        await self._end()
        if not self._was_usable:
            where = f"--ray-address {self._plan.cluster}"
            self._news.put_nowait(
                ConfigError(
                    f"{where}: the Ray cluster cannot be used: {cause} Start one with `ray start --head`, or name one "
                    "that runs as HOST:PORT."
                )
            )
            await asyncio.Event().wait()  # what raised it closes this
        _log.error("The Ray cluster cannot be reached: %s Engines are started again when it can.", cause)
        for number in sorted(self._wanted):
            self._news.put_nowait(Lost(number, cause))

    async def _end(self) -> None:
        """The process ends its engines once nobody says anything to it any more."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._process is not None:
            try:
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._talk is not None:
            await self._talk

    def _say(self, order: Order) -> None:
        if self._writer is not None:
            self._writer.write(msgspec.json.encode(order) + b"\n")


def check(address: str) -> None:
    """Raises ConfigError where engines cannot be started on Ray from here."""
    absent = [name for name in ("ray", "cryptography") if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(f"--backend ray: {absent[0]} is not installed. Install it: pip install 'specserve[ray]'.")
    if "://" in address:
        raise ConfigError(
            f"--ray-address is {address}: a server joins the cluster itself and needs the address of its head as "
            "HOST:PORT, or auto for the cluster that this machine belongs to."
        )
    if address != AUTO:
        Address.parse(address, "--ray-address")


async def _log_lines(process: asyncio.subprocess.Process) -> None:
    """What Ray says to people who use it."""
    assert process.stdout is not None, "it is a pipe"
    while not process.stdout.at_eof():
        with suppress(ValueError):  # a line that is too long to be for people
            line = await process.stdout.readline()
            if text := _COLOR.sub("", line.decode("utf-8", "replace")).strip():
                _log.info("Ray: %s", text)
