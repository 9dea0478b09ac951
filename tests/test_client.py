"""The clients against a server on real sockets that answers what it is told, with the bodies of the server's own wire
types; time is virtual wherever a client waits."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, web

import specserve
from specserve import AsyncClient, Client
from specserve.client import transport
from specserve.errors import ConfigError, InputError, ServerError
from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.wire.errors import WireError, overloaded, unauthorized, unavailable
from specserve.server.wire.json.pieces import json_text
from specserve.server.wire.openai.replies import Reply, chat_body, completion_body, model_list
from specserve.server.wire.openai.stream import ChatStream, CompletionStream, Stream
from specserve.server.wire.openai.tokenization import detokenize_body, tokenize_body
from specserve.types import SequenceStats

InVirtualTime = Callable[[Awaitable[Any]], Any]
MESSAGES = [{"role": "user", "content": "Hé"}]
STATS = SequenceStats(arrived=1.0, first_scheduled=1.1, first_token=1.5, finished=2.5, num_steps=2)


class Words:
    special_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"


REPLY = Reply(id="r-1", created=5, model="tiny", vocabulary=Words(), include_usage=True)
WHOLE = RequestOutput("r-1", "p", [1, 2], [CompletionOutput(0, "Hé llo", [3, 4], None, "stop", None, None, STATS)])


def events(stream: Stream) -> list[str]:
    """Two chunks of text, the end, the usage and the end mark."""
    chunks = [
        Chunk("r-1", 0, "Hé", [3], None, None, None),
        Chunk("r-1", 0, " llo", [4], None, "stop", None),
    ]
    return [event for chunk in chunks for event in stream.push(chunk)] + stream.end(2.5)


def streamed(texts: list[str], separator: str = "\n\n") -> bytes:
    return "".join(f"data: {text}{separator}" for text in texts).encode()


CHAT_EVENTS = events(ChatStream(REPLY, WHOLE))
COMPLETION_EVENTS = events(CompletionStream(REPLY, [WHOLE]))
REFUSED = WireError(400, "invalid_request_error", "temperature is -1.", param="temperature", code="bad_value")


@dataclass
class Answer:
    """What the server sends, in pieces; after them, if it `hangs`, nothing until the client leaves; if it `breaks`, the
    connection is cut."""

    body: bytes = b"{}"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: int = 1
    lingers: float = 0.0  # seconds from the last piece to the end of the body
    hangs: bool = False
    breaks: bool = False

    @classmethod
    def json(cls, body: Any, status: int = 200, **headers: str) -> Answer:
        return cls(json_text(body).encode(), status, headers)

    @classmethod
    def error(cls, error: WireError) -> Answer:
        return cls(json_text(error.body).encode(), error.status, error.headers)


@dataclass
class Server:
    """Gives its answers in turn, the last one for ever, and keeps what it was asked."""

    answers: list[Answer]
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    left: threading.Event = field(default_factory=threading.Event)  # a client has gone before the end of its answer
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.asked.append((request.method, request.path, json.loads(text) if text else None))
        self.headers.append(dict(request.headers))
        self.times.append(asyncio.get_running_loop().time())
        self.connections.add(request.transport)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        response = web.StreamResponse(status=answer.status, headers=answer.headers)
        await response.prepare(request)
        size = -(-len(answer.body) // answer.pieces) or 1
        for start in range(0, len(answer.body), size):
            await response.write(answer.body[start : start + size])
            await asyncio.sleep(0)
        await asyncio.sleep(answer.lingers)
        await self._stay(request, answer)
        return response

    async def _stay(self, request: web.Request, answer: Answer) -> None:
        if answer.breaks:
            assert request.transport is not None
            request.transport.abort()
        if answer.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()

    @asynccontextmanager
    async def running(self, socket: Path | None = None) -> AsyncIterator[Server]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0) if socket is None else web.UnixSite(runner, str(socket))
        await site.start()
        if socket is None:
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECSERVE_BASE_URL", raising=False)
    monkeypatch.delenv("SPECSERVE_API_KEY", raising=False)


@pytest.fixture
def ask(in_virtual_time: InVirtualTime) -> Callable[..., tuple[Any, Server]]:
    """Runs a call of AsyncClient against these answers; gives its result, or the error it raised, and the server."""

    def run(call: Callable[[AsyncClient], Awaitable[Any]], *answers: Answer, **options: Any) -> tuple[Any, Server]:
        async def main() -> tuple[Any, Server]:
            async with Server(list(answers)).running() as server, AsyncClient(server.url, **options) as client:
                try:
                    return await call(client), server
                except (ServerError, InputError) as error:
                    return error, server

        return in_virtual_time(main())

    return run


Ask = Callable[..., tuple[Any, Server]]


async def collected(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


# --- calls ------------------------------------------------------------------------------------------------------------

TOKENS = tokenize_body([1, 2], 100)
CALLS: list[tuple[str, Callable[[Any], Any], Any, tuple[str, str, Any]]] = [
    (
        "chat",
        lambda c: c.chat(MESSAGES, temperature=0.5, speculative={"drafter": "ngram"}),
        chat_body(REPLY, WHOLE, 2.5),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": MESSAGES, "temperature": 0.5, "speculative": {"drafter": "ngram"}},
        ),
    ),
    (
        "complete",
        lambda c: c.complete([[1, 2], [3]], max_tokens=4),
        completion_body(REPLY, [WHOLE], 2.5),
        ("POST", "/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 4}),
    ),
    ("models", lambda c: c.models(), model_list(["tiny"], 5, 100, "natively"), ("GET", "/v1/models", None)),
    (
        "tokenize",
        lambda c: c.tokenize("a", return_token_strs=False),
        TOKENS,
        ("POST", "/tokenize", {"prompt": "a", "return_token_strs": False}),
    ),
    (
        "tokenize chat",
        lambda c: c.tokenize(messages=MESSAGES, add_generation_prompt=True),
        TOKENS,
        ("POST", "/tokenize", {"messages": MESSAGES, "add_generation_prompt": True}),
    ),
    (
        "detokenize",
        lambda c: c.detokenize([1, 2]),
        detokenize_body("é"),
        ("POST", "/detokenize", {"tokens": [1, 2]}),
    ),
    ("health", lambda c: c.health(), {"status": "ok"}, ("GET", "/health", None)),
    ("stats", lambda c: c.stats(), {"running": 1}, ("GET", "/stats", None)),
]


@pytest.mark.parametrize(("call", "body", "expected"), [case[1:] for case in CALLS], ids=[case[0] for case in CALLS])
def test_each_call_sends_its_fields_and_gives_the_body(ask: Ask, call: Any, body: Any, expected: Any) -> None:
    found, server = ask(call, Answer.json(body))
    assert found == json.loads(json_text(body))
    assert server.asked == [expected]
    assert server.headers[0].get("Content-Type") == ("application/json" if expected[0] == "POST" else None)
    assert "Authorization" not in server.headers[0]


def test_all_calls_are_in_both_clients() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert {case[0].split()[0] for case in CALLS} | {"stream", "stream_chat", "close"} == public(Client)


@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("pieces", [1, 7, 10_000])
def test_streams_give_every_chunk(ask: Ask, pieces: int, separator: str) -> None:
    answer = Answer(b": ping\n\n" + streamed(CHAT_EVENTS, separator), pieces=pieces)
    found, server = ask(lambda c: collected(c.stream_chat(MESSAGES, max_tokens=3)), answer)
    assert found == [json.loads(text) for text in CHAT_EVENTS[:-1]]
    assert found[-1]["usage"]["completion_tokens"] == 2
    assert server.asked == [("POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stream": True})]
    found, server = ask(lambda c: collected(c.stream("a")), Answer(streamed(COMPLETION_EVENTS, separator)))
    assert "".join(choice["text"] for chunk in found for choice in chunk["choices"]) == "Hé llo"
    assert server.asked == [("POST", "/v1/completions", {"prompt": "a", "stream": True})]


def test_connections_are_used_again_after_streams_and_answers(ask: Ask) -> None:
    async def calls(client: AsyncClient) -> None:
        for _ in range(3):
            await collected(client.stream("a"))
            await client.complete("a")

    answers = [Answer(streamed(COMPLETION_EVENTS)), Answer.json({})] * 3
    _, server = ask(calls, *answers)
    assert len(server.asked) == 6
    assert len(server.connections) == 1


@pytest.mark.parametrize(("lingers", "connections", "seconds"), [(0.5, 1, 0.5), (50.0, 2, 1.0)])
def test_the_end_of_a_body_is_awaited_for_a_second(ask: Ask, lingers: float, connections: int, seconds: float) -> None:
    async def calls(client: AsyncClient) -> float:
        begin = asyncio.get_running_loop().time()
        await collected(client.stream("a"))
        took = asyncio.get_running_loop().time() - begin
        await client.models()
        return took

    took, server = ask(calls, Answer(streamed(COMPLETION_EVENTS), lingers=lingers), OK)
    assert took == pytest.approx(seconds, abs=1e-6)
    assert len(server.connections) == connections


# --- what is wrong before anything is sent ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "param", "said"),
    [
        (lambda c: c.chat(MESSAGES, temprature=1), "temprature", "Did you mean 'temperature'"),
        (lambda c: c.chat(MESSAGES, prompt="a"), "prompt", "/v1/completions"),
        (lambda c: c.complete("a", messages=MESSAGES), "messages", "/v1/chat/completions"),
        (lambda c: c.chat(MESSAGES, stream=True), "stream", "stream_chat"),
        (lambda c: collected(c.stream("a", stream=False)), "stream", "stream_chat"),
        (lambda c: c.complete("a", ech=True), "ech", "Did you mean 'echo'"),
        (lambda c: c.detokenize([1], modell="x"), "modell", "Did you mean 'model'"),
        (lambda c: c.tokenize("a", add_special_token=True), "add_special_token", "add_special_tokens"),
        (lambda c: c.tokenize("a", messages=MESSAGES), "prompt", "Give one of them"),
        (lambda c: c.tokenize(), "prompt", "Give one of them"),
        (lambda c: c.chat(MESSAGES, seed=float("nan")), None, "JSON"),
        (lambda c: c.complete({1, 2}), None, "JSON"),
    ],
)
def test_wrong_calls_send_nothing(ask: Ask, call: Any, param: str | None, said: str) -> None:
    error, server = ask(lambda client: _awaited(call, client), Answer())
    assert isinstance(error, InputError)
    assert error.param == param
    assert said in str(error)
    assert server.asked == []


async def _awaited(call: Any, client: AsyncClient) -> Any:
    return await call(client)


def test_fields_that_the_server_refuses_are_left_to_it(ask: Ask) -> None:
    _, server = ask(lambda c: c.chat(MESSAGES, guided_regex="a+", best_of=1), Answer())
    assert server.asked[0][2] == {"messages": MESSAGES, "guided_regex": "a+", "best_of": 1}


@pytest.mark.parametrize(
    "options",
    [{"base_url": "localhost:8000"}, {"base_url": "http://"}, {"timeout": 0}, {"max_retries": -1}, {"timeout": -1.0}],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    for kind in (AsyncClient, Client):
        with pytest.raises(ConfigError):
            kind(**options)


# --- where the server is ----------------------------------------------------------------------------------------------


def test_the_environment_names_server_and_key(in_virtual_time: InVirtualTime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(server: Server) -> None:
        async with server.running():
            monkeypatch.setenv("SPECSERVE_BASE_URL", server.url + "/v1/")
            monkeypatch.setenv("SPECSERVE_API_KEY", "from-environment")
            async with AsyncClient() as client:
                await client.models()
            async with AsyncClient(server.url + "/under/", api_key="given") as client:
                await client.models()

    server = Server([Answer()])
    in_virtual_time(main(server))
    assert [path for _, path, _ in server.asked] == ["/v1/models", "/under/v1/models"]
    assert [sent["Authorization"] for sent in server.headers] == ["Bearer from-environment", "Bearer given"]


def test_without_settings_the_server_is_where_serve_puts_it() -> None:
    assert AsyncClient()._transport._url == "http://127.0.0.1:8000"


def test_unix_sockets(in_virtual_time: InVirtualTime, tmp_path: Path) -> None:
    async def main() -> Any:
        server = Server([Answer(b'{"status": "ok"}')])
        async with server.running(tmp_path / "s"), AsyncClient(uds=tmp_path / "s") as client:
            return await client.health()

    assert in_virtual_time(main()) == {"status": "ok"}


def test_more_requests_at_once_than_a_pool_of_a_hundred(in_virtual_time: InVirtualTime) -> None:
    async def main() -> int:
        async with Server([Answer(hangs=True)]).running() as server, AsyncClient(server.url) as client:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.models()) for _ in range(130)]
                while len(server.asked) < 130:
                    await asyncio.sleep(0.01)
                for task in tasks:
                    task.cancel()
            return len(server.asked)

    assert in_virtual_time(main()) == 130


# --- errors, and sending again ----------------------------------------------------------------------------------------


def test_an_error_has_all_the_server_said(ask: Ask) -> None:
    error, server = ask(lambda c: c.complete("a", temperature=-1), Answer.error(REFUSED))
    assert isinstance(error, ServerError)
    assert isinstance(error, specserve.SpecserveError)
    assert (
        error.status,
        error.type,
        error.code,
        error.param,
        error.message,
        error.retry_after,
        error.should_retry,
    ) == (*(400, "invalid_request_error", "bad_value", "temperature", "temperature is -1.", None, False),)
    assert str(error) == "temperature is -1."
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>\nBad  gateway</html>", "<html> Bad gateway</html>"),
        (b"", "The server answered with HTTP status 400."),
        (b'{"error": "plain"}', "plain"),
        (b'{"object": "error", "message": "old", "type": "x", "code": 7}', "old"),
        (b'{"error": {"code": 1}}', '{"error": {"code": 1}}'),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_errors_of_other_servers_and_proxies(ask: Ask, body: bytes, message: str) -> None:
    error, _ = ask(lambda c: c.models(), Answer(body, 400))
    assert error.message == message
    assert (error.status, error.type) == (400, "x" if b"old" in body else "server_error")
    assert error.code == ("7" if b"old" in body else None)


def waits(server: Server) -> list[float]:
    return [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]


OK = Answer.json({"data": []})
AGAIN = {"x-should-retry": "true"}
NEVER = {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([Answer.error(overloaded("full", 3.0)), Answer.error(unavailable("draining", retry_after=7.0)), OK], [3, 7]),
        ([Answer(b"", 503, {"Retry-After": "0"}), OK], [0]),
        ([Answer(b"", 503, {"Retry-After": "-4"}), OK], [0]),
        ([Answer(b"", 418, {**AGAIN, "Retry-After": "2.5"}), OK], [2.5]),
        ([Answer(b"", 503, {"Retry-After": "59"}), OK], [59]),
    ],
)
def test_requests_are_sent_again_when_the_server_says(ask: Ask, answers: list[Answer], expected: list[float]) -> None:
    found, server = ask(lambda c: c.models(), *answers)
    assert found == {"data": []}
    assert waits(server) == pytest.approx(expected, abs=1e-6)
    assert len({json.dumps(asked) for asked in server.asked}) == 1


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_without_a_time_the_waits_double(ask: Ask, status: int) -> None:
    error, server = ask(lambda c: c.models(), Answer(b"", status), max_retries=6)
    assert (error.status, error.retry_after, error.should_retry) == (status, None, True)
    for wait, middle in zip(waits(server), [0.5, 1, 2, 4, 8, 8], strict=True):
        assert 0.75 * middle <= wait <= 1.25 * middle + 1e-6


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"", 400),
        Answer(b"", 401),
        Answer(b"", 302, {"Location": "/elsewhere"}),
        Answer(b"", 503, NEVER),
        Answer(b"", 429, {**NEVER, "Retry-After": "1"}),
        Answer(b"", 503, {"Retry-After": "61"}),
        Answer(b"no json"),
        Answer.error(unauthorized()),
    ],
)
def test_other_failures_are_told_at_once(ask: Ask, answer: Answer) -> None:
    error, server = ask(lambda c: c.models(), answer)
    assert isinstance(error, ServerError)
    assert error.status == answer.status
    assert len(server.asked) == 1


def test_a_date_says_when_to_come_back(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.time, "time", lambda: 1_000_000.0)
    dated = Answer(b"", 503, {"Retry-After": formatdate(1_000_020, usegmt=True)})
    _, server = ask(lambda c: c.models(), dated, OK)
    assert waits(server) == pytest.approx([20], abs=1e-6)
    error, _ = ask(lambda c: c.models(), Answer(b"", 400, {"Retry-After": "soon"}))
    assert error.retry_after is None
    error, _ = ask(lambda c: c.models(), Answer(b"", 400, {"Retry-After": "inf"}))
    assert error.retry_after is None


def test_max_retries_counts_the_attempts_after_the_first(ask: Ask) -> None:
    for retries, attempts in ((0, 1), (1, 2), (3, 4)):
        _, server = ask(lambda c: c.models(), Answer(b"", 500), max_retries=retries)
        assert len(server.asked) == attempts
    _, server = ask(lambda c: c.health(), Answer.error(unavailable("loading")))
    assert len(server.asked) == 1  # health is about now


def test_streams_are_sent_again_before_they_begin_and_never_after(ask: Ask) -> None:
    full = Answer.error(overloaded("full", 1.0))
    found, server = ask(lambda c: collected(c.stream("a")), full, Answer(streamed(COMPLETION_EVENTS)))
    assert (len(found), len(server.asked)) == (len(COMPLETION_EVENTS) - 1, 2)
    error, server = ask(lambda c: collected(c.stream("a")), Answer(streamed(COMPLETION_EVENTS[:1]), breaks=True))
    assert (error.type, len(server.asked)) == ("connection_error", 1)


def test_a_stream_that_fails_or_does_not_end_is_an_error(ask: Ask) -> None:
    seen: list[Any] = []

    async def read(client: AsyncClient) -> None:
        async for chunk in client.stream("a"):
            seen.append(chunk)  # noqa: PERF401 - what came before an error counts

    failed = [COMPLETION_EVENTS[0], json_text(WireError(500, "server_error", "NaN", code="completion_failed").body)]
    error, _ = ask(read, Answer(streamed(failed)))
    assert (error.status, error.code, error.message, len(seen)) == (200, "completion_failed", "NaN", 1)
    error, _ = ask(read, Answer(streamed(COMPLETION_EVENTS[:-1])))
    assert error.type == "connection_error"
    assert "before the end" in error.message
    error, _ = ask(read, Answer(streamed(["{"])))
    assert "no valid JSON" in error.message


def test_no_server_is_an_error_after_all_attempts(in_virtual_time: InVirtualTime) -> None:
    async def main() -> tuple[ServerError, float]:
        async with Server([OK]).running() as server:
            url = server.url
        async with AsyncClient(url, max_retries=2) as client:
            with pytest.raises(ServerError) as caught:
                await client.models()
        return caught.value, asyncio.get_running_loop().time()

    error, seconds = in_virtual_time(main())
    assert (error.status, error.type, error.should_retry) == (None, "connection_error", True)
    assert "127.0.0.1" in error.message
    assert 0.75 * 1.5 <= seconds <= 1.25 * 1.5 + 0.1


def test_a_connection_that_breaks_is_tried_again(ask: Ask) -> None:
    found, server = ask(lambda c: c.models(), Answer(b'{"da', breaks=True), OK)
    assert (found, len(server.asked)) == ({"data": []}, 2)


def test_timeouts_hold_for_answers_and_for_silence_in_streams(in_virtual_time: InVirtualTime) -> None:
    async def main() -> tuple[ServerError, ServerError, int, Server]:
        seen = 0
        slow = Answer(streamed(COMPLETION_EVENTS[:1]), hangs=True)
        async with Server([slow]).running() as server, AsyncClient(server.url, timeout=5.0) as client:
            with pytest.raises(ServerError) as whole:
                await client.models()
            assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.1)
            with pytest.raises(ServerError) as stream:
                async for _ in client.stream("a"):
                    seen += 1
            assert asyncio.get_running_loop().time() == pytest.approx(10.0, abs=0.1)
        return whole.value, stream.value, seen, server

    whole, stream, seen, server = in_virtual_time(main())
    assert (whole.type, whole.status, whole.should_retry) == ("timeout_error", None, False)
    assert (stream.type, seen) == ("timeout_error", 1)
    assert len(server.asked) == 2


# --- leaving early ----------------------------------------------------------------------------------------------------

ENDLESS = Answer(streamed(COMPLETION_EVENTS[:1]), hangs=True)


async def _break(client: AsyncClient) -> None:
    async for _ in client.stream("a"):
        break


async def _leave_with(client: AsyncClient) -> None:
    async with client.stream("a") as stream:
        async for _ in stream:
            break
        held = aiter(stream)  # so that only leaving `async with` can end it
    del held


async def _close(client: AsyncClient) -> None:
    stream = client.stream("a")
    chunks = aiter(stream)
    await anext(chunks)
    await stream.close()
    with pytest.raises((ServerError, StopAsyncIteration)):
        await anext(chunks)


async def _cancel(client: AsyncClient) -> None:
    task = asyncio.ensure_future(collected(client.stream("a")))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [_break, _leave_with, _close, _cancel])
def test_leaving_a_stream_closes_its_connection(in_virtual_time: InVirtualTime, leave: Any) -> None:
    async def main() -> bool:
        async with Server([ENDLESS]).running() as server, AsyncClient(server.url) as client:
            await leave(client)
            await asyncio.sleep(1)
            return server.left.is_set()

    assert in_virtual_time(main())


def test_a_stream_is_read_once(ask: Ask) -> None:
    async def twice(client: AsyncClient) -> None:
        stream = client.stream("a")
        await collected(stream)
        await collected(stream)

    error, server = ask(twice, Answer(streamed(COMPLETION_EVENTS)))
    assert isinstance(error, InputError)
    assert len(server.asked) == 1

    async def closed(client: AsyncClient) -> None:
        async with client.stream("a") as stream:
            pass
        await collected(stream)

    error, server = ask(closed, Answer(streamed(COMPLETION_EVENTS)))
    assert (type(error), server.asked) == (InputError, [])


def test_a_closed_client_and_a_foreign_loop_are_refused() -> None:
    client = AsyncClient("http://127.0.0.1:9", max_retries=0)

    async def ask_once() -> None:
        with pytest.raises(ServerError):
            await client.models()

    async def ask_again() -> None:
        with pytest.raises(InputError, match="another event loop"):
            await client.models()
        await client.close()
        with pytest.raises(InputError, match="closed"):
            await client.models()

    asyncio.run(ask_once())
    asyncio.run(ask_again())


# --- without asyncio --------------------------------------------------------------------------------------------------


@pytest.fixture
def serving() -> Iterator[Callable[..., Server]]:
    """Starts servers on a thread of their own, in real time."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running: list[Any] = []

    def start(*answers: Answer) -> Server:
        context = Server(list(answers)).running()
        running.append(context)
        return asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()

    yield start
    for context in running:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


