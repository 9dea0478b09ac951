"""Is anything of a conversation lost? Sends answers in the shape of OpenAI's and Anthropic's own types back as the
history of conversations, and then the server's own answers to them.

    python benchmarks/server/fuzz_conversations.py --rounds 10000 --json result.json
    python benchmarks/server/fuzz_conversations.py --model smollm2-135m --rounds 1000

tests/contract/answers_of_types.py makes the answers, with a Python that has both packages: `make contract` makes one.
Without --model a small random model is served. Broken promises are: a status that is neither 200 nor 400; a text of a
history that is neither in the prompt nor under a name in x-specserve-ignored, though the status is 200; a prompt that
is not what /tokenize says of the same conversation; an answer of the server that it does not take back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from findings import Findings, count, finish, note, parser
from served import serving

from specserve.server.wire.anthropic_api.requests import MessagesRequest
from specserve.server.wire.fields import Limits
from specserve.server.wire.openai.requests import ChatCompletionRequest, read
from specserve.server.wire.openai.responses import ResponsesRequest
from specserve.server.wire.translated import read_translated
from specserve.testing import write_tiny_model

TINY = "tiny"
CONTEXT = 8192
SERVE = {"kv-cache-gib": 0.25, "max-model-len": CONTEXT}
ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "contract" / "clients" / "bin" / "python"
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
QUESTION = {"role": "user", "content": "How warm is it?"}
SHOWN = 400  # characters of what is told
_WORD = re.compile(r"w1\d{6}")
# Where a text stands in what was sent: another name that it is told of by.
_OTHER_NAMES = {
    "input.summary": "input.reasoning",
    "input.content": "input.reasoning",
    "messages.content.data": "messages.content.redacted_thinking",
}


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.set_defaults(model=TINY)
    made.add_argument("--rounds", type=count, default=10_000)
    made.add_argument("--concurrency", type=count, default=8)
    made.add_argument("--python", type=Path, default=PYTHON, help="a Python with the packages openai and anthropic")
    return made.parse_args()


# --- conversations ----------------------------------------------------------------------------------------------------


def request_of(api: str, turns: list[Any]) -> dict[str, Any]:
    """A request that goes on after these answers, each with what its calls gave."""
    history = [part for answer in turns for part in (QUESTION, *_with_results(api, answer))]
    tool = {"name": "weather", "description": "Degrees."}
    if api == "responses":
        tools = [{"type": "function", **tool, "parameters": SCHEMA}, {"type": "web_search"}]
        return {"input": [*history, QUESTION], "max_output_tokens": 24, "tools": tools}
    if api == "messages":
        return {"messages": [*history, QUESTION], "max_tokens": 24, "tools": [{**tool, "input_schema": SCHEMA}]}
    functions = [{"type": "function", "function": {**tool, "parameters": SCHEMA}}]
    return {"messages": [*history, QUESTION], "max_tokens": 24, "tools": functions}


def _with_results(api: str, answer: Any) -> Iterator[Any]:
    """An answer as parts of a history; a result for each call that the client would have run."""
    if api == "chat":
        yield answer
        for call in answer.get("tool_calls") or ():
            yield {"role": "tool", "tool_call_id": call["id"], "content": "7 degrees"}
        return
    if api == "responses":
        for item in answer:
            yield item
            if item["type"] == "function_call":
                yield {"type": "function_call_output", "call_id": item["call_id"], "output": "7 degrees"}
        return
    yield {"role": "assistant", "content": answer}
    calls = [block["id"] for block in answer if block["type"] == "tool_use"]
    if calls:
        results = [{"type": "tool_result", "tool_use_id": call, "content": "7 degrees"} for call in calls]
        yield {"role": "user", "content": results}


def as_chat(api: str, body: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The same conversation for /tokenize."""
    text = json.dumps(body).encode()
    if api == "chat":
        chat = read(ChatCompletionRequest, text, limits)
    else:
        chat = read_translated(ResponsesRequest if api == "responses" else MessagesRequest, text, limits).as_chat(
            limits
        )
    return {"messages": chat.conversation(), "tools": list(chat.tools) or None}


def answer_in(api: str, body: dict[str, Any]) -> Any:
    """What of a response goes back into the history."""
    return body["choices"][0]["message"] if api == "chat" else body["output" if api == "responses" else "content"]


def prompt_tokens(api: str, usage: dict[str, int]) -> int:
    if api == "messages":
        return usage["input_tokens"] + usage["cache_read_input_tokens"]
    return usage["input_tokens" if api == "responses" else "prompt_tokens"]


def words_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The words of a request's history, and where each stands."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from ((word, path) for word in _WORD.findall(name))
            yield from words_in(entry, path if _WORD.search(name) else f"{path}.{name}")
    elif isinstance(value, list):
        for entry in value:
            yield from words_in(entry, path)
    elif isinstance(value, str):
        yield from ((word, path) for word in _WORD.findall(value))


def is_named(path: str, names: set[str]) -> bool:
    parts = path.split(".")
    begun = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return bool(names & (begun | {_OTHER_NAMES[name] for name in begun if name in _OTHER_NAMES}))


