"""What a server sends to the playground, made with the server's own types, and a server that sends what it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from specserve.explained import Explained
from specserve.outputs import Chunk, CompletionOutput, RequestOutput
from specserve.server.pages import modules, page
from specserve.server.wire.openai.replies import Reply, model_list
from specserve.server.wire.openai.stream import ChatStream
from specserve.types import SequenceStats

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
FORCED: Json = {"jump_forward": {"num_draft_tokens": 9, "num_accepted_tokens": 9}}
STATS: Json = {
    "model": "tiny",
    "state": "ready",
    "num_running": 2,
    "num_waiting": 1,
    "tokens": {"generated_per_s": 41.26},
    "speculation": {
        "recent_tokens_per_step": 1.7517,
        "num_draft_tokens": 9,
        "num_accepted_tokens": 9,
        "sources": FORCED,
    },
    "kv_cache": {"usage": 0.126},
}
INFO: Json = {"engine": {"drafter": "ngram", "drafters": ["ngram", "none", "prediction"]}}

# 'H', two tokens of one step, one whose character is not whole yet, its rest, three tokens, five.
STEPS = [("Hé", 1), ("llo <b>", 2), ("", 1), ("🐢", 1), (" ż\n", 3), (" data: [DONE]\n\n", 5)]
ANSWER = "".join(text for text, _ in STEPS)


@dataclass
class Scripted:
    """A response in pieces. `ends`: "closed", "broken" in the middle, or "hangs" until the client leaves."""

    pieces: Sequence[bytes]
    status: int = 200
    ends: str = "closed"
    reason: str | None = None
    pause_s: float = 0.0  # before each piece


def as_json(body: Any, status: int = 200) -> Scripted:
    return Scripted([json.dumps(body).encode()], status)


@dataclass
class Script:
    """The playground, and written replies for what it asks: each path's in order, the last of them for ever."""

    replies: dict[str, list[Scripted]]
    requests: list[Json] = field(default_factory=list)
    address: str = ""
    key: str = ""  # the one that is let in, if any

    @property
    def chats(self) -> list[Json]:
        return [json.loads(r["body"]) for r in self.requests if r["path"] == CHAT]

    def then(self, *chats: Scripted) -> None:
        """What chats are answered with from now on."""
        self.replies[CHAT] = list(chats)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/":
            shown = page("playground")
            return web.Response(body=shown.body, headers=shown.headers)
        if request.path.startswith("/static/"):
            module = modules()[request.path.removeprefix("/static/")]
            return web.Response(body=module.body, headers=module.headers)
        self.requests.append(
            {
                "path": request.path,
                "authorization": request.headers.get("Authorization"),
                "body": await request.text(),
            }
        )
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "The API key is missing or wrong."}}, status=401)
        return await self._scripted(request)

    async def _scripted(self, request: web.Request) -> web.StreamResponse:
        left = self.replies[request.path]
        told = left.pop(0) if len(left) > 1 else left[0]
        response = web.StreamResponse(status=told.status, reason=told.reason)
        response.enable_chunked_encoding()
        await response.prepare(request)
        for piece in told.pieces:
            await asyncio.sleep(told.pause_s)
            await response.write(piece)
        if told.ends == "hangs":
            await asyncio.Event().wait()  # cancelled when the client leaves
        if told.ends == "broken" and request.transport is not None:
            request.transport.abort()
        return response

    def start(self) -> threading.Thread:
        """Serves on a port of its own until the process ends."""
        ready = threading.Event()

        async def serve() -> None:
            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{rest:.*}", self.handle)
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            ready.set()
            await asyncio.Event().wait()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert ready.wait(30)
        return thread


def script(*chats: Scripted, **others: list[Scripted]) -> Script:
    own = {
        "/stats": [as_json(STATS)],
        "/server_info": [as_json(INFO)],
        "/v1/models": [as_json(model_list(["tiny", "alias"], 1, 256, "natively"))],
    }
    return Script({**own, CHAT: list(chats), **{f"/{name}": replies for name, replies in others.items()}})


# --- streams ----------------------------------------------------------------------------------------------------------


