"""Whether a constraint can be compiled, found out in processes that can be killed before the engine hears of it. Knows
trials; knows no HTTP."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from specserve.constraint.base import RefusedError
from specserve.constraint.compiler import AUTO
from specserve.constraint.trial import Outcome, Trial
from specserve.structured import Structured

_log = logging.getLogger(__name__)

_NUM_WORKERS = 2  # of which one goes on while another has to be killed
_MAX_BYTES = 2**24  # of constraints whose outcome is kept


class Trials:
    """Tries each constraint once, and remembers. `folder` is the tokenizer's; `limit_s` is what a trial may take."""

    def __init__(self, folder: Path, backend: str = AUTO, limit_s: float = 2.0) -> None:
        self._make = functools.partial(Trial, folder, backend=backend, limit_s=limit_s)
        self._limit_s = limit_s
        self._threads = ThreadPoolExecutor(_NUM_WORKERS, "specserve-trials")
        self._idle: SimpleQueue[Trial] = SimpleQueue()
        self._trials: list[Trial] = []
        self._known: OrderedDict[Structured, str | None] = OrderedDict()  # why refused; least recently used first
        self._num_bytes = 0
        self._running: dict[Structured, asyncio.Future[str | None]] = {}

    async def check(self, asked: Structured, vocab_size: int) -> None:
        """Raises RefusedError for what cannot be compiled within the limits."""
        if asked in self._known:
            self._known.move_to_end(asked)
            why = self._known[asked]
        else:
            why = await asyncio.shield(self._running.get(asked) or self._begin(asked, vocab_size))
        if why is not None:
            raise RefusedError(why)

    def prepare(self, vocab_size: int) -> None:
        """Start a process in the background, so that the first request does not wait for it."""
        self._threads.submit(self._try, Structured.choice(["a"]), vocab_size)

    def close(self) -> None:
        """Kill what runs."""
        for trial in list(self._trials):
            trial.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, asked: Structured, vocab_size: int) -> asyncio.Future[str | None]:
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, self._try, asked, vocab_size)
        self._running[asked] = running
        running.add_done_callback(functools.partial(self._end, asked))
        return running

    def _end(self, asked: Structured, running: asyncio.Future[str | None]) -> None:
        del self._running[asked]
        if not running.cancelled() and running.exception() is None:
            self._known[asked] = running.result()
            self._num_bytes += len(asked.text)
            while self._num_bytes > _MAX_BYTES:
                forgotten, _ = self._known.popitem(last=False)
                self._num_bytes -= len(forgotten.text)

    def _try(self, asked: Structured, vocab_size: int) -> str | None:
        """Why it is refused. On a thread of ours, of which there are as many as trials."""
        trial = self._taken(vocab_size)
        try:
            return self._why(trial.run(asked))
        finally:
            self._idle.put(trial)

    def _taken(self, vocab_size: int) -> Trial:
        if self._idle.empty() and len(self._trials) < _NUM_WORKERS:
            self._trials.append(self._make(vocab_size))
            return self._trials[-1]
        return self._idle.get()

    def _why(self, outcome: Outcome) -> str | None:
        if outcome.timed_out:
            return f"compiling it takes longer than {self._limit_s:g} s, the most that is allowed. Make it smaller."
        if outcome.crashed is not None:
            _log.warning("Trying a grammar failed: %s.", outcome.crashed)
            return "compiling it made the compiler fail. Make it simpler."
        return outcome.refused
