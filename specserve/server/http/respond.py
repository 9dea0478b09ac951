"""Answers a call, whole or as a stream, within its deadlines; whoever leaves is aborted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import HttpVersion11, web

from specserve.engine.port import QueueTimeoutError
from specserve.outputs import Chunk, RequestOutput
from specserve.server.admission import Place
from specserve.server.answers import Answers, Prepared
from specserve.server.http.context import ARRIVED, context
from specserve.server.wire.errors import INTERNAL_ERROR, WireError, unavailable, wire_error
from specserve.server.wire.fields import header_names
from specserve.server.wire.json.pieces import json_pieces, json_text
from specserve.server.wire.openai.stream import Stream

_SMALL = 4096  # characters of an answer that is written sooner than a thread would begin to
_SCORE_CHARACTERS = 512  # that take as long as the log-probabilities of a token
_AT_ONCE = 2**15  # bytes; asyncio lets twice as many wait before a writer has to
PING_S = 10.0  # of silence, after which a stream gets a comment so that nobody between takes it for dead

_log = logging.getLogger(__name__)

IGNORED = web.RequestKey("ignored", str)  # a header's value: names in the request that mean nothing here
OUTPUTS = web.RequestKey("outputs", Sequence[RequestOutput])  # for the log, of requests that reached the engine
ADAPTER = web.RequestKey("adapter", str)  # that they name, for the log
CHUNKED = web.RequestKey("chunked", bool)  # a head was made, and not sent, that has what follows come in chunks
FAILURE = web.RequestKey("failure", WireError)  # what the client was told, for the log; perhaps after a 200
TENANT = web.RequestKey("tenant", bytes)  # digest of the request's API key, where there are keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The requests of a call, the room that they take, and how their outputs become a body, or events when `stream` is
    true."""

    requests: Sequence[Prepared]
    stream: bool
    place: Place
    body: Callable[[Sequence[RequestOutput], float], Mapping[str, Any]]
    events: Callable[[Sequence[RequestOutput]], Stream]


async def respond(request: web.Request, call: Call) -> web.StreamResponse:
    """The response to a call. Raises what the engine's answers do, and TimeoutError, unless a stream has begun: then
    the error is its last event."""
    server, options = context(request), context(request).options
    last_start, end = _deadline(request, options.queue_timeout_s), _deadline(request, options.request_timeout_s)
    async with asyncio.timeout_at(end):
        requests = await _prepared(request, call.requests, last_start)
        if names := await server.service.ignored(requests):
            ignore(request, names)
    with server.service.start(requests, call.place.end_one) as answers, _expiring(answers, last_start):
        request[OUTPUTS] = answers.outputs
        if (adapter := next((each.request.adapter for each in requests), None)) is not None:
            request[ADAPTER] = adapter
        if call.stream:
            return await _Streaming(request, call, answers, end).run()
        async with asyncio.timeout_at(end):
            outputs = await answers.whole()
        now = time.perf_counter()
        return await sized_response(request, sum(map(_size, outputs)), lambda: call.body(outputs, now))


async def sized_response(request: web.Request, size: int, body: Callable[[], Mapping[str, Any]]) -> web.StreamResponse:
    """The response with this body, made and written on a thread and sent in pieces where its `size`, a number of
    characters, is large."""
    if size <= _SMALL:
        return json_response(body())
    return await _sent(request, await context(request).service.threads.on_thread(lambda: list(json_pieces(body()))))


def _size(output: RequestOutput) -> int:
    """What the work on a body grows with: characters, and log-probabilities for as many as theirs."""
    scores = sum(len(completion.logprobs or ()) for completion in output.outputs) + len(output.prompt_logprobs or ())
    return sum(len(completion.text) for completion in output.outputs) + _SCORE_CHARACTERS * scores


async def _sent(request: web.Request, pieces: list[bytes]) -> web.StreamResponse:
    """A response whose body is too long to be sent at once. Whoever does not read it is left by Watch."""
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    response.content_length = sum(map(len, pieces))
    await response.prepare(request)
    pieces.reverse()
    while pieces:
        await response.write(pieces.pop())
        await asyncio.sleep(0)
    await response.write_eof()
    return response


def ignore(request: web.Request, names: Sequence[str]) -> None:
    """Have the answer's headers tell of names in the request that mean nothing here, beside those told of before."""
    if not names:
        return
    request[IGNORED] = ",".join([*([request[IGNORED]] if IGNORED in request else []), header_names(names)])