def stream_bytes(
    steps: Sequence[tuple[str, int]] = STEPS,
    rate: float = 40.0,
    drafts: int = 7,
    by_source: dict[str, list[int]] | None = None,
    thought: str = "",
) -> bytes:
    """What the server sends for an answer of these steps, each a text and its number of tokens."""
    num_tokens = sum(count for _, count in steps)
    stats = SequenceStats(
        arrived=1.0,
        first_scheduled=1.0,
        first_token=1.0417,
        finished=1.0417 + (num_tokens - 1) / rate,
        num_steps=len(steps),
        num_drafts=3,
        num_draft_tokens=2 * drafts,
        num_accepted_tokens=drafts,
        accepted_by_position=[3, 2, 1, 1] if drafts else [],
        longest_draft=4 if drafts else 0,
        by_source=by_source or {},
    )
    chunks = [Chunk("r", 0, "", [5, 5], reasoning=thought)] if thought else []
    chunks += [Chunk("r", 0, text, [5] * count) for text, count in steps]
    chunks.append(Chunk("r", 0, "", [], finish_reason="length", stats=stats))
    return _framed(chunks, num_tokens, stats)


def _framed(chunks: list[Chunk], num_tokens: int, stats: SequenceStats, vocabulary: Any = None) -> bytes:
    output = RequestOutput("r", None, [1, 2], [CompletionOutput(0, token_ids=[5] * num_tokens, stats=stats)])
    asked = Reply(
        id="x",
        created=1,
        model="tiny",
        vocabulary=vocabulary,
        return_token_ids=vocabulary is None,
        include_usage=True,
    )
    stream = ChatStream(asked, output)
    events = [event for chunk in chunks for event in stream.push(chunk)] + stream.end(9.0)
    return b"".join(map(stream.frame, events))


def text_bytes(text: str, size: int = 7) -> bytes:
    """An answer whose steps have `size` characters each, of one token."""
    return stream_bytes([(text[i : i + size], 1) for i in range(0, len(text), size)])


def answered(text: str) -> Scripted:
    return Scripted([text_bytes(text)])


def explained_bytes() -> bytes:
    """Three steps: without a draft; two tokens accepted and three branches rejected; the end, which shows half a
    character that was held back. Token i is spelled by the i-th word."""
    words = [b"The", b" sky", b" is", b" blue", b"\nred", b" was", b"!"]

    class Words:
        special_ids = frozenset[int]()

        def token_bytes(self, token_id: int) -> bytes:
            return words[token_id]

    stats = SequenceStats(num_steps=3, first_token=1.0, finished=2.0)
    told = Explained(
        tokens=[1, 2, 3, 4, 5],
        parents=[-1, 0, 1, 1, 0],
        sources=[["suffix", "ngram"], ["jump_forward"], ["suffix"], ["suffix"], ["ngram"]],
        path=[0, 1],
        proposed={"suffix": 4, "ngram": 2},
    )
    chunks = [
        Chunk("r", 0, "<b>", [0], explained=Explained(), pieces=["<b>"]),
        Chunk("r", 0, " sky is!", [1, 2, 6], explained=told, pieces=[" sky", " is", "!"]),
        Chunk("r", 0, "", [6], explained=Explained(), pieces=[""]),
        Chunk("r", 0, "\ufffd", [], finish_reason="stop", stats=stats),
    ]
    return _framed(chunks, 5, stats, Words())


def calling_bytes(*calls: tuple[str, str], text: str = "") -> bytes:
    """An answer that calls tools, each a name and arguments that come in two pieces."""
    end = json.loads(stream_bytes([("x", 1)]).split(b"\n\n")[-3].removeprefix(b"data: "))
    deltas: list[Json] = [{"role": "assistant", "content": text}]
    for index, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": ""}
        deltas.append(
            {"tool_calls": [{"index": index, "id": f"call-{index}", "type": "function", "function": function}]}
        )
        halves = (arguments[:5], arguments[5:])
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": half}}]} for half in halves]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}, end]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


WHOLE = stream_bytes()
PLAIN = stream_bytes([(text, 1) for text, _ in STEPS], rate=20.0, drafts=0)
BEGUN = WHOLE[: WHOLE.index(b"data:", WHOLE.index(b"llo <b>"))]
