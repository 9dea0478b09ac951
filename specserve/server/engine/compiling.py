"""Requests that wait for their grammar, which a thread compiles: no step waits for it. Knows requests and the compiler;
knows no messages."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from specserve.engine.request import Request
from specserve.errors import InputError
from specserve.structured.base import Grammar
from specserve.structured.compiler import Compiler
from specserve.structured.reasoning import wrapped
from specserve.text.reasoning import Reasoning

_NICE = 15  # of the thread of slow ones, beside which the engine's threads get nearly all of the cores


class Compiling:
    """At most one grammar is compiled at a time, and a slow one beside it: the cores belong to the engine. Whoever asks
    has tried each of them elsewhere, so it is known which are slow, and none takes very long or fails. `reasoning` is
    the model's."""

    def __init__(self, compiler: Compiler, reasoning: Reasoning | None) -> None:
        self._compiler = compiler
        self._reasoning = reasoning
        self._thread = ThreadPoolExecutor(1, "specserve-grammars")
        self._background = ThreadPoolExecutor(1, "specserve-slow-grammars", initializer=_stand_back)
        self._waiting: dict[str, tuple[Request, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, is_slow: bool = False) -> None:
        asked = request.params.structured
        assert asked is not None, "free requests wait for nothing"
        thread = self._background if is_slow and not self._compiler.known(asked) else self._thread
        made = thread.submit(self._compiler.compile, asked)
        self._waiting[request.id] = request, made

    def drop(self, request_id: str) -> bool:
        """Whether it had waited here; it does no longer, and is not compiled unless that has begun."""
        _, made = self._waiting.pop(request_id, (None, None))
        if made is not None:
            made.cancel()
        return made is not None

    def done(self) -> Iterator[tuple[Request, InputError | None]]:
        """Those whose grammar is ready, or why theirs was refused; they wait no longer."""
        for request, made in [entry for entry in self._waiting.values() if entry[1].done()]:
            del self._waiting[request.id]
            error = made.exception()
            if error is None:
                grammar = wrapped(made.result(), request.prompt_ids, self._reasoning)
                yield replace(request, grammar=grammar), None
            elif isinstance(error, InputError):
                yield request, error
            else:
                why = f"structured: compiling it failed: {type(error).__name__}: {error}"
                yield request, InputError(why, "structured")

    def prepare(self) -> None:
        """Make on the thread what nearly all grammars need; what few do is made when one comes."""
        self._thread.submit(self._compiler.prepare, first_only=True)


def _stand_back() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # Linux: of this thread alone
