"""`specserve serve` as a process of its own: starts and stops it, and looks at it from outside: its processes in /proc,
its figures in /stats. Sends no load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from client import Client

START_S = 900.0
END_S = 60.0  # a server that was asked to end is killed after so long
_REST_S = 1.0
_REST_SHARE = 0.03  # of a core: what looking after an idle engine takes
LOG_TAIL = 30  # lines of the log that a failure is quoted with
_LISTENING = re.compile(r"Listening on (http://\S+?);")
_ENGINE = "specserve.server.engine.process"  # the module in the engine's command line
_WORKERS = ("specserve.structured.worker", "specserve.text.worker")


class ServerError(Exception):
    """The server did not start, or has ended. The message quotes its log."""


@dataclass
class Served:
    """A server that runs, and a client of its own for figures. `spawned` is time.perf_counter() before the process was
    started, `ready_s` the seconds from there to the first 200 from /health."""

    process: asyncio.subprocess.Process
    log: Path
    spawned: float
    url: str = ""
    ready_s: float = 0.0
    client: Client = field(init=False)

    def session(self, keepalive: bool = True) -> aiohttp.ClientSession:
        """Connections as many as are asked for; without `keepalive` each request has one of its own."""
        connector = aiohttp.TCPConnector(limit=0, force_close=not keepalive)
        return aiohttp.ClientSession(self.url, connector=connector, timeout=aiohttp.ClientTimeout())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def engine_pid(self) -> int | None:
        """The engine's process, while there is one that is no zombie."""
        found = [pid for pid in children(self.pid) if _ENGINE in command_line(pid)]
        assert len(found) <= 1, "a server has one engine at a time"
        return found[0] if found else None

    @property
    def strays(self) -> list[int]:
        """Its children that are neither the engine nor workers for grammars and conversations."""
        known = (_ENGINE, *_WORKERS)
        return [pid for pid in children(self.pid) if not any(name in command_line(pid) for name in known)]

    def require_engine(self) -> int:
        """The engine's process. Raises ServerError when there is none."""
        engine = self.engine_pid
        if engine is None:
            raise ServerError(f"There is no engine. {self.said()}")
        return engine

    def orphans(self) -> list[int]:
        """Engines that name it as the process that has started them, whether it still runs or not."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        lines = {pid: command_line(pid).rstrip("\0").split("\0") for pid in pids if is_alive(pid)}
        return [pid for pid, words in lines.items() if _ENGINE in words and words[-1] == str(self.pid)]

    async def stats(self) -> dict[str, Any]:
        return await self.client.get("/stats")

    async def is_healthy(self) -> bool:
        return await self.client.status("/health") == 200

    async def until_healthy(self, seconds: float = START_S, look_s: float = 0.02) -> None:
        """Raises ServerError when it takes longer, or the server has ended."""
        end = time.monotonic() + seconds
        while not await self.is_healthy():
            self.require_alive()
            if time.monotonic() > end:
                raise ServerError(f"The server was not healthy within {seconds:.0f} s. {self.said()}")
            await asyncio.sleep(look_s)

    async def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any] | None:
        """The first /stats that fulfil a condition; None if none do in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.require_alive()
            stats = await self.stats()
            if condition(stats):
                return stats
            await asyncio.sleep(0.05)
        return None

    async def until_idle(self, seconds: float = 60.0) -> str | None:
        """Wait until nothing runs or waits and every block is free; what is left over if that does not come about.
        Only after a request: an engine that has made no step has told of no blocks."""
        if await self.until(_is_idle, seconds) is not None:
            return None
        stats = await self.stats()
        blocks = stats["kv_cache"]
        return (
            f"{stats['num_running']} running, {stats['num_waiting']} waiting, {blocks['num_free_blocks']} of "
            f"{blocks['num_blocks']} blocks free"
        )

    async def at_rest(self, seconds: float = 60.0) -> None:
        """Wait until it does nothing any more: a server that is ready still gets itself ready for constraints, which
        takes a core for a second or two. Raises ServerError when that does not end."""
        end = time.monotonic() + seconds
        used = self._processor_s()
        while time.monotonic() < end:
            await asyncio.sleep(_REST_S)
            before, used = used, self._processor_s()
            if used - before < _REST_SHARE * _REST_S:
                return
        raise ServerError(f"The server did not come to rest within {seconds:.0f} s. {self.said()}")

    def _processor_s(self) -> float:
        """Seconds of processor time that its processes have used."""
        return sum(map(processor_s, [self.pid, *children(self.pid)]))

    def require_alive(self) -> None:
        if self.process.returncode is not None:
            raise ServerError(f"The server has ended with status {self.process.returncode}. {self.said()}")

    def said(self) -> str:
        """The end of its log, for an error's text."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        tail = [line for line in lines if " GET /health " not in line][-LOG_TAIL:]  # those are our own looks
        return "The end of its log:\n" + "\n".join(f"  {line}" for line in tail)

    def descriptors(self) -> dict[str, int]:
        """Open descriptors of both processes."""
        return {name: num_descriptors(pid) for name, pid in self.processes().items()}

    def rss(self) -> dict[str, int]:
        """Resident bytes of both processes."""
        return {name: rss_bytes(pid) for name, pid in self.processes().items()}

    def processes(self) -> dict[str, int]:
        engine = self.engine_pid
        return {"API": self.pid} | ({} if engine is None else {"engine": engine})

    async def descriptors_within(self, most: Mapping[str, int], seconds: float = 20.0) -> dict[str, int]:
        """Descriptors once no process has more than `most`, or after so many seconds: closing takes a moment."""
        end = time.monotonic() + seconds
        while (now := self.descriptors()) and time.monotonic() < end:
            if all(count <= most[name] for name, count in now.items()):
                break
            await asyncio.sleep(0.1)
        return now

    async def end(self) -> int:
        """SIGTERM, and the exit status; -9 for one that had to be killed."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), END_S)
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


