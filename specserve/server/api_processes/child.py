"""Keeps one process that answers HTTP running: starts it, notices when it has died or stands still, starts another."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from specserve.errors import EngineError
from specserve.machine.lifeline import without_interrupts
from specserve.server.api_processes.messages import Finish, Given, Now
from specserve.server.api_processes.session import Session, Shared
from specserve.server.api_processes.table import Table
from specserve.server.engine.keeper import Timeouts
from specserve.server.engine.messages import Failed
from specserve.server.metrics_totals import ApiProcessStatus

_log = logging.getLogger(__name__)
_LOOK_S = 0.1  # between two looks at whether it moves
_LATE_S = 1.0  # a look that comes so much later says that this process did not run
_ATTEMPTS = 3  # starts in a row that fail
_FIRST_PAUSE_S = 0.1  # before another start; twice as long after each that failed
_LONGEST_PAUSE_S = 30.0
_MOST_DOUBLED = 10  # times: long after the longest pause
_LEAVE_S, _LEAVE_LOOK_S = 1.0, 0.005  # for one that has closed all that it had
_END_S = 3.0  # one that was told to finish is killed after so long


class ApiProcess:
    """The process of one row of the table, and whoever takes its place. It inherits the table's `memory` and the
    sockets `listening`, descriptors all. `given` makes what each is told at first, of its row and how many there have
    been in it, `now` how the engines are; `may_give_up` says whether starts that fail may end all.

    `finished` is done when there will be none any more: its exception says why, None after `close`.
    """

    def __init__(
        self,
        row: int,
        table: Table,
        memory: int,
        listening: Sequence[int],
        shared: Shared,
        given: Callable[[int, int], Given],
        now: Callable[[], Now],
        may_give_up: Callable[[ApiProcess], bool],
        timeouts: Timeouts,
    ) -> None:
        self.row = row
        self.session: Session | None = None  # with the process that runs
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_been_up = asyncio.Event()
        self._num_starts = 0
        self._table, self._memory, self._listening = table, memory, listening
        self._shared, self._given, self._now = shared, given, now
        self._may_give_up, self._timeouts = may_give_up, timeouts
        self._is_closing = False
        self._keeper = asyncio.create_task(self._keep())

    @property
    def is_up(self) -> bool:
        return self.session is not None and self.session.up.is_set()

    @property
    def status(self) -> ApiProcessStatus:
        state = "ready" if self.is_up else "starting" if self._num_starts <= 1 else "restarting"
        return ApiProcessStatus(state, max(0, self._num_starts - 1), self._table.num_requests(self.row))

    async def close(self) -> None:
        """Let it finish, or kill it where that takes long."""
        self._is_closing = True
        if self.session is not None:
            self.session.tell(Finish())
            with suppress(TimeoutError):
                await asyncio.wait_for(self.session.lost.wait(), _END_S if self.is_up else 0)
        self._keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self._keeper
        if not self.finished.done():
            self.finished.set_result(None)

    async def _keep(self) -> None:
        """Run processes until there will be none any more."""
        try:
            await self._run_all()
        except Exception as error:  # without a keeper a process that dies would be missed by nobody
            _log.exception("Processes that answer HTTP cannot be looked after any more.")
            self.finished.set_exception(EngineError(f"{type(error).__name__}: {error}"))

    async def _run_all(self) -> None:
        """Run one after another until starting has failed too often."""
        failures = 0
        while not self._is_closing:
            trouble, was_up, failure = await self._run_one()
            failures = 0 if was_up else failures + 1
            cause = f"Process {self.row} that answers HTTP {trouble}."
            error = None if failure is None else failure.error()
            if (error is not None or failures >= _ATTEMPTS) and self._may_give_up(self):
                self.finished.set_exception(error or EngineError(cause))
                return
            if failure is not None:
                cause = f"{cause} It said: {failure.message}"
            if not self._is_closing:
                pause = min(_FIRST_PAUSE_S * 2 ** min(failures, _MOST_DOUBLED), _LONGEST_PAUSE_S)
                _log.error("%s Starting another in %.1f s.", cause, pause)
                await asyncio.sleep(pause)

    async def _run_one(self) -> tuple[str, bool, Failed | None]:
        """Start a process and watch it until it is gone; what became of it, whether it took connections, and what it
        said of its end."""
        self._num_starts += 1
        try:
            process, self.session = self._spawned()
        except OSError as error:  # no descriptors, no memory
            return f"cannot be started: {error}", False, None
        session = self.session
        try:
            session.tell(self._given(self.row, self._num_starts))
            session.tell(self._now())
            trouble = await self._watched(session)
            self._leave(session)  # its requests end at once
            if trouble:
                process.kill()
            await _ended(process)
        finally:
            self._leave(session)
            if process.poll() is None:
                process.kill()
                process.wait()
            self._table.clear(self.row)
        return trouble or f"ended with status {process.returncode}", session.up.is_set(), session.failure

    def _leave(self, session: Session) -> None:
        self.session = None
        session.close()

    async def _watched(self, session: Session) -> str:
        """What is wrong with it; nothing once nothing is heard from it."""
        begun = looked = time.monotonic()
        while not session.lost.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(session.lost.wait(), _LOOK_S)
            now = time.monotonic()
            if now - looked > _LOOK_S + _LATE_S:  # this process was stopped, and that one may have been
                begun = now
            looked = now
            if session.up.is_set():
                self.has_been_up.set()
                if now - max(begun, self._table.last_beat(self.row)) > self._timeouts.stall_s:
                    return f"stood still for {self._timeouts.stall_s:g} s"
            elif now - begun > self._timeouts.start_s:
                return f"took no connections within {self._timeouts.start_s:g} s"
        return ""

    def _spawned(self) -> tuple[subprocess.Popen[bytes], Session]:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = [theirs.fileno(), self._memory, *self._listening]
            numbers = map(str, [*inherited[:2], os.getpid(), *self._listening])
            command = [sys.executable, "-m", "specserve.server.api_processes.process", *numbers]
            try:
                with without_interrupts():
                    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
            except OSError:
                ours.close()
                raise
        return process, Session(ours, self._shared)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for one that ends, but not for ever."""
    end = time.monotonic() + _LEAVE_S
    while process.poll() is None and time.monotonic() < end:
        await asyncio.sleep(_LEAVE_LOOK_S)
