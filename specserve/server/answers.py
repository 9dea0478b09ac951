"""Requests while they run: the engine's events become chunks of text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from specserve.engine.port import QueueTimeoutError, RequestPort
from specserve.engine.request import Request
from specserve.errors import SpecserveError
from specserve.outputs import Chunk, Collector, RequestOutput
from specserve.server.engine.client import RefusedError
from specserve.server.metrics import RequestCounter
from specserve.server.wire.errors import unavailable, wire_error
from specserve.text.detokenizer import Split
from specserve.text.tokenizer import Tokenizer
from specserve.types import Event

_AT_ONCE = 128  # of the engine's messages on one call: of a step there are no more, of a backlog


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request on its way to the engine, with what only this process needs of it."""

    request: Request
    prompt: str | None = None  # as text
    source: str = "structured"  # the field of the body that params.structured comes from
    split: Split | None = None  # makes what tells a completion's reasoning apart
    ignored: tuple[str, ...] = ()  # names of what the chat template does not read

    def having(self, **fields: Any) -> Prepared:
        """The same with other fields of its request."""
        return replace(self, request=msgspec.structs.replace(self.request, **fields))


class _Answer:
    """One request while it runs; `news` is set whenever there is something to take."""

    def __init__(
        self,
        prepared: Prepared,
        port: RequestPort,
        tokenizer: Tokenizer,
        metrics: RequestCounter,
        news: asyncio.Event,
        end_one: Callable[[], None],
    ) -> None:
        request = prepared.request
        self._running = set(range(request.params.n))
        self._end_one = end_one
        self.output = RequestOutput.of(request, prepared.prompt, prepared.split)
        self._port = port
        self._news = news
        self._metrics = metrics
        self._events: deque[Event | SpecserveError] = deque()  # not taken yet
        self._collector = Collector(self.output, request.params, tokenizer, self._stop, lazily=True)
        port.submit(request, self._notify)

    def take(self, most: int) -> list[Chunk]:
        """What has come since the last time, of so many events. Raises the error that ended the request, once all
        before it was taken."""
        events, chunks = self._events, self._collector.chunks
        for _ in range(min(len(events), most)):
            if chunks and isinstance(events[0], SpecserveError):
                self._news.set()
                break
            self._collector.push(events.popleft())
        taken = list(chunks)
        chunks.clear()
        return taken

    def expire(self) -> None:
        self._port.expire(self.output.request_id)

    def abort(self) -> None:
        self._port.abort(self.output.request_id)

    def _notify(self, event: Event | SpecserveError) -> None:
        self._events.append(event)
        self._news.set()
        if isinstance(event, SpecserveError):
            self._ended(*self._running)
        elif event.finish_reason is not None:
            self._ended(event.index)

    def _stop(self, request_id: str, index: int) -> None:
        """A stop string, which the engine cannot see, has ended a completion."""
        self._metrics.stopped(request_id, index)
        self._port.abort(request_id, index)
        self._ended(index)

    def _ended(self, *indexes: int) -> None:
        for index in self._running.intersection(indexes):
            self._running.remove(index)
            self._end_one()


class Answers:
    """The requests of one call, one for each prompt, which are submitted at once, each where `place` says. Iterate
    over their chunks; `outputs` grow with them. `end_one` is called whenever the engine is done with a completion. A
    context manager: whatever still runs when it is left is aborted."""

    def __init__(
        self,
        requests: Sequence[Prepared],
        place: Callable[[Request], RequestPort],
        tokenizer: Tokenizer,
        metrics: RequestCounter,
        end_one: Callable[[], None],
    ) -> None:
        self._news = asyncio.Event()
        self._answers = [
            _Answer(each, place(each.request), tokenizer, metrics, self._news, end_one) for each in requests
        ]
        self.outputs = [answer.output for answer in self._answers]

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        """What has come since the last time, as (prompt, chunk); nothing after `wake`. Raises EngineError when the
        engine is gone, and WireError when it refused one of the requests or one has waited too long."""
        while not all(output.finished for output in self.outputs):
            await self._news.wait()
            self._news.clear()
            chunks: list[tuple[int, Chunk]] = []
            for prompt, answer in enumerate(self._answers):
                chunks += [(prompt, chunk) for chunk in _taken(answer, _AT_ONCE - len(chunks))]
            yield chunks
            if len(chunks) >= _AT_ONCE:  # there may be more, and others wait too
                self._news.set()
                await asyncio.sleep(0)

    async def whole(self) -> list[RequestOutput]:
        """The outputs when all completions have ended."""
        async for _ in self:
            pass
        return self.outputs

    def wake(self) -> None:
        """Wake whoever iterates, though there is nothing new."""
        self._news.set()

    def expire(self) -> None:
        """End those that still wait for their first step."""
        for answer in self._answers:
            answer.expire()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exception: object) -> None:
        for answer in self._answers:
            answer.abort()


def _taken(answer: _Answer, most: int) -> list[Chunk]:
    try:
        return answer.take(most) if most > 0 else []
    except RefusedError as error:
        if error.code == QueueTimeoutError.code:
            raise unavailable(f"{error} Send it again.", code=error.code) from error
        raise wire_error(error) from error
