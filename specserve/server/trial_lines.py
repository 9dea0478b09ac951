"""Which constraint is tried next: tenants are served in turn, and what has cost little comes before what has cost much.
Knows jobs; knows no process."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from specserve.structured.spec import Structured


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of a trial: why the constraint is refused, None where it is not, and the level at which that was found
    out. `until`: the time, as the event loop has it, from which it should be tried again."""

    why: str | None
    level: int
    until: float


@dataclass(eq=False, slots=True)
class Job:
    """One constraint that is tried for whoever waits for it. `level`: how often it has used up the time that it was
    given, which grows with each. `waiters`: how many requests of each tenant wait."""

    asked: Structured
    vocab_size: int
    found: asyncio.Future[Finding]
    level: int = 0
    waiters: Counter[bytes] = field(default_factory=Counter)
    running: asyncio.Task[None] | None = None


class Lines:
    """Jobs that wait, a line for each tenant. A job that several tenants wait for is in the line of each."""

    def __init__(self) -> None:
        self._lines: OrderedDict[bytes, list[Job]] = OrderedDict()  # whose turn it is comes first

    def add(self, job: Job, tenant: bytes) -> None:
        line = self._lines.setdefault(tenant, [])
        if job not in line:
            line.append(job)

    def remove(self, job: Job, tenant: bytes) -> None:
        """Does nothing where it does not wait."""
        line = self._lines.get(tenant, [])
        if job in line:
            line.remove(job)
        if not line:
            self._lines.pop(tenant, None)

    def take(self, levels: Container[int]) -> Job | None:
        """The next one of these levels, out of all lines: the lowest, then the oldest of the tenant whose turn it is.
        None where none waits."""
        for tenant, line in self._lines.items():
            job = min((job for job in line if job.level in levels), key=lambda job: job.level, default=None)
            if job is not None:
                self._lines.move_to_end(tenant)
                for each in list(job.waiters):
                    self.remove(job, each)
                return job
        return None

    def num_expensive(self, tenant: bytes) -> int:
        """Jobs in a tenant's line that have used up their first time."""
        return sum(job.level > 0 for job in self._lines.get(tenant, ()))