Serving = Callable[..., Server]


def client_threads() -> int:
    return sum(thread.name == "specserve-client" for thread in threading.enumerate())


def test_the_blocking_client_makes_every_call(serving: Serving) -> None:
    server = serving(*(Answer.json(body) for _, _, body, _ in CALLS))
    with Client(server.url) as client:
        for _, call, body, _ in CALLS:
            assert call(client) == json.loads(json_text(body))
        assert client_threads() == 1
    assert server.asked == [expected for *_, expected in CALLS]
    assert client_threads() == 0


def test_the_blocking_client_streams_and_raises(serving: Serving) -> None:
    server = serving(
        Answer(streamed(CHAT_EVENTS)), Answer(streamed(COMPLETION_EVENTS)), Answer.error(REFUSED), Answer.error(REFUSED)
    )
    with Client(server.url) as client:
        assert list(client.stream_chat(MESSAGES)) == [json.loads(text) for text in CHAT_EVENTS[:-1]]
        stream = client.stream("a")
        assert len(list(stream)) == len(COMPLETION_EVENTS) - 1
        with pytest.raises(InputError, match="read or closed"):
            list(stream)
        with pytest.raises(ServerError, match="temperature is -1"):
            list(client.stream("a"))
        with pytest.raises(ServerError, match="temperature is -1"):
            client.complete("a")


