"""Processes that end when they should: with the one that started them, however that one ends, or when a job of theirs
takes too long. Linux only."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1
_ARMED, _ARM_S = b"\xff", 10.0  # a copy's first word, and how long it is waited for


def end_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent ends, and look once whether it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("The process that started this one has ended.")


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started in the block never get a SIGINT, not even while Python starts: Ctrl-C goes to all of a
    terminal's processes, and the one that started them decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Has SIGPROF end this process after so many seconds of CPU time: how busy others are condemns no constraint."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def fork(serve: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """A copy of this process that serves its end of a connection, and ends with that or with this process: its id, and
    the other end. It has no threads but its own. Nobody hears of a copy that would outlive this process: one that
    cannot say within 10 s that it will not, as it was stopped, is killed, and its connection is at its end."""
    parent, (ours, theirs) = os.getpid(), socket.socketpair()
    with warnings.catch_warnings():  # Python 3.12 warns of threads that the copy will not have
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        theirs.close()
        _wait_until_armed(pid, ours)
        return pid, ours
    try:
        ours.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with(parent)
        theirs.sendall(_ARMED)
        serve(theirs)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _wait_until_armed(pid: int, connection: socket.socket) -> None:
    connection.settimeout(_ARM_S)
    try:
        connection.recv(len(_ARMED))  # nothing: it has ended, which whoever asks it notices
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
    connection.settimeout(None)


class Copy:
    """A copy of this process (fork) that answers one job after the other, JSON objects, and another once it was killed:
    after a job's "seconds" of CPU time, or by `cancel`, which SIGTERM calls. It has no threads but its own."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._answer = answer
        self._begin()

    def ask(self, line: str) -> dict[str, Any]:
        """What it says to a job, which is JSON on one line. If it was killed: {"timed_out": true}, {"cancelled": true}
        or {"crashed": how}."""
        if self._was_cancelled:  # too late for the job that it was meant for
            self._replace()
        try:
            self._stream.write(line)
            self._stream.flush()
            reply = self._stream.readline()
        except OSError:
            reply = ""
        if reply.endswith("\n"):
            found: dict[str, Any] = json.loads(reply)
            return found
        was_cancelled, status = self._was_cancelled, self._replace()
        if was_cancelled:
            return {"cancelled": True}
        return {"timed_out": True} if status == -signal.SIGPROF else {"crashed": f"the process ended with {status}"}

    def cancel(self, *_: object) -> None:
        """A signal's handler."""
        self._was_cancelled = True
        os.kill(self._pid, signal.SIGKILL)

    def _replace(self) -> int:
        """The exit status of the one that was killed."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until there is a copy that it could be for
        self._stream.close()
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._begin()
        return status

    def _begin(self) -> None:
        self._was_cancelled = False
        self._pid, ours = fork(self._serve)
        self._stream = ours.makefile("rw", encoding="utf-8")
        ours.close()
        signal.signal(signal.SIGTERM, self.cancel)

    def _serve(self, connection: socket.socket) -> None:
        """In the copy."""
        stream = connection.makefile("rw", encoding="utf-8")
        while line := stream.readline():
            job = json.loads(line)
            with limited(job["seconds"]):
                outcome = self._answer(job)
            stream.write(json.dumps(outcome) + "\n")
            stream.flush()