def _is_idle(stats: dict[str, Any]) -> bool:
    blocks = stats["kv_cache"]
    busy = stats["num_running"] or stats["num_waiting"]
    return stats["state"] == "ready" and not busy and blocks["num_free_blocks"] == blocks["num_blocks"] > 0


@asynccontextmanager
async def serving(
    model: str, options: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> AsyncIterator[Served]:
    """A server of `model` that is ready; ended afterwards. `options` are written as on the command line; `defaults` are
    for those that they do not name. Requests may have priorities: a canary has one. Raises ServerError."""
    defaults = {"scheduling-policy": "priority", **(defaults or {})}
    with tempfile.TemporaryDirectory(prefix="specserve-benchmark-") as folder:
        served = await _spawn(model, _merged(options, defaults), Path(folder) / "server.log")
        try:
            served.url = await _address(served)
            async with served.session() as session:
                served.client = Client(session)
                await served.until_healthy()
                served.ready_s = time.perf_counter() - served.spawned
                yield served
        finally:
            await served.end()


async def _spawn(model: str, options: Sequence[str], log: Path) -> Served:
    command = [sys.executable, "-m", "specserve", "serve", model, "--port=0", "--status-interval-s=0", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as stream:
        spawned = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*command, stdout=stream, stderr=stream, env=environment)
    return Served(process, log, spawned)


async def _address(served: Served) -> str:
    """Where it listens, once it says so."""
    end = time.monotonic() + START_S
    while (said := _LISTENING.search(served.log.read_text("utf-8", errors="replace"))) is None:
        served.require_alive()
        if time.monotonic() > end:
            raise ServerError(f"The server did not listen within {START_S:.0f} s. {served.said()}")
        await asyncio.sleep(0.01)
    return said[1]


def _merged(options: Sequence[str], defaults: Mapping[str, Any]) -> list[str]:
    """The options, and those of the defaults that they do not name."""
    named = {word.partition("=")[0].removeprefix("--").removeprefix("no-") for word in options if word.startswith("--")}
    return [*options, *(_written(name, value) for name, value in defaults.items() if name not in named)]


def _written(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the processes: after which share of the run, and resident bytes of each."""

    progress: float
    rss: dict[str, int]


class Sampler:
    """Looks at the processes' memory every so often while its block runs. `progress` says how much of the run, from 0
    to 1, has passed."""

    def __init__(self, served: Served, progress: Callable[[], float], interval_s: float = 0.1) -> None:
        self.samples: list[Sample] = []
        self._served, self._progress, self._interval_s = served, progress, interval_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sampler:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None, "left without being entered"
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._look()

    def growth(self, name: str, start: float = 0.2) -> float | None:
        """By how much of what it was a process's memory has grown from `start` to the end of the run; None for a run
        with no sample near one of them. Medians over a tenth of the run, so that one sample means little."""
        early = [s.rss[name] for s in self.samples if start <= s.progress < start + 0.1 and name in s.rss]
        late = [s.rss[name] for s in self.samples if s.progress >= 0.9 and name in s.rss]
        if not early or not late:
            return None
        return sorted(late)[len(late) // 2] / sorted(early)[len(early) // 2] - 1

    def highest(self, name: str) -> int:
        return max(sample.rss[name] for sample in self.samples if name in sample.rss)

    async def _run(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(self._interval_s)

    def _look(self) -> None:
        with suppress(FileNotFoundError, ProcessLookupError):  # a process ended between two files
            self.samples.append(Sample(self._progress(), self._served.rss()))


def children(pid: int) -> list[int]:
    """Processes that this one started and that have not ended."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += map(int, tasks.read_text("utf-8").split())
    return [child for child in found if is_alive(child)]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and no mere zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_line(pid: int) -> str:
    """Its words, each ended by a zero byte; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def processor_s(pid: int) -> float:
    """Seconds that all its threads have run; 0 for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    """Resident bytes, pages of mapped files included."""
    status = Path(f"/proc/{pid}/status").read_text("utf-8", errors="replace")
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0
