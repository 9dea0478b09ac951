"""The API process's end of the socket: sends commands, and hands what the engine says to whoever asked. Knows messages
and asyncio; knows no process and no HTTP."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from typing import Any, Protocol

import msgspec

from specserve.errors import EngineError, InputError, SpecserveError
from specserve.server.engine.messages import (
    Abort,
    Command,
    Configure,
    Expect,
    Expire,
    Failed,
    Gauges,
    Ready,
    Refused,
    Report,
    ResetPrefixCache,
    Stepped,
    Stop,
    Submit,
)  # fmt: skip
from specserve.server.engine.pipe import Pipe
from specserve.types import Event

_log = logging.getLogger(__name__)


class RefusedError(InputError):
    """What the engine itself found wrong with a request; `code` is that of the message."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, refused.param)
        self.code = refused.code


class Observer(Protocol):
    """Counts what engines report."""

    def notify(self, event: Event) -> None: ...
    def forget(self, request_id: str) -> None:
        """This request was refused: it has no events."""

    def lost(self) -> None:
        """The engine is gone: no open request has any more events."""


class Subscription:
    """What the engine says of one request, in order. `news` is set whenever there is something to take."""

    def __init__(self, number: str, num_completions: int, news: asyncio.Event) -> None:
        self.number = number
        self._left = num_completions
        self._events: list[Event] = []
        self._error: SpecserveError | None = None
        self._news = news

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._left == 0 or self._error is not None

    def push(self, event: Event) -> None:
        self._events.append(event)
        self._left -= event.finish_reason is not None
        self._news.set()

    def fail(self, error: SpecserveError) -> None:
        self._error = error
        self._news.set()

    def take(self) -> list[Event]:
        """All that has come since the last time. Raises what ended the request, once everything before was taken."""
        if self._error is not None and not self._events:
            raise self._error
        events, self._events = self._events, []
        if self._error is not None:
            self._news.set()
        return events


class EngineClient:
    """One incarnation of the engine as the API process sees it: from `bind` to `close`.

    `gauges` is the engine after its last step. `last_progress` is time.monotonic() of the last sign that it moves while
    requests are open: a beat of its pulse inside a step, a step that ran rows or said something, an answer, or a new
    request to none; `last_advanced` that of the last step that brought a sequence further than it had been.
    `observer` hears all that is said of any request, also of those that nobody waits for any more. `is_deaf`: what the
    engine says is not heard any more, for a fault on this side, or a message that is none.
    """

    def __init__(self, end: socket.socket, numbers: itertools.count[int], observer: Observer) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.gauges: Gauges | None = None
        self.last_progress = self.last_advanced = time.monotonic()
        self.failure: Failed | None = None
        self._numbers = numbers
        self._observer = observer
        self._open: dict[str, Subscription] = {}
        self._pipe = Pipe(end)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Report).decode
        self.is_deaf = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe, self._listen)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def configure(self, options: dict[str, Any]) -> None:
        """Tell the engine what to load; the first thing that it is told."""
        self._send(Configure(options))

    def submit(self, asked: Submit, num_completions: int, news: asyncio.Event) -> Subscription:
        """Ask for a request; its id is given here."""
        number = str(next(self._numbers))
        subscription = Subscription(number, num_completions, news)
        if not self._open:
            self.last_progress = self.last_advanced = time.monotonic()
        self._open[number] = subscription
        self._send(msgspec.structs.replace(asked, id=number))
        return subscription

    def expect(self) -> None:
        """Tell an engine that rests of a request that is about to come."""
        if not self._open:
            self._send(Expect())

    def abort(self, subscription: Subscription, index: int | None = None) -> None:
        """End a request, or one of its completions. Nothing more is heard of one that is aborted whole."""
        if subscription.number not in self._open:
            return
        if index is None:
            del self._open[subscription.number]
        self._send(Abort(subscription.number, index))

    def expire(self, subscription: Subscription) -> None:
        """End a request if it still waits for its first step; it then raises RefusedError."""
        if subscription.number in self._open:
            self._send(Expire(subscription.number))

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    def stop(self) -> None:
        """Ask the engine to end after its step."""
        self._send(Stop())

    def fail(self, error: EngineError) -> None:
        """Tell everybody who waits that the engine is gone."""
        for subscription in self._open.values():
            subscription.fail(error)
        self._open.clear()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # looked at, so that a start that nobody waits for any more is no warning

    def close(self) -> None:
        self._loop.remove_reader(self._pipe)
        self._loop.remove_writer(self._pipe)
        self._pipe.close()

    def _send(self, command: Command) -> None:
        self._pipe.send(self._encode(command))
        if self._pipe.is_behind:
            self._loop.add_writer(self._pipe, self._flush)

    def _flush(self) -> None:
        self._pipe.flush()
        if not self._pipe.is_behind:
            self._loop.remove_writer(self._pipe)

    def _listen(self) -> None:
        """Hear some of what has come: an engine that is quicker than this must not keep everybody else from the event
        loop. That one has gone is for others to notice."""
        try:
            for message in self._pipe.receive():
                self._hear(self._decode(message))
        except EOFError:
            self._loop.remove_reader(self._pipe)
        except Exception:
            _log.exception("What the engine says cannot be read.")
            self.is_deaf = True
            self._loop.remove_reader(self._pipe)

    def _hear(self, report: Report) -> None:
        match report:
            case Stepped(events=events, gauges=gauges):
                if events or self.gauges is None or gauges.num_rows != self.gauges.num_rows:
                    self.last_progress = time.monotonic()
                if events or self.gauges is None or gauges.num_advanced != self.gauges.num_advanced:
                    self.last_advanced = self.last_progress
                self.gauges = gauges
                for event in events:
                    self._deliver(event)
                self._loop.call_soon(self._count, events)  # once whoever waits has been told
            case Refused():
                self._observer.forget(report.id)
                subscription = self._open.pop(report.id, None)
                if subscription is not None:
                    subscription.fail(RefusedError(report))
            case Ready():
                self.ready.set_result(report)
            case Failed():
                self.failure = report

    def _count(self, events: list[Event]) -> None:
        for event in events:
            self._observer.notify(event)

    def _deliver(self, event: Event) -> None:
        subscription = self._open.get(event.request_id)
        if subscription is None:
            return
        subscription.push(event)
        if subscription.ended:
            del self._open[event.request_id]
