"""Runs what may fail: foreign code on a thread of its own, given up on after a time, and our own at once."""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias


class Stuck(Exception):
    """The call did not come back in time; the worker must not be used again."""


class Outcome(NamedTuple):
    """What a call returned, or what it raised (SystemExit and its like included), and how that reads: an exception may
    be foreign code too."""

    value: Any
    error: BaseException | None
    told: str = ""


_Call: TypeAlias = tuple[Callable[[], Any], queue.SimpleQueue[Outcome]]


class Worker:
    """One daemon thread that runs calls in order, all of them `within` what that makes: modes of torch belong to a
    thread. A call that never returns costs the caller `timeout_s` once: the
    thread is left behind, ends if the call ever does, and does not keep the process alive. So does one whose worker
    nobody holds any more."""

    def __init__(self, name: str, timeout_s: float, within: Callable[[], AbstractContextManager[Any]]) -> None:
        self.timeout_s = timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls, within), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)  # the thread ends after the call it is in

    def call(self, function: Callable[[], Any]) -> Outcome:
        """Run `function` on the thread and wait for its outcome; Stuck is the error after `timeout_s` seconds."""
        reply: queue.SimpleQueue[Outcome] = queue.SimpleQueue()  # its own, so that a late answer reaches nobody
        self._calls.put((function, reply))
        try:
            return reply.get(timeout=self.timeout_s)
        except queue.Empty:
            return Outcome(None, Stuck(f"no answer after {self.timeout_s:g} s"))


def run(function: Callable[[], Any], caught: type[BaseException] = Exception) -> Outcome:
    """At once, on the caller's thread: no hand-over, and no way out of what never returns."""
    try:
        return Outcome(function(), None)
    except caught as error:
        return Outcome(None, error, traceback.format_exc())


def _serve(calls: queue.SimpleQueue[_Call | None], within: Callable[[], AbstractContextManager[Any]]) -> None:
    with within():
        while (call := calls.get()) is not None:
            function, reply = call
            reply.put(run(function, BaseException))  # whatever foreign code raises does not end the thread
            del call, function, reply  # an idle worker must not keep a step's tensors alive
