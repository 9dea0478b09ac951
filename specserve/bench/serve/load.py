"""When requests are sent: on a schedule, or when others have ended."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice, takewhile
from typing import Any, Protocol, TypeVar

from specserve.errors import ConfigError

T = TypeVar("T")
Send = Callable[[int, float], Awaitable[T]]  # a request's number and the time it is due: its record

ARRIVALS = ("poisson", "constant")


@dataclass(frozen=True, slots=True)
class Extent:
    """When to send no more: after `num_requests`, or `duration` seconds after the beginning, whichever comes first.
    What was sent is waited for."""

    num_requests: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration is None:
            raise ConfigError("A load without an end: give a number of requests or a duration.")

    def within(self, seconds: float) -> bool:
        """Whether a request may still be sent that long after the beginning."""
        return self.duration is None or seconds < self.duration


class Load(Protocol):
    """`run` sends requests and gives their records in the order of their numbers; `describe` is what JSON says of it,
    its name for people among that."""

    def describe(self) -> dict[str, Any]: ...

    async def run(self, send: Send[T], extent: Extent, seed: int) -> list[T]: ...


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """`rate` requests per second on average, sent when they are due, whatever became of those before: users do not wait
    for each other. `arrival` is one of ARRIVALS. With an infinite rate all are sent at once, so their number must be
    known."""

    rate: float
    arrival: str = "poisson"

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"rate is {self.rate}; it must be a number of requests per second above 0, or inf.")
        assert self.arrival in ARRIVALS

    def describe(self) -> dict[str, Any]:
        rate = "inf" if math.isinf(self.rate) else self.rate  # JSON has no such number
        return {"name": f"{self.rate:g}/s", "kind": "open", "rate": rate, "arrival": self.arrival}

    def times(self, seed: int) -> Iterator[float]:
        """Seconds from the beginning to each request, without end. With the same seed, other rates have the same
        arrivals on another scale."""
        if self.arrival == "constant":
            return (number / self.rate for number in count())
        chance = random.Random(seed)
        return accumulate(chance.expovariate(1.0) / self.rate for _ in count())

    async def run(self, send: Send[T], extent: Extent, seed: int) -> list[T]:
        assert extent.num_requests is not None or not math.isinf(self.rate), "a plan has an end"
        loop = asyncio.get_running_loop()
        begin = loop.time()
        times = takewhile(extent.within, islice(self.times(seed), extent.num_requests))
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, seconds in enumerate(times):
                await asyncio.sleep(begin + seconds - loop.time())
                tasks.append(group.create_task(_record(send, number, begin + seconds)))
        return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests at a time: the next is sent, and due, when one has ended."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be at least 1.")

    def describe(self) -> dict[str, Any]:
        return {"name": f"{self.concurrency} at once", "kind": "closed", "concurrency": self.concurrency}

    async def run(self, send: Send[T], extent: Extent, seed: int) -> list[T]:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        numbers = iter(count()) if extent.num_requests is None else iter(range(extent.num_requests))
        records: dict[int, T] = {}

        async def one_after_the_other() -> None:
            while extent.within((now := loop.time()) - begin) and (number := next(numbers, None)) is not None:
                records[number] = await send(number, now)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(one_after_the_other())
        return [records[number] for number in sorted(records)]


async def _record(send: Send[T], number: int, due: float) -> T:
    return await send(number, due)
