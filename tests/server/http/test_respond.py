"""A stream whose answer fails in a way that nobody foresaw: before its first event, and behind it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from specserve.errors import EngineError
from specserve.server.admission import Admission
from specserve.server.http.context import CONTEXT
from specserve.server.http.middleware import translate_errors
from specserve.server.http.respond import Call, respond
from specserve.server.options import ServeOptions


class Answers:
    """Says so many things and then raises."""

    def __init__(self, num_chunks: int, error: Exception) -> None:
        self.outputs: list[Any] = []
        self._num_chunks, self._error = num_chunks, error

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Any]]]:
        for number in range(self._num_chunks):
            yield [(0, number)]
        raise self._error

    def expire(self) -> None:
        raise AssertionError("nothing waits here")

    def wake(self) -> None:
        pass


class Events:
    """A stream of numbers."""

    media = "text/event-stream"
    finished = failed = False
    failure: Any = None

    def events(self, chunk: int, prompt: int) -> list[str]:
        return [json.dumps(chunk)]

    def fail(self, error: Any) -> list[str]:
        self.failure = error
        return [json.dumps(error.body)]

    def frames(self, event: str) -> list[bytes]:
        return [f"data: {event}\n\n".encode()]


def application(num_chunks: int, error: Exception) -> web.Application:
    """Every GET is answered by such a stream."""
    answers: Any = Answers(num_chunks, error)

    @contextmanager
    def start(requests: Any, end_one: Any) -> Any:
        end_one()
        yield answers

    async def ignored(requests: Any) -> list[str]:
        return []

    async def handler(request: web.Request) -> web.StreamResponse:
        with admission.enter(1) as place:
            call = Call(requests=[], stream=True, place=place, body=dict, events=lambda _: Events())  # type: ignore[arg-type, return-value]
            return await respond(request, call)  # type: ignore[arg-type, return-value]

    admission = Admission(1)
    app = web.Application(middlewares=[translate_errors])
    service = SimpleNamespace(start=start, ignored=ignored, metrics=SimpleNamespace(refused=lambda status: None))
    app[CONTEXT] = SimpleNamespace(options=ServeOptions(), service=service)  # type: ignore[misc]
    app.add_routes([web.get("/", handler)])
    return app


def played(num_chunks: int, error: Exception) -> tuple[int, str]:
    """Status and text of the response."""

    async def play() -> tuple[int, str]:
        async with TestClient(TestServer(application(num_chunks, error))) as client, client.get("/") as response:
            return response.status, await response.text()

    return asyncio.run(play())


def test_before_the_first_event_it_is_a_status(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status, text = played(0, ZeroDivisionError("in /home/somebody/secret.py"))
    assert (status, json.loads(text)["error"]["code"]) == (500, "internal_error")
    assert "secret" not in text
    assert "secret" in caplog.text, "the log has it"


def sent(request: bytes) -> bytes:
    """All that comes back over one connection, of a server whose streams fail before their first event."""

    async def play() -> bytes:
        async with TestServer(application(0, EngineError("The engine is gone."))) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request)
            async with asyncio.timeout(20):
                answer = await reader.read()
            writer.close()
            return answer

    return asyncio.run(play())


def test_its_head_takes_the_place_of_the_one_that_was_made() -> None:
    """Of the stream that was to come nothing is sent, and the connection goes on."""
    answer = sent(
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    before, *responses = answer.split(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert (before, len(responses), answer.count(b"HTTP/1.1")) == (b"", 2, 2)
    for response in responses:
        head, _, body = response.partition(b"\r\n\r\n")
        assert b"text/event-stream" not in head and b"Content-Length" not in head
        assert head.count(b"Transfer-Encoding: chunked") == 1
        size, text, *end = body.split(b"\r\n")
        assert (int(size, 16), end) == (len(text), [b"0", b"", b""])
        assert json.loads(text)["error"]["message"] == "The engine is gone."


def test_to_a_client_of_http_1_0_it_is_sent_whole() -> None:
    head, _, body = sent(b"GET / HTTP/1.0\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 500 ") and b"Transfer-Encoding" not in head
    assert json.loads(body)["error"]["message"] == "The engine is gone."


def test_behind_it_it_is_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    """And no second response in the middle of the first."""
    with caplog.at_level(logging.ERROR):
        status, text = played(2, ZeroDivisionError("in /home/somebody/secret.py"))
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line]
    assert (status, events[:2]) == (200, [0, 1])
    assert [events[2]["error"]["code"], len(events)] == ["internal_error", 3]
    assert "secret" not in text
    assert "secret" in caplog.text


def test_what_was_foreseen_is_told_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """But for the line of the request: with the status of its failure, though 200 was sent."""
    with caplog.at_level(logging.INFO):
        status, text = played(1, EngineError("The engine is gone."))
    assert json.loads(text.split("data: ")[-1])["error"]["message"] == "The engine is gone."
    (line,) = [vars(record) for record in caplog.records if record.name.startswith("specserve")]
    assert (status, line["status"], line["error"], line["levelname"]) == (200, 500, "engine_error", "WARNING")
