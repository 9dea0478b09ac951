"""Answers as long as a context: while they are written the event loop is free, and memory holds little more than what
is sent."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from asyncio import events
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from specserve.engine.packed import Packed, packed
from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.admission import Admission, Place
from specserve.server.http.context import CONTEXT
from specserve.server.http.respond import Call, respond
from specserve.server.options import ServeOptions
from specserve.server.threads import Threads
from specserve.server.wire.answer import PlainText
from specserve.server.wire.openai.replies import Reply, chat_body, completion_body
from specserve.server.wire.openai.responses import LOGPROBS, ResponsesRequest
from specserve.server.wire.openai.responses_stream import ResponseStream, response_body
from specserve.server.wire.openai.stream import ChatStream, CompletionStream
from specserve.types import SequenceStats, TokenLogprobs

NUM_TOKENS = 2048
NUM_TOP = 20
HOLDS_S = 0.1  # of CPU time, at the most; what is written in one go holds the loop five times as long
STATS = SequenceStats(arrived=1.0, first_scheduled=1.0, first_token=1.0, finished=2.0, num_steps=NUM_TOKENS)


class Words:
    special_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        return b"word%d " % token_id


def scored(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.123456789, 1, {token + i: -0.123456789 - i for i in range(NUM_TOP)})


def scores(num_tokens: int) -> Packed:
    """As they come from the engine, a step at a time."""
    found = Packed()
    for token in range(num_tokens):
        found += Packed(packed([scored(token)]) or ())
    return found


def output(num_prompt: int, num_tokens: int) -> RequestOutput:
    text = b"".join(map(Words().token_bytes, range(num_tokens))).decode()
    ended: Any = CompletionOutput(0, text, list(range(num_tokens)), scores(num_tokens), "length", stats=STATS)
    prompt: Any = Packed(packed([None, *map(scored, range(1, num_prompt))]) or ()) if num_prompt else None
    return RequestOutput("r", "", list(range(num_prompt)), [ended], prompt)


class Answers:
    """An answer that is whole at once: a stream gets all of it in one go."""

    def __init__(self, output: RequestOutput) -> None:
        self.outputs = [output]

    async def whole(self) -> list[RequestOutput]:
        return self.outputs

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Chunk]]]:
        (ended,) = self.outputs[0].outputs
        assert ended.logprobs is not None
        ids, text = ended.token_ids, ended.text
        yield [(0, Chunk("r", 0, text, ids[:1], ended.logprobs[:1]))]
        rest = [
            (0, Chunk("r", 0, "", [token], entry)) for token, entry in zip(ids[1:], each(ended.logprobs), strict=True)
        ]
        yield [*rest, (0, Chunk("r", 0, "", [], None, "length", stats=STATS))]

    def wake(self) -> None:
        pass


def each(entries: Any) -> Iterator[Any]:
    for block in entries._blocks[1:]:
        yield Packed([block])


def application(output: RequestOutput, stream: bool, make: Callable[[Reply], dict[str, Any]]) -> web.Application:
    @contextmanager
    def start(requests: Any, ended: Any) -> Iterator[Any]:
        yield Answers(output)

    async def ignored(requests: Any) -> list[str]:
        return []

    async def handler(request: web.Request) -> web.StreamResponse:
        reply = Reply(id="x", created=1, model="tiny", vocabulary=Words(), echo=bool(output.prompt_token_ids))
        return await respond(request, Call(requests=[], place=Place(Admission(1), 1), stream=stream, **make(reply)))

    async def close(app: web.Application) -> None:
        threads.close()

    app = web.Application()
    threads = Threads()
    app.on_cleanup.append(close)
    service = SimpleNamespace(start=start, threads=threads, ignored=ignored)
    app[CONTEXT] = SimpleNamespace(options=ServeOptions(queue_timeout_s=0), service=service)  # type: ignore[misc]
    app.add_routes([web.get("/", handler)])
    return app


REQUEST = ResponsesRequest.model_validate({"input": "a", "include": [LOGPROBS], "top_logprobs": NUM_TOP})
DIALECTS: dict[str, Callable[[Reply], dict[str, Any]]] = {
    "chat": lambda reply: {
        "body": lambda outputs, now: chat_body(reply, outputs[0], now),
        "events": lambda outputs: ChatStream(reply, outputs[0]),
    },
    "completions": lambda reply: {
        "body": lambda outputs, now: completion_body(reply, outputs, now),
        "events": lambda outputs: CompletionStream(reply, outputs),
    },
    "responses": lambda reply: {
        "body": lambda outputs, now: response_body(reply, REQUEST, outputs[0], now, PlainText()),
        "events": lambda outputs: ResponseStream(reply, REQUEST, outputs[0], PlainText()),
    },
}


@contextmanager
def longest_hold() -> Iterator[list[float]]:
    """What the callback that held the event loop longest took, in seconds of CPU time."""
    longest, run = [0.0], events.Handle._run

    def measured(handle: events.Handle) -> None:
        begun = time.thread_time()
        run(handle)
        longest[0] = max(longest[0], time.thread_time() - begun)

    gc.collect()
    gc.freeze()  # as a server does when it is ready: to look at all that was imported is no part of this
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(events.Handle, "_run", measured)
            yield longest
    finally:
        gc.unfreeze()


async def read(app: web.Application, kept: list[bytes] | None) -> int:
    """How many bytes came; they are kept, or dropped as they come, by a client that takes no part in what is
    measured."""
    async with TestClient(TestServer(app)) as client, client.get("/") as response:
        assert response.status == 200
        total = 0
        async for piece in response.content.iter_any():
            total += len(piece)
            if kept is not None:
                kept.append(piece)
        return total


def contents(body: bytes, dialect: str, stream: bool) -> Any:
    """The log-probabilities in an answer, as chat has them or as completions do."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")] if stream else [body]
    found: list[Any] = [json.loads(line) for line in lines]
    if dialect == "responses":
        (last,) = [e["response"] for e in found if e["type"] == "response.incomplete"] if stream else found
        deltas = [e for event in found if event.get("type", "").endswith(".delta") for e in event["logprobs"]]
        told = last["output"][0]["content"][0]["logprobs"]
        assert not stream or deltas == told
        return told
    parts = [choice["logprobs"] for event in found for choice in event["choices"] if choice["logprobs"]]
    return [entry for part in parts for entry in part["content" if dialect == "chat" else "top_logprobs"]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_event_loop_is_free_meanwhile(dialect: str, stream: bool) -> None:
    num_prompt = NUM_TOKENS if dialect == "completions" else 0
    app = application(output(num_prompt, NUM_TOKENS), stream, DIALECTS[dialect])
    kept: list[bytes] = []
    with longest_hold() as longest:
        asyncio.run(read(app, kept))
    found = contents(b"".join(kept), dialect, stream)
    assert len(found) == num_prompt + NUM_TOKENS
    assert [len(entry["top_logprobs"] if dialect != "completions" else entry) for entry in found[-5:]] == [NUM_TOP] * 5
    assert longest[0] < HOLDS_S


@pytest.mark.parametrize("dialect", DIALECTS)
def test_memory_holds_what_is_sent_and_little_more(dialect: str) -> None:
    app = application(output(0, NUM_TOKENS // 4), False, DIALECTS[dialect])
    tracemalloc.start()
    try:
        num_bytes = asyncio.run(read(app, None))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_bytes > 500 * NUM_TOKENS // 4
    assert peak < 1.5 * num_bytes + 2**20


def test_packed_entries_are_a_list() -> None:
    entries = [None, *map(scored, range(1, 200))]
    found = Packed(packed(entries) or ())
    assert (list(found), len(found), found[3], packed(None)) == (entries, 200, entries[3], None)
    kept, whole = found[:70], found[:]
    whole += kept
    assert (list(kept), list(whole), len(found)) == (entries[:70], entries + entries[:70], 200)
    tracemalloc.start()
    try:
        few = scores(1000)
        assert tracemalloc.get_traced_memory()[0] < 1000 * 600, "as objects they are 3 KB each"
        assert len(few) == 1000
    finally:
        tracemalloc.stop()
