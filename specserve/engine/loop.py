"""Runs an engine on a thread of its own and carries requests in and events out. Knows threads, not asyncio, no text."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.errors import EngineError, InputError
from specserve.types import Event

Listener: TypeAlias = Callable[[Event | EngineError | InputError], None]


class EngineLoop:
    """Steps the engine while there is work and sleeps while there is none.

    Every other method may be called from any thread. A listener is called on the engine's thread and must only hand
    the event on. If the engine itself fails, every listener gets the EngineError and no request is taken any more.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Listener] = {}
        self._failure: EngineError | None = None
        self._closing = threading.Lock()  # nothing is queued after the queue was drained for the last time
        self._thread = threading.Thread(target=self._run, name="specserve-engine", daemon=True)
        self._thread.start()

    def add(self, request: Request, listener: Listener) -> None:
        """Queue a request, already checked; events of all its completions go to the listener."""
        with self._closing:
            if self._failure is not None:
                raise self._failure
            self._commands.put(lambda: self._add(request, listener))

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._commands.put(lambda: self._emit(self._engine.abort(request_id, index)))

    def close(self) -> None:
        """Stop after the step that is running; waits for the thread."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    self._emit(self._engine.step())
            self._fail(EngineError("The engine was closed."))
        except Exception as error:
            self._fail(EngineError(f"The engine failed: {type(error).__name__}: {error}"))
            raise

    def _obey(self) -> bool:
        """Carry out what was asked; waits only when there is nothing to step. False: close."""
        while not (self._commands.empty() and self._engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _add(self, request: Request, listener: Listener) -> None:
        try:
            self._engine.add(request)
            self._listeners[request.id] = listener
        except InputError as error:
            listener(error)

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            if event.request_id in self._listeners:
                self._listeners[event.request_id](event)
        for event in events:
            if event.request_id not in self._engine.requests:
                self._listeners.pop(event.request_id, None)

    def _fail(self, error: EngineError) -> None:
        """Tell everybody, also those whose request still waits in the queue."""
        with self._closing:
            self._failure = error
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for listener in self._listeners.values():
            listener(error)
        self._listeners.clear()
