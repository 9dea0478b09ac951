"""Moves the clock: requests come, steps end, a replica dies and comes back."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Literal

from simulation.forecast import Limits
from simulation.policies import Policy
from simulation.replica import Answer, Replica, Shape
from simulation.traffic import Call

Kind = Literal["dies", "returns", "ends", "arrives"]


@dataclass(frozen=True, slots=True)
class Death:
    """A replica loses all it has at `at`, and takes requests again `away_s` seconds later."""

    replica: int
    at: float
    away_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A call that ended. `replica` is -1 where none took it; without `first_s` and `last_s` it failed."""

    call: Call
    replica: int
    first_s: float | None = None
    last_s: float | None = None

    def is_good(self, limits: Limits) -> bool:
        if self.first_s is None or self.last_s is None:
            return False
        return limits.hold(self.call.arrives, self.first_s, self.last_s, self.call.num_output)


class Cluster:
    """Replicas and who gives them requests, under a clock of its own: seconds from 0."""

    def __init__(self, shape: Shape, num_replicas: int, policy: Policy, seed: int = 0) -> None:
        self.ended: list[Ended] = []
        self.replicas = [Replica(shape, seed + number, partial(self._end, number)) for number in range(num_replicas)]
        self._policy = policy
        self._is_away = [False] * num_replicas
        self._lives = [0] * num_replicas  # how often each has died: steps of an earlier life never end

    def run(self, calls: Many[Call], deaths: Many[Death] = ()) -> list[Ended]:
        """All calls, each once, in the order in which they end."""
        order = count()
        events: list[tuple[float, int, Kind, int, int]] = [
            *((call.arrives, next(order), "arrives", number, 0) for number, call in enumerate(calls)),
            *((death.at, next(order), "dies", death.replica, 0) for death in deaths),
            *((death.at + death.away_s, next(order), "returns", death.replica, 0) for death in deaths),
        ]
        heapify(events)
        while events:
            now, _, kind, number, life = heappop(events)
            if kind == "arrives":
                number = self._place(calls[number], now)
            elif kind == "dies":
                self._is_away[number] = True
                self._lives[number] += 1
                self.ended += [Ended(call, number) for call in self.replicas[number].fail()]
            elif kind == "returns":
                self._is_away[number] = False
                self._policy.forget(number)
            elif life == self._lives[number]:
                self.replicas[number].end_step(now)
            if number >= 0 and self.replicas[number].is_idle and (seconds := self.replicas[number].begin_step(now)):
                heappush(events, (now + seconds, next(order), "ends", number, self._lives[number]))
        return self.ended

    def _place(self, call: Call, now: float) -> int:
        """Returns who got it; -1: nobody."""
        taking = [None if away else each for each, away in zip(self.replicas, self._is_away, strict=True)]
        if not any(taking):
            self.ended.append(Ended(call, -1))
            return -1
        number = self._policy.choose(call, taking, now)
        self.replicas[number].add(call)
        return number

    def _end(self, number: int, answer: Answer) -> None:
        self.ended.append(Ended(answer.call, number, answer.first_s, answer.last_s))
