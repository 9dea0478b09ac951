"""Compiles the grammars of requests: at once, or on threads, so that no step waits for one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from specserve.engine.request import Request
from specserve.errors import InputError
from specserve.structured.base import Grammar
from specserve.structured.compiler import Compiler
from specserve.structured.reasoning import wrapped
from specserve.text.reasoning import Reasoning

_NICE = 15  # of the thread of slow ones, beside which the engine's threads get nearly all of the cores


class Compiling:
    """Requests that wait for their grammar. At most one is compiled at a time, and one that is known to be slow beside
    it: the cores belong to the engine. `reasoning` is the model's."""

    def __init__(self, compiler: Compiler, reasoning: Reasoning | None) -> None:
        self._compiler = compiler
        self._reasoning = reasoning
        self._thread = ThreadPoolExecutor(1, "specserve-grammars")
        self._background = ThreadPoolExecutor(1, "specserve-slow-grammars", initializer=_stand_back)
        self._waiting: dict[str, tuple[Request, Future[Grammar | None]]] = {}
        self._is_prepared = False

    def __len__(self) -> int:
        return len(self._waiting)

    def compile(self, request: Request) -> Grammar | None:
        """The grammar of a structured request, after the reasoning of models that reason; None for others. Any thread
        may call it. May take a second or more, once for each grammar. Raises RefusedError."""
        asked = request.params.structured
        return None if asked is None else wrapped(self._compiler.compile(asked), request.beginning, self._reasoning)

    def add(self, request: Request) -> None:
        asked = request.params.structured
        assert asked is not None, "other requests wait for nothing"
        self._is_prepared = True
        thread = self._background if request.compiles_slowly and not self._compiler.known(asked) else self._thread
        self._waiting[request.id] = request, thread.submit(self.compile, request)

    def drop(self, request_id: str) -> Request | None:
        """One that waits, and does no longer; it is not compiled unless that has begun. None for an unknown id."""
        request, compiled = self._waiting.pop(request_id, (None, None))
        if compiled is not None:
            compiled.cancel()
        return request

    def done(self) -> Iterator[tuple[Request, Grammar | InputError | None]]:
        """Those that wait no longer: with their grammar, or why it was refused."""
        for request, compiled in [entry for entry in self._waiting.values() if entry[1].done()]:
            del self._waiting[request.id]
            error = compiled.exception()
            if error is None:
                yield request, compiled.result()
            elif isinstance(error, InputError):
                yield request, error
            else:
                why = f"structured: compiling it failed: {type(error).__name__}: {error}"
                yield request, InputError(why, "structured")

    def prepare(self) -> None:
        """Make on the thread what nearly all grammars need, if none was asked for yet."""
        if not self._is_prepared:
            self._is_prepared = True
            self._thread.submit(self._compiler.prepare, first_only=True)

    def close(self) -> None:
        for pool in (self._thread, self._background):
            pool.shutdown(wait=False, cancel_futures=True)


def _stand_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # Linux: of this thread alone
