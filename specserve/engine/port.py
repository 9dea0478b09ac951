"""How requests reach an engine and events come back. `EnginePort` is the contract: here are the engine of this process
and one on a thread of its own; server/engine/client.py has the one over a socket."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from specserve.adapters import AdapterDone, AdapterSource
from specserve.engine.adapter_loading import AdapterLoading
from specserve.engine.compiling import Compiling
from specserve.engine.request import Request
from specserve.errors import EngineError, InputError, SpecserveError
from specserve.structured.base import Grammar
from specserve.types import Event

if TYPE_CHECKING:
    from specserve.engine.adapter_loader import AdapterLoader
    from specserve.engine.engine import Engine

_BESIDE_S = 0.001  # between two looks at what is compiled or on its way, while nothing else is done

Listener: TypeAlias = Callable[[Event | SpecserveError], object]
T = TypeVar("T")


def call_all(function: Callable[[T], object], values: Iterable[T]) -> None:
    """Call it with each of them, whatever a call raises: what one listener cannot take is no reason for another to
    lack a token. Raises the first of these errors then."""
    errors: list[BaseException] = []
    for value in values:
        try:
            function(value)
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


class RequestPort(Protocol):
    """Takes requests, each with a listener: that gets the events of all its completions in order, or after any of them
    the error that ends it, an InputError where the engine refuses it and an EngineError where the engine is gone. A
    listener must return soon; it may call the port."""

    def submit(self, request: Request, listener: Listener) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its completions, at any moment; an unknown id has just ended."""

    def expire(self, request_id: str) -> None:
        """Refuse a request of which no completion has begun to run: QueueTimeoutError."""


class EnginePort(RequestPort, Protocol):
    """One for all requests to an engine, and for what else is asked of it."""

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""

    def load_adapter(self, source: AdapterSource, replaces: bool, done: AdapterDone) -> None:
        """Read an adapter beside the steps, and let requests name it; `done` gets what is known of it, or why it cannot
        be. One of its name is replaced, or without `replaces` in its way."""

    def unload_adapter(self, name: str, done: AdapterDone) -> None:
        """Let no request name it any more; those that run end with it. `done` gets what was known of it."""


class QueueTimeoutError(InputError):
    """The request waited too long for its first step."""

    code = "queue_timeout"

    def __init__(self) -> None:
        super().__init__("No request before this one ended in time.")


class Listeners:
    """Who listens to which request, until all of its completions have ended."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Listener, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def num_completions(self) -> int:
        """Those that have not ended."""
        return sum(num_left[0] for _, num_left in self._open.values())

    def add(self, request: Request, listener: Listener) -> None:
        """Raises InputError for an id that has a listener: its events would be the other's."""
        if request.id in self._open:
            raise InputError(f"Request id {request.id!r} is in use; every open request needs its own.", "request_id")
        self._open[request.id] = listener, [request.params.n]

    def notify(self, event: Event) -> None:
        found = self._open.get(event.request_id)
        if found is None:
            return
        listener, num_left = found
        if event.finish_reason is not None:
            num_left[0] -= 1
            if not num_left[0]:
                del self._open[event.request_id]
        listener(event)

    def end(self, request_id: str, error: SpecserveError | None = None) -> None:
        """No more events; the listener gets the error, if there is one."""
        found = self._open.pop(request_id, None)
        if found is not None and error is not None:
            found[0](error)

    def end_all(self, error: SpecserveError) -> None:
        call_all(lambda request_id: self.end(request_id, error), list(self._open))


