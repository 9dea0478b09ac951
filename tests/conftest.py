"""Fixtures that several test folders share."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import os
import selectors
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None, max_examples=50)  # no limit to one: machines pause
settings.register_profile("thorough", deadline=None, max_examples=1000)  # --hypothesis-profile=thorough: for a night
# --hypothesis-profile=repeated: for a second run of tests, which looks for what depends on instructions or memory.
settings.register_profile("repeated", deadline=None, max_examples=10)
settings.load_profile("patient")

SLOW = Path(__file__).with_name("slow.txt")
_HTTP = "tests/server/http"

# Before anything imports triton: without a GPU its kernels are interpreted.
if not any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before anything imports torch. Where as many processes as cores run tests, threads of one would wait for those of
# another: tests that are about threads say how many. Whoever sets these variables has the last word, but the process
# that starts the others is not who: they inherit what it has set for itself.
_OURS = "SPECSERVE_TESTS_CHOSE"
for name in ("OMP_NUM_THREADS", "SPECSERVE_THREADS"):
    chosen = os.environ.get(_OURS, "").split()
    if name not in os.environ or name in chosen:
        os.environ[name] = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
        os.environ[_OURS] = " ".join([*chosen, name])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds",
        type=int,
        default=1,
        help="how often tests that kill, stop or cut off processes do so, one round after the other: 50 for a night",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run all combinations of parameters, where `make test` runs as many as bring up each value",
    )

    parser.addoption(
        "--share",
        type=_share,
        metavar="I/N",
        help="of the slow tests, those of tests/slow.txt, run every Nth from number I on, counted from 0; `make test` "
        "runs another share each day",
    )


def _share(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: I/N, with I from 0 to N - 1.")
    return int(number), int(of)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --thorough, what the markers each_choice and thorough leave out is not run; with --share, most of what is
    slow is not either."""
    left_out: list[pytest.Item] = []
    if not config.getoption("thorough"):
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out += itertools.chain.from_iterable(_left_out(group) for group in by_test.values())
    if (share := config.getoption("share")) is not None:
        others = set(map(id, left_out))
        names = set(SLOW.read_text("utf-8").split())
        slow = [item for item in items if id(item) not in others and not names.isdisjoint(_names(item))]
        left_out += [item for i, item in enumerate(slow) if i % share[1] != share[0]]
    config.hook.pytest_deselected(items=left_out)
    ids = set(map(id, left_out))
    items[:] = [item for item in items if id(item) not in ids]


def _names(item: pytest.Item) -> tuple[str, str]:
    """Its file's, and its test's without parameters."""
    test = item.nodeid.partition("[")[0]
    return test.partition("::")[0], test


def _left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of one test's. Rounds of its longest axis each meet the other axes' values in another order."""
    found = [item for item in items if item.get_closest_marker("thorough")]
    if (marker := items[0].get_closest_marker("each_choice")) is None:
        return found
    ids: list[list[str]] = [item.callspec._idlist for item in items]  # type: ignore[attr-defined]
    values = sorted((list(dict.fromkeys(axis)) for axis in zip(*ids, strict=True)), key=len, reverse=True)
    num, kept = len(values[0]), set()
    for turn, i in itertools.product(range(marker.kwargs.get("rounds", 1)), range(num)):
        stride, chosen = 1, [values[0][i]]
        for axis in values[1:]:
            chosen.append(axis[(i // stride + turn) % len(axis)])
            stride *= len(axis)
        kept.add(frozenset(chosen))
    runs = [frozenset(own) in kept for own in ids]
    missed = {each for axis in values for each in axis} - {
        each for own, is_run in zip(ids, runs, strict=True) if is_run for each in own
    }
    if missed:
        raise pytest.UsageError(f"{items[0].nodeid}: each_choice needs more rounds to bring up {sorted(missed)}.")
    return [*found, *(item for item, is_run in zip(items, runs, strict=True) if not is_run)]


@pytest.fixture(scope="session")
def num_rounds(pytestconfig: pytest.Config) -> int:
    """How often whatever is killed, stopped or cut off is; what is held afterwards is what was held before."""
    rounds: int = pytestconfig.getoption("rounds")
    assert rounds >= 1, f"--rounds is {rounds}; it must be at least 1."
    return rounds


def pytest_collection_finish() -> None:
    """What was loaded to collect the tests stays, so collections of garbage need not walk over it again and again: they
    took more than a tenth of all processor time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # objects, in place of Python's 700


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share a process, and so do all that share servers over HTTP: each process would start all of
    these."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return _HTTP if file.startswith(_HTTP) else file

    return ByServers(config, log)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the real default model. Skips when it was not pulled; with SPECSERVE_REQUIRE_MODEL=1 that fails."""
    from specserve.checkpoint import catalog
    from specserve.errors import ModelError

    try:
        return catalog.resolve("smollm2-135m", offline=True)
    except ModelError as error:
        if os.environ.get("SPECSERVE_REQUIRE_MODEL") == "1":
            pytest.fail(f"SPECSERVE_REQUIRE_MODEL=1, but: {error}")
        pytest.skip(f"The real model is not here: {error}")


@pytest.fixture(scope="session")
def smollm2_safetensors(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real default model as other programs read it."""
    from specserve.checkpoint import catalog

    return catalog.as_safetensors(smollm2, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """What `specserve serve` sets up in this process goes with its test: its stream is closed after it."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in [each for each in root.handlers if type(each) is logging.StreamHandler]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an installation without compiled kernels: what is built from now on runs on the reference."""
    monkeypatch.setitem(sys.modules, "specserve.kernels._native", None)  # what is None there cannot be imported
    monkeypatch.delitem(sys.modules, "specserve.kernels.cpu", raising=False)


class VirtualSelector(selectors.DefaultSelector):
    """Where a selector would wait for a time, it moves a clock instead, once nothing is under way on any socket."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        found = super().select(0.002 if timeout is not None else None)
        if not found and timeout is not None:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping takes no time: a client and a server on sockets in one loop have exact times."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


@pytest.fixture
def in_virtual_time() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine like asyncio.run, on a VirtualLoop."""

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)

    return run


class Proxy:
    """A way to a port that can be stopped up, and changes bytes on the way where it is told to."""

    def __init__(self, target: int, change: Callable[[bytes], bytes] = lambda piece: piece) -> None:
        self._target, self._change = target, change
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    def freeze(self) -> None:
        self._thawed.clear()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        self.cut()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, back]
        for pair in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._carry(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(2**16):
                await self._thawed.wait()
                writer.write(self._change(piece))
            writer.close()
        except ConnectionError:
            writer.transport.abort()


@pytest.fixture
def proxy() -> type[Proxy]:
    """The class; an async context manager."""
    return Proxy