def test_the_blocking_client_works_inside_a_running_loop(serving: Serving) -> None:
    server = serving(OK)

    async def notebook_cell() -> Any:
        with Client(server.url) as client:
            return client.models()

    assert asyncio.run(notebook_cell()) == {"data": []}


@pytest.mark.parametrize("how", ["break", "with", "close"])
def test_leaving_a_blocking_stream_closes_its_connection(serving: Serving, how: str) -> None:
    server = serving(ENDLESS)
    with Client(server.url) as client:
        stream = client.stream("a")
        chunks = iter(stream)
        next(chunks)
        if how == "break":
            del chunks
            gc.collect()
        elif how == "with":
            with stream:
                pass
        else:
            stream.close()
        assert server.left.wait(60)


@pytest.mark.parametrize("body", [False, True])
def test_closing_ends_calls_of_other_threads(serving: Serving, monkeypatch: pytest.MonkeyPatch, body: bool) -> None:
    """Whether they wait for an answer's head, or are about to read its body."""
    server, reads = serving(Answer(hangs=True)), threading.Event()
    text = ClientResponse.text

    async def noted(self: ClientResponse, *args: Any, **options: Any) -> str:
        reads.set()
        while self._session is not None and not self._session.closed:
            await asyncio.sleep(0)
        return await text(self, *args, **options)

    if body:
        monkeypatch.setattr(ClientResponse, "text", noted)
    client = Client(server.url)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            client.models()
        except (InputError, ServerError) as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not server.asked:
        threading.Event().wait(0.005)
    if body:
        assert reads.wait(60)
    client.close()
    thread.join(60)
    assert len(errors) == 1
    assert server.left.wait(60)
    for use in (client.models, lambda: list(client.stream("a"))):
        with pytest.raises(InputError, match="closed"):
            use()
    client.close()  # again does no harm


def test_an_interrupt_ends_the_request(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import Future

    server = serving(Answer(hangs=True))

    def interrupted(self: Future[Any], timeout: float | None = None) -> Any:
        while not server.asked:
            threading.Event().wait(0.005)
        raise KeyboardInterrupt

    with Client(server.url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.models()
        assert server.left.wait(60)


def test_a_client_nobody_closed_ends_with_its_last_reference_or_the_interpreter(serving: Serving) -> None:
    server = serving(OK)
    client = Client(server.url)
    client.models()
    del client
    gc.collect()
    assert client_threads() == 0
    code = f"import specserve; c = specserve.Client({server.url!r}); print(c.models()['data'])"
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