class LocalPort:
    """An engine in this process, and the only caller of Engine.step. One thread at a time calls everything but
    `compile`; events come in calls of `step` and `abort`. An engine that fails raises what it fails with from any call:
    whoever calls then calls `fail`, which tells all whose requests are open, that of a failed `submit` too."""

    def __init__(self, engine: Engine, compiling: Compiling, loader: AdapterLoader | None = None) -> None:
        self.engine = engine
        self._loading = AdapterLoading(loader, engine.adapters)
        self.compile = compiling.compile
        self.prepare = compiling.prepare
        self._compiling = compiling
        self._listeners = Listeners()
        self._is_stuck = False  # what waits lacks blocks that others have, for KV that is on its way

    @property
    def wait_s(self) -> float | None:
        """How long there is nothing to do for `step`; None: until something else is called."""
        if self.engine.has_work and not self._is_stuck:
            return 0.0
        return _BESIDE_S if self._compiling or self._loading or self.engine.requests else None

    @property
    def num_awaiting(self) -> int:
        """Sequences whose KV is on its way from another engine."""
        return len(self.engine.scheduler.awaiting.seqs)

    def submit(self, request: Request, listener: Listener) -> None:
        """One with a grammar joins in when that is compiled."""
        try:
            self._listeners.add(request, listener)
        except InputError as error:
            listener(error)
            return
        if request.params.structured is None:
            self._let_in(request, None)
        else:
            self._compiling.add(request)

    def add(self, request: Request, grammar: Grammar | None, listener: Listener) -> None:
        """As `submit`, with a grammar from `compile`. Raises InputError, and then nothing of the request remains, or
        what the engine fails with; either way the listener hears nothing."""
        self._listeners.add(request, listener)
        try:
            self.engine.add(request, grammar)
        except BaseException:
            self._listeners.end(request.id)
            raise

    def abort(self, request_id: str, index: int | None = None) -> None:
        waiting = self._compiling.drop(request_id)
        events = [Event(request_id, i, [], finish_reason="abort") for i in range(waiting.params.n if waiting else 0)]
        call_all(self._listeners.notify, events or self.engine.abort(request_id, index))

    def expire(self, request_id: str) -> None:
        """What has begun to run is let finish: the work that was put into it would be lost."""
        group = self.engine.requests.get(request_id, ())
        is_waiting = bool(group) and all(seq.stats.first_scheduled is None for seq in group)
        if self._compiling.drop(request_id) or is_waiting:
            self.engine.abort(request_id)
            self._listeners.end(request_id, QueueTimeoutError())

    def reset_prefix_cache(self) -> None:
        self.engine.cache.reset_prefix_cache()

    def load_adapter(self, source: AdapterSource, replaces: bool, done: AdapterDone) -> None:
        self._loading.start(source, replaces, done)

    def unload_adapter(self, name: str, done: AdapterDone) -> None:
        self._loading.remove(name, done)

    def step(self) -> bool:
        """Let in whose grammar is ready, and take one step if there is work; whether one was taken. What a listener
        raises comes out once all of them have been told."""
        self._loading.finish()
        call_all(lambda compiled: self._let_in(*compiled), self._compiling.done())
        self.engine.receive()
        if not self.engine.has_work:
            return False
        num_steps = self.engine.counters.num_steps
        call_all(self._listeners.notify, self.engine.step())
        self._is_stuck = self.engine.counters.num_steps == num_steps
        return not self._is_stuck

    def _let_in(self, request: Request, grammar: Grammar | InputError | None) -> None:
        """Of one that listens, or why it has no grammar. What the engine refuses is told, what it fails with raised."""
        try:
            if isinstance(grammar, InputError):
                raise grammar
            self.engine.add(request, grammar)
        except InputError as error:
            self._listeners.end(request.id, error)

    def fail(self, error: EngineError) -> None:
        """Tell everybody that nothing more will come."""
        self._listeners.end_all(error)

    def close(self) -> None:
        self._compiling.close()
        self._loading.close()
        self.engine.drafting.close()
        self.engine.executor.close()


class ThreadPort:
    """A LocalPort on a thread of its own, which steps while there is work. Any thread may call it; listeners are called
    on the engine's. If the engine fails, every listener gets the EngineError and no request is taken any more."""

    def __init__(self, port: LocalPort) -> None:
        self._port = port
        # Each with the listener of the request that it brings, if any.
        self._commands: queue.SimpleQueue[tuple[Callable[[], object], Listener | None] | None] = queue.SimpleQueue()
        self._failure: EngineError | None = None
        self._closing = threading.Lock()  # nothing is queued after the queue was drained for the last time
        self._thread = threading.Thread(target=self._run, name="specserve-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Raises the EngineError of an engine that has failed or was closed."""
        with self._closing:
            if self._failure is not None:
                raise self._failure
            self._commands.put((lambda: self._port.submit(request, listener), listener))

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._commands.put((lambda: self._port.abort(request_id, index), None))

    def expire(self, request_id: str) -> None:
        self._commands.put((lambda: self._port.expire(request_id), None))

    def reset_prefix_cache(self) -> None:
        self._commands.put((self._port.reset_prefix_cache, None))

    def load_adapter(self, source: AdapterSource, replaces: bool, done: AdapterDone) -> None:
        self._commands.put((lambda: self._port.load_adapter(source, replaces, done), None))

    def unload_adapter(self, name: str, done: AdapterDone) -> None:
        self._commands.put((lambda: self._port.unload_adapter(name, done), None))

    def close(self) -> None:
        """Stop after the step that is running; waits for the thread."""
        self._commands.put(None)
        self._thread.join()
        self._port.close()

    def _run(self) -> None:
        try:
            while self._obey():
                self._port.step()
            self._fail(EngineError("The engine was closed."))
        except BaseException as error:  # a panic of a library too, or everybody would wait for ever
            self._fail(EngineError(f"The engine failed: {type(error).__name__}: {error}"))
            raise

    def _obey(self) -> bool:
        """Carry out all commands; waits while there is nothing to step. False: close."""
        while True:
            wait_s = self._port.wait_s
            try:
                command = self._commands.get(block=wait_s != 0.0, timeout=wait_s)
            except queue.Empty:
                return True
            if command is None:
                return False
            command[0]()

    def _fail(self, error: EngineError) -> None:
        """Tell everybody, also those whose request still waits in the queue: nothing of it reaches the engine now."""
        with self._closing:
            self._failure = error
        queued = [self._commands.get() for _ in range(self._commands.qsize())]
        refused = [command[1] for command in queued if command is not None and command[1] is not None]
        call_all(lambda tell: tell(error), [*refused, self._port.fail])
