"""Engines that a launcher starts: the group joins those that are there, and as many are there as the load needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from specserve.cluster.autoscaling import Scaling
from specserve.cluster.launcher import Joined, Listening, Lost, News, Waiting
from specserve.cluster.router import Load
from specserve.errors import ConfigError, ModelError
from specserve.server.engine.launched import Launched

IDLE, BUSY = Load(num_open=0, step_ms=10), Load(num_open=400, step_ms=10)


class Launcher:
    """Does what it is told and tells nothing by itself."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, int]] = []
        self.coming: asyncio.Queue[News | Exception] = asyncio.Queue()
        self.is_closed = False

    def start(self, number: int) -> None:
        self.orders.append(("start", number))

    def end(self, number: int) -> None:
        self.orders.append(("end", number))

    async def news(self) -> News:
        found = await self.coming.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        self.is_closed = True


class Group:
    """Takes note. Engines drain once `drained` is set."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.calls: list[tuple[str, str, float]] = []
        self.drained = asyncio.Event()

    def add_engine(self, address: str) -> None:
        self.calls.append(("add", address, 0))
        self.loads[address] = IDLE

    async def remove_engine(self, address: str, drain_s: float = 0.0) -> None:
        self.calls.append(("remove", address, drain_s))
        self.loads.pop(address, None)
        if drain_s:
            await self.drained.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    least: int, most: int | None = None, down_s: float = 0.02
) -> AsyncIterator[tuple[Launcher, Group, asyncio.Task[None]]]:
    launcher, group = Launcher(), Group()
    scaling = Scaling(least, most or least, target_ms=1000, up_s=0.02, down_s=down_s)
    task = asyncio.create_task(Launched(lambda: launcher, scaling, look_s=0.005)(group))
    try:
        await until(lambda: len(launcher.orders) >= least)
        yield launcher, group, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert launcher.is_closed
        assert asyncio.all_tasks() == {asyncio.current_task()}


def test_the_group_joins_engines_where_they_listen() -> None:
    async def live() -> None:
        async with running(2) as (launcher, group, _):
            assert launcher.orders == [("start", 0), ("start", 1)]
            for news in (Joined("head:1", 2), Listening(1, "b:1"), Listening(0, "a:1")):
                launcher.coming.put_nowait(news)
            await until(lambda: set(group.loads) == {"a:1", "b:1"})

    asyncio.run(live())


def test_an_engine_that_comes_back_elsewhere_takes_the_place_of_the_old_one(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        async with running(1) as (launcher, group, _):
            for news in (Listening(0, "a:1"), Lost(0, "The node is gone."), Listening(0, "b:1"), Listening(0, "b:1")):
                launcher.coming.put_nowait(news)
            await until(lambda: len(group.calls) >= 3 and launcher.coming.empty())
            assert group.calls == [("add", "a:1", 0), ("remove", "a:1", 0), ("add", "b:1", 0)]

    asyncio.run(live())
    assert "The node is gone." in caplog.text


def test_an_engine_may_get_the_address_of_one_that_is_lost() -> None:
    async def live() -> None:
        async with running(2) as (launcher, group, _):
            for news in (Listening(0, "a:1"), Listening(1, "a:2"), Lost(1, "It is gone."), Listening(0, "a:2")):
                launcher.coming.put_nowait(news)
            await until(lambda: set(group.loads) == {"a:2"})
            launcher.coming.put_nowait(Listening(1, "a:3"))
            await until(lambda: set(group.loads) == {"a:2", "a:3"})
            assert [call[:2] for call in group.calls] == [
                ("add", "a:1"), ("add", "a:2"), ("remove", "a:1"), ("add", "a:3"),
            ]  # fmt: skip

    asyncio.run(live())


def test_there_are_more_engines_while_requests_wait_and_fewer_once_they_have_ended() -> None:
    async def live() -> None:
        async with running(1, 3) as (launcher, group, _):
            launcher.coming.put_nowait(Listening(0, "a:1"))
            await until(lambda: "a:1" in group.loads)
            group.loads["a:1"] = Load(num_open=150, step_ms=10)
            await until(lambda: ("start", 1) in launcher.orders)
            launcher.coming.put_nowait(Listening(1, "b:1"))
            await until(lambda: "b:1" in group.loads)
            assert launcher.orders == [("start", 0), ("start", 1)]
            group.loads["a:1"] = Load(num_open=1, step_ms=10)
            await until(lambda: "b:1" not in group.loads)  # the one that has nothing to do
            assert ("end", 1) not in launcher.orders  # it drains
            group.drained.set()
            await until(lambda: ("end", 1) in launcher.orders)

    asyncio.run(live())


def test_a_number_that_drains_is_not_given_again() -> None:
    async def live() -> None:
        async with running(1, 2) as (launcher, group, _):
            launcher.coming.put_nowait(Listening(0, "a:1"))
            await until(lambda: "a:1" in group.loads)
            group.loads["a:1"] = BUSY
            await until(lambda: ("start", 1) in launcher.orders)
            launcher.coming.put_nowait(Listening(1, "b:1"))
            await until(lambda: "b:1" in group.loads)
            group.loads["a:1"] = IDLE
            await until(lambda: len(group.loads) == 1)
            (left,) = group.loads
            group.loads[left] = BUSY
            await until(lambda: ("start", 2) in launcher.orders)

    asyncio.run(live())


def test_an_engine_that_has_no_room_is_not_needed_any_more_before_others(caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        async with running(1, 2) as (launcher, group, _):
            launcher.coming.put_nowait(Listening(0, "a:1"))
            await until(lambda: "a:1" in group.loads)
            group.loads["a:1"] = BUSY
            await until(lambda: ("start", 1) in launcher.orders)
            launcher.coming.put_nowait(Waiting(1, "It needs 4 CPUs."))
            group.loads["a:1"] = IDLE
            await until(lambda: ("end", 1) in launcher.orders)
            launcher.coming.put_nowait(Listening(1, "b:1"))  # too late
            await until(launcher.coming.empty)
            assert set(group.loads) == {"a:1"}

    asyncio.run(live())
    assert "It needs 4 CPUs." in caplog.text


def test_a_cluster_that_cannot_be_used_ends_it() -> None:
    async def live() -> None:
        async with running(1) as (launcher, _, task):
            launcher.coming.put_nowait(ConfigError("No cluster."))
            with pytest.raises(ConfigError, match="No cluster"):
                await task

    asyncio.run(live())


@pytest.mark.parametrize("others", [True, False])
def test_starts_that_fail_for_good_end_it_unless_others_take_requests(others: bool) -> None:
    async def live() -> None:
        async with running(2) as (launcher, group, task):
            if others:
                launcher.coming.put_nowait(Listening(0, "a:1"))
            launcher.coming.put_nowait(Lost(1, "There is no model.", "ModelError"))
            if others:
                await until(launcher.coming.empty)
                assert not task.done() and set(group.loads) == {"a:1"}
            else:
                with pytest.raises(ModelError, match="There is no model"):
                    await task

    asyncio.run(live())
