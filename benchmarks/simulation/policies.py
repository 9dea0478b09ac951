"""Who gets a request: the router of specserve, what others do, and an oracle that knows how long answers will be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence as Many
from heapq import nsmallest
from itertools import takewhile
from typing import Protocol

from simulation.forecast import Limits, forecast, num_missed
from simulation.replica import Replica
from simulation.traffic import Call

from specserve.cache import prefix
from specserve.cluster.router import Router

_MISS_S, _WORK = 2.0, 5.0  # what the oracle takes a miss for, and times that it counts what it lets compute
_FEWEST, _FULLEST = 8, 4  # replicas that the oracle looks at: those with the least to do, and with most of the prefix


class Policy(Protocol):
    """`replicas` has None for those that take nothing; there is another."""

    def choose(self, call: Call, replicas: Many[Replica | None], now: float) -> int: ...

    def forget(self, number: int) -> None:
        """This replica begins anew."""


class Routed:
    """specserve's own router, which is told what the server tells it."""

    def __init__(self, num_replicas: int, block_size: int) -> None:
        self._router = Router(num_replicas, block_size)

    def choose(self, call: Call, replicas: Many[Replica | None], now: float) -> int:
        loads = [None if each is None else each.load for each in replicas]
        return self._router.choose(call.prompt_ids, call.tenant, loads)

    def forget(self, number: int) -> None:
        self._router.forget(number)


class Simple:
    """Chooses among the replicas that take requests without any memory but of what it counts itself."""

    def __init__(self, rule: Callable[[Call, dict[int, Replica]], int]) -> None:
        self._rule = rule

    def choose(self, call: Call, replicas: Many[Replica | None], now: float) -> int:
        return self._rule(call, {number: each for number, each in enumerate(replicas) if each is not None})

    def forget(self, number: int) -> None:
        pass


def in_turn() -> Callable[[Call, dict[int, Replica]], int]:
    """Each has the next request."""
    last = -1

    def rule(call: Call, taking: dict[int, Replica]) -> int:
        nonlocal last
        last = next((number for number in taking if number > last), min(taking))
        return last

    return rule


def least_loaded(call: Call, taking: dict[int, Replica]) -> int:
    """The fewest requests that have not ended; of equals one by chance."""
    luck = random.Random(call.number)
    return min(taking, key=lambda number: (len(taking[number].answers), luck.random()))


def of_two(call: Call, taking: dict[int, Replica]) -> int:
    """Of two by chance the one with fewer requests."""
    two = random.Random(call.number).sample(sorted(taking), min(2, len(taking)))
    return min(two, key=lambda number: len(taking[number].answers))


def sticky(call: Call, taking: dict[int, Replica]) -> int:
    """Most of the prompt cached, whatever the load; without any the least loaded."""
    found = cached_tokens(call, taking)
    most = max(found.values())
    return least_loaded(call, {number: taking[number] for number in taking if found[number] == most})


def all_to_one(call: Call, taking: dict[int, Replica]) -> int:
    """As bad as can be, so that a comparison is seen to tell."""
    return min(taking)


class Oracle:
    """Knows how long each answer will be, what each engine is doing and has cached, and what steps take, but not what
    will come. It asks what would become of all requests of a replica with this one and without: in how many seconds
    more they end, how many more miss their limits, and what of the prompt must be computed, which takes time from those
    that will come. Of the weights tried these kept the most requests good, or as good as the most (LOG)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def choose(self, call: Call, replicas: Many[Replica | None], now: float) -> int:
        taking = {number: each for number, each in enumerate(replicas) if each is not None}
        cached = cached_tokens(call, taking)
        least = nsmallest(_FEWEST, taking, key=lambda number: (len(taking[number].answers), number))
        fullest = nsmallest(_FULLEST, taking, key=lambda number: (-cached[number], len(taking[number].answers), number))
        return min(
            dict.fromkeys((*fullest, *least)), key=lambda number: self._cost(taking[number], call, cached[number], now)
        )

    def forget(self, number: int) -> None:
        pass

    def _cost(self, replica: Replica, call: Call, num_cached: int, now: float) -> float:
        before = forecast(replica, now)
        after = forecast(replica, now, (call, num_cached))
        missed = num_missed(after, self._limits) - num_missed(before, self._limits)
        longer_s = sum(each.last_s for each in after) - sum(each.last_s for each in before)
        computed_s = replica.prompt_seconds(len(call.prompt_ids) - num_cached, num_cached)
        return longer_s + _MISS_S * missed + _WORK * computed_s


def cached_tokens(call: Call, taking: dict[int, Replica]) -> dict[int, int]:
    """How many tokens of the prompt each replica's prefix cache has at this moment."""
    size = next(iter(taking.values())).shape.block_size
    digests: list[bytes] = []

    def of(replica: Replica) -> Iterator[bytes]:
        chain = prefix.chain(call.tenant, call.prompt_ids, size, (len(call.prompt_ids) - 1) // size, digests)
        pool = replica.scheduler.cache.pool
        return takewhile(lambda digest: pool.find(digest) is not None, chain)

    return {number: size * sum(1 for _ in of(replica)) for number, replica in taking.items()}


POLICIES = ("router", "round-robin", "least-loaded", "prefix-sticky", "power-of-two", "oracle")


def make_policy(name: str, num_replicas: int, block_size: int, limits: Limits) -> Policy:
    if name == "router":
        return Routed(num_replicas, block_size)
    if name == "oracle":
        return Oracle(limits)
    rules = {
        "round-robin": in_turn(),
        "least-loaded": least_loaded,
        "prefix-sticky": sticky,
        "power-of-two": of_two,
        "all-to-one": all_to_one,
    }
    return Simple(rules[name])