# --- rounds -----------------------------------------------------------------------------------------------------------


class Run:
    """All rounds. `num_done` of them are done."""

    def __init__(self, session: aiohttp.ClientSession, findings: Findings, limits: Limits) -> None:
        self._session, self._findings, self._limits = session, findings, limits
        self.statuses: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()  # why, without what was sent
        self.num_done = self.num_words = self.num_named = self.num_taken_back = 0
        self.broken: list[dict[str, Any]] = []

    async def round(self, api: str, answer: Any) -> None:
        body = request_of(api, [answer])
        status, told, names = await self._ask(api, body)
        if status == 200:
            await self._look_for_words(api, body, told, names)
            mine = request_of(api, [answer, answer_in(api, told)])
            back, why, _ = await self._ask(api, mine)
            too_long = "tokens and at most" in str(why)
            self.num_taken_back += back == 200
            self._require(back == 200 or too_long, f"Its own answer is not taken back ({api}, {back})", mine, why)
        self.num_done += 1
        if self.num_done % 500 == 0:
            note(f"{self.num_done} rounds, {dict(sorted(self.statuses.items()))}")

    async def _ask(self, api: str, body: dict[str, Any]) -> tuple[int, Any, set[str]]:
        async with self._session.post(PATHS[api], json=body) as response:
            told = await response.json()
            names = response.headers.get("x-specserve-ignored", "")
        self.statuses[f"{api} {response.status}"] += 1
        if response.status == 400:
            self.refusals[_WORD.sub("w", str(told["error"]["message"]))[:120]] += 1
        self._require(response.status in (200, 400), f"A status that is none ({api}, {response.status})", body, told)
        return response.status, told, set(names.split(","))

    async def _look_for_words(self, api: str, body: dict[str, Any], told: Any, names: set[str]) -> None:
        async with self._session.post("/tokenize", json=as_chat(api, body, self._limits)) as response:
            ids = (await response.json())["tokens"]
        async with self._session.post("/detokenize", json={"tokens": ids}) as response:
            prompt = (await response.json())["prompt"]
        same = len(ids) == prompt_tokens(api, told["usage"])
        self._require(same, f"The prompt is not what /tokenize says ({api})", body, told["usage"])
        history = "input" if api == "responses" else "messages"
        for word, path in words_in(body[history], history):
            self.num_words += 1
            if word not in prompt:
                self.num_named += 1
                self._require(is_named(path, names), f"Lost in silence: {path} ({api})", body, sorted(names))

    def _require(self, holds: bool, promise: str, body: Any, told: Any) -> None:
        if not holds:
            self._findings.breaks(promise)
            self.broken.append({"promise": promise, "sent": body, "told": str(told)[:SHOWN]})


async def answers(python: Path, rounds: int, seed: int) -> AsyncIterator[tuple[str, Any]]:
    program = ROOT / "tests" / "contract" / "answers_of_types.py"
    made = await asyncio.create_subprocess_exec(
        python, program, str(rounds), str(seed), stdout=asyncio.subprocess.PIPE, limit=2**24
    )
    assert made.stdout is not None, "it is a pipe"
    async for line in made.stdout:
        fields = json.loads(line)
        yield fields["api"], fields["answer"]
    if await made.wait():
        raise SystemExit(f"{python} {program.name} failed. `make contract` makes an environment for it.")


@asynccontextmanager
async def model_of(name: str) -> AsyncIterator[str]:
    if name != TINY:
        yield name
        return
    with tempfile.TemporaryDirectory(prefix="specserve-tiny-") as folder:
        yield str(write_tiny_model(Path(folder), "llama", max_position_embeddings=CONTEXT))


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with model_of(options.model) as model, serving(model, options.serve, SERVE) as served:
        engine = served.engine_pid
        async with served.session() as session:
            await fuzz(Run(session, findings, Limits(vocab_size=10**6, max_model_len=CONTEXT)), options, findings)
        findings.require(served.engine_pid == engine, "The engine was started again.")


async def fuzz(run: Run, options: argparse.Namespace, findings: Findings) -> None:
    begun, places = time.perf_counter(), asyncio.Semaphore(options.concurrency)

    async def one(api: str, answer: Any) -> None:
        try:
            await run.round(api, answer)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            async for api, answer in answers(options.python, options.rounds, options.seed):
                await places.acquire()
                group.create_task(one(api, answer))
    finally:
        tell(run, findings, time.perf_counter() - begun)


def tell(run: Run, findings: Findings, seconds: float) -> None:
    findings.figure("rounds", run.num_done, places=0)
    findings.figure("seconds", seconds)
    for status, times in sorted(run.statuses.items()):
        findings.figure(f"  {status}", times, places=0)
    findings.figure("texts of histories", run.num_words, places=0)
    findings.figure("of them not in the prompt, and named", run.num_named, places=0)
    findings.figure("answers of the server taken back", run.num_taken_back, places=0)
    findings.keep("refused", dict(run.refusals.most_common(50)))
    findings.keep("conversations that broke a promise", run.broken)


def main() -> None:
    options = parse()
    findings = Findings("fuzz_conversations", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
