"""Which constraint is tried next: tenants are served in turn, and what has cost little comes before what has cost
much."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from specserve.structured.spec import Structured


@dataclass(frozen=True, slots=True)
class CachedOutcome:
    """What came of a trial: why the constraint is refused, None where it is not, and the level at which that was found
    out. `until`: the time, as the event loop has it, from which it should be tried again."""

    why: str | None
    level: int
    until: float


@dataclass(eq=False, slots=True)
class Job:
    """One constraint that is tried for whoever waits for it. `level`: how often it has used up the time that it was
    given, which grows with each. `waiters`: how many requests of each tenant wait."""

    structured: Structured
    vocab_size: int
    found: asyncio.Future[CachedOutcome]
    level: int = 0
    waiters: Counter[bytes] = field(default_factory=Counter)
    running: asyncio.Task[None] | None = None


class TenantQueues:
    """Jobs that wait, a queue for each tenant. A job that several tenants wait for is in the queue of each."""

    def __init__(self) -> None:
        self._queues: OrderedDict[bytes, list[Job]] = OrderedDict()  # whose turn it is comes first

    def add(self, job: Job, tenant: bytes) -> None:
        queue = self._queues.setdefault(tenant, [])
        if job not in queue:
            queue.append(job)

    def remove(self, job: Job, tenant: bytes) -> None:
        """Does nothing where it does not wait."""
        queue = self._queues.get(tenant, [])
        if job in queue:
            queue.remove(job)
        if not queue:
            self._queues.pop(tenant, None)

    def take(self, levels: Container[int]) -> Job | None:
        """The next one of these levels, out of all queues: the lowest, then the oldest of the tenant whose turn it is.
        None where none waits."""
        for tenant, queue in self._queues.items():
            job = min((job for job in queue if job.level in levels), key=lambda job: job.level, default=None)
            if job is not None:
                self._queues.move_to_end(tenant)
                for each in list(job.waiters):
                    self.remove(job, each)
                return job
        return None

    def num_expensive(self, tenant: bytes) -> int:
        """Jobs in a tenant's queue that have used up their first time."""
        return sum(job.level > 0 for job in self._queues.get(tenant, ()))
