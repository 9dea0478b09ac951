"""Whether a constraint can be compiled, found out in processes that can be killed before the engine hears of it."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from specserve.server.tenant_queues import CachedOutcome, Job, TenantQueues
from specserve.server.wire.errors import overloaded
from specserve.structured.base import RefusedError
from specserve.structured.compiler import AUTO
from specserve.structured.spec import Structured
from specserve.structured.trial import Outcome, Trial

_log = logging.getLogger(__name__)

# Seconds of CPU time that a trial gets first and next, before it gets all that is allowed. Ordinary ones take 2 to 30
# ms, and nobody knows beforehand which do not: 500 bytes of JSON Schema can take minutes.
_FIRST_S = (0.05, 0.4)
_LONG = 2**13  # characters of a constraint that is given the second of these at once
_MAX_EXPENSIVE = 64  # of one tenant that wait: two minutes' work
_KEPT_S = 60.0  # a failure that another time may not bring
_MAX_BYTES = 2**24  # of constraints whose outcome is kept
_ENTRY_BYTES = 400  # that each of them takes beside its texts: objects and their places in tables


class Validator(Protocol):
    """A GrammarValidator, or what leads to that of another process."""

    async def check(self, structured: Structured, vocab_size: int, tenant: bytes = b"") -> bool: ...
    def close(self) -> None: ...


class Worker(Protocol):
    """Tries one constraint at a time. `is_ready`: it could begin at once."""

    @property
    def is_ready(self) -> bool: ...
    async def run(self, job: Job, seconds: float) -> Outcome:
        """Ends the trial when cancelled."""

    def close(self) -> None: ...


class Process:
    """A process, made with the first job, and the thread that waits for it."""

    def __init__(self, folder: Path, backend: str, limit_s: float) -> None:
        self._make = functools.partial(Trial, folder, backend=backend, limit_s=limit_s)
        self._thread = ThreadPoolExecutor(1, "specserve-trials")
        self.trial: Trial | None = None

    @property
    def is_ready(self) -> bool:
        return self.trial is not None and self.trial.is_ready

    async def run(self, job: Job, seconds: float) -> Outcome:
        cancelled = threading.Event()
        trial = self._made(job.vocab_size)
        running = asyncio.get_running_loop().run_in_executor(
            self._thread, functools.partial(trial.run, job.structured, limit_s=seconds, cancelled=cancelled)
        )
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            trial.cancel(cancelled)
            await asyncio.wait([running])
            raise

    def prepare(self, vocab_size: int) -> None:
        self._thread.submit(self._made(vocab_size).run, Structured.choice(["a"]))

    def close(self) -> None:
        if self.trial is not None:
            self.trial.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _made(self, vocab_size: int) -> Trial:
        if self.trial is None:
            self.trial = self._make(vocab_size)
        return self.trial


class GrammarValidator:
    """Tries each constraint once, and remembers. `folder` is the tokenizer's; `limit_s` is what a trial may take, in
    seconds of CPU time.

    One worker is for what may be cheap alone; another takes what has turned out expensive, and cheap ones where there
    is nothing expensive. So a choice or an ordinary schema never waits for an expensive one. A trial whose requests
    have all gone ends at once.
    """

    def __init__(self, folder: Path, backend: str = AUTO, limit_s: float = 2.0) -> None:
        self.processes = [Process(folder, backend, limit_s) for _ in range(2)]
        self._for_cheap: Worker = self.processes[0]
        self._for_all: Worker = self.processes[1]
        self._busy: set[Worker] = set()
        self._limits = [*(seconds for seconds in _FIRST_S if seconds < limit_s), limit_s]  # by level
        self._queues = TenantQueues()
        self._jobs: dict[Structured, Job] = {}  # what waits or is tried
        self._known: OrderedDict[Structured, CachedOutcome] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    async def check(self, structured: Structured, vocab_size: int, tenant: bytes = b"") -> bool:
        """Whether compiling it takes long. Raises RefusedError for what cannot be compiled within the limits, and
        WireError, 429, where too many expensive ones of this tenant wait already."""
        cached = self._remembered(structured) or await self._tried(structured, vocab_size, tenant)
        if cached.why is not None:
            raise RefusedError(cached.why)
        return cached.level > 0

    def prepare(self, vocab_size: int) -> None:
        """Start a process in the background, so that the first request does not wait for it."""
        self.processes[0].prepare(vocab_size)

    def close(self) -> None:
        """Kill what runs."""
        for process in self.processes:
            process.close()

    # --- who waits ----------------------------------------------------------------------------------------------------

    async def _tried(self, structured: Structured, vocab_size: int, tenant: bytes) -> CachedOutcome:
        job = self._jobs.get(structured)
        if job is None:
            found: asyncio.Future[CachedOutcome] = asyncio.get_running_loop().create_future()
            level = min(len(structured.text) > _LONG, len(self._limits) - 1)
            job = self._jobs[structured] = Job(structured, vocab_size, found, level)
        job.waiters[tenant] += 1
        try:
            if job.running is None:
                self._wait(job, [tenant])
            return await asyncio.shield(job.found)
        finally:
            self._leave(job, tenant)

    def _wait(self, job: Job, tenants: Iterable[bytes]) -> None:
        """Have it wait in the queues of these tenants. Raises WireError where none of them has room for it."""
        queues = [tenant for tenant in tenants if not job.level or self._queues.num_expensive(tenant) < _MAX_EXPENSIVE]
        if not queues:
            raise overloaded(
                f"{_MAX_EXPENSIVE} constraints of yours that take long to compile are waiting to be tried, the most "
                "that may. Send the request again in a moment."
            )
        for tenant in queues:
            self._queues.add(job, tenant)
        self._dispatch()

    def _leave(self, job: Job, tenant: bytes) -> None:
        job.waiters[tenant] -= 1
        if job.waiters[tenant]:
            return
        del job.waiters[tenant]
        self._queues.remove(job, tenant)
        if not job.waiters and not job.found.done():
            del self._jobs[job.structured]
            if job.running is not None:
                job.running.cancel()

    # --- who is tried -------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        for worker in (self._for_cheap, self._for_all):
            job = None if worker in self._busy else self._next_for(worker)
            if job is not None:
                self._busy.add(worker)
                job.running = asyncio.create_task(self._try(job, worker))
                job.running.add_done_callback(functools.partial(self._free, worker))

    def _free(self, worker: Worker, _: asyncio.Task[None]) -> None:
        self._busy.remove(worker)
        self._dispatch()

    def _next_for(self, worker: Worker) -> Job | None:
        cheap, expensive = range(1), range(1, len(self._limits))
        if worker is self._for_cheap:
            return self._queues.take(cheap)
        return self._queues.take(expensive) or (self._queues.take(cheap) if worker.is_ready else None)

    async def _try(self, job: Job, worker: Worker) -> None:
        try:
            outcome = await worker.run(job, self._limits[job.level])
            job.running = None
            if outcome.timed_out and job.level + 1 < len(self._limits):
                job.level += 1
                self._wait(job, job.waiters)
            else:
                self._end(job, outcome)
        except Exception as error:
            self._jobs.pop(job.structured)
            job.found.set_exception(error)

    def _end(self, job: Job, outcome: Outcome) -> None:
        del self._jobs[job.structured]
        fails = outcome.timed_out or outcome.crashed is not None
        until = asyncio.get_running_loop().time() + _KEPT_S if fails else math.inf
        cached = CachedOutcome(self._why(outcome), job.level, until)
        job.found.set_result(cached)
        self._known[job.structured] = cached
        self._num_bytes += _size(job.structured, cached)
        while self._num_bytes > _MAX_BYTES:
            self._forget(next(iter(self._known)))

    def _why(self, outcome: Outcome) -> str | None:
        if outcome.timed_out:
            return f"compiling it takes longer than {self._limits[-1]:g} s, the most that is allowed. Make it smaller."
        if outcome.crashed is not None:
            _log.warning("Trying a grammar failed: %s.", outcome.crashed)
            return "compiling it made the compiler fail. Make it simpler."
        return outcome.refused

    # --- what is known ------------------------------------------------------------------------------------------------

    def _remembered(self, structured: Structured) -> CachedOutcome | None:
        cached = self._known.get(structured)
        if cached is None:
            return None
        if cached.until <= asyncio.get_running_loop().time():
            self._forget(structured)
            return None
        self._known.move_to_end(structured)
        return cached

    def _forget(self, structured: Structured) -> None:
        self._num_bytes -= _size(structured, self._known.pop(structured))


def _size(structured: Structured, cached: CachedOutcome) -> int:
    """Bytes that remembering it takes: texts beyond ASCII have several a character."""
    return _ENTRY_BYTES + sys.getsizeof(structured.text) + sys.getsizeof(cached.why or "")