def public_error(error: Exception) -> WireError:
    """What the client is told about an error; the log has what it is not told."""
    failure = wire_error(error)
    if failure.code == INTERNAL_ERROR:
        _log.error("A request failed in a way that nobody foresaw.", exc_info=error)
    return failure


def json_response(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(text=json_text(dict(body)), status=status, headers=headers, content_type="application/json")


def _deadline(request: web.Request, seconds: float) -> float | None:
    """The event loop's time so many seconds after the request came; 0 is no limit."""
    return request.get(ARRIVED, asyncio.get_running_loop().time()) + seconds if seconds else None


async def _prepared(request: web.Request, requests: Sequence[Prepared], last_start: float | None) -> list[Prepared]:
    """Raises WireError for a constraint that is not tried by the time at which the engine should begin."""
    service, client = context(request).service, (request.remote or "").encode()
    tenant, shares_drafts = request.get(TENANT, b""), context(request).options.share_drafts
    try:
        async with asyncio.timeout_at(last_start):
            return [await service.prepare(each, tenant, client, shares_drafts) for each in requests]
    except TimeoutError:
        why = "Other constraints are tried before this one's, or it takes long itself. Send the request again."
        raise unavailable(why, code=QueueTimeoutError.code) from None


@contextmanager
def _expiring(answers: Answers, last_start: float | None) -> Iterator[None]:
    """Asks for the end of what has not begun by a time."""
    if last_start is None:
        yield
        return
    timer = asyncio.get_running_loop().call_at(last_start, answers.expire)
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _pinging(answers: Answers) -> Iterator[None]:
    """Lets whoever follows the answers look up from time to time, however silent they are."""

    async def wake() -> None:
        while True:
            await asyncio.sleep(PING_S)
            answers.wake()

    pings = asyncio.create_task(wake())
    try:
        yield
    finally:
        pings.cancel()


class _EventStream(web.StreamResponse):
    """Its head, once made, waits for the first write: one packet, and one time that the client is woken, less."""

    _send_headers_immediately = False

    def __init__(self, media: str) -> None:
        super().__init__(headers={"Content-Type": media, "Cache-Control": "no-cache"})


class _Streaming:
    """One response as a stream of events. Its head is made while the engine computes the prompt, and sent with the
    first event, or the first ping: an error that comes before has a status of its own."""

    def __init__(self, request: web.Request, call: Call, answers: Answers, end: float | None) -> None:
        self._request = request
        self._end = end
        self._answers = answers
        self._stream = call.events(answers.outputs)
        self._response = _EventStream(self._stream.media)
        self._has_sent = False

    async def run(self) -> web.StreamResponse:
        try:
            with _pinging(self._answers):
                async with asyncio.timeout_at(self._end):
                    await self._response.prepare(self._request)
                    self._request[CHUNKED] = self._request.version >= HttpVersion11
                    await self._follow()
        except ConnectionError:
            raise  # nobody is left who could be told
        except Exception as error:
            if not self._has_sent:
                raise
            self._response.force_close()
            await self._send([b"".join(self._stream.frames(event)) for event in self._stream.fail(public_error(error))])
        if self._stream.failure is not None:
            self._request[FAILURE] = self._stream.failure
        await self._response.write_eof()
        return self._response

    async def _follow(self) -> None:
        async for chunks in self._answers:
            frames, size, is_silent = [], 0, True
            for frame in self._frames(chunks):
                frames.append(frame)
                size += len(frame)
                if size >= _AT_ONCE:
                    await self._send(frames)
                    await asyncio.sleep(0)
                    frames, size, is_silent = [], 0, False
            if frames or is_silent:
                await self._send(frames)
            if self._stream.failed:
                self._response.force_close()
                return

    def _frames(self, chunks: Sequence[tuple[int, Chunk]]) -> Iterator[bytes]:
        """What these chunks put on the wire, made when it is wanted."""
        for prompt, chunk in chunks:
            if self._stream.failed:  # nothing follows an error, though several may end in one step
                return
            for event in self._stream.events(chunk, prompt):
                yield from self._stream.frames(event)
        if self._stream.finished and not self._stream.failed:
            for event in self._stream.end(time.perf_counter()):
                yield from self._stream.frames(event)

    async def _send(self, pieces: Sequence[bytes]) -> None:
        """One write for all of them; a ping if there are none. Whoever does not read is left by Watch."""
        self._has_sent = True
        await self._response.write(b"".join(pieces) or self._stream.ping())
