"""Does any request make the server fail? Sends random requests, half of them wrong in some way, to every endpoint, and
holds every response to what HTTP, JSON and server-sent events promise.

    python benchmarks/server/fuzz_server.py --requests 10000 --seed 1 --json result.json
    python benchmarks/server/fuzz_server.py --requests 10000 -- --drafter=ngram

The same seed sends the same requests; which of them run together depends on the machine. Broken promises are: a status
from 500 on that is no 503 or 504, in a response or in an event of a stream; a body that is no JSON, or a stream that
has no end; a request without an answer; an engine that was started again; blocks or descriptors that are left; a canary
with other tokens; a completion that has other tokens among others than alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from client import Client
from findings import Findings, count, engine_of, finish, note, parser
from fuzz_requests import CHAT, COMPLETIONS, Request, Requests, written
from prompts import Canary, Prompts
from served import Served, serving

SERVE = {"kv-cache-gib": 0.25, "max-model-len": 2048}  # a request without max_tokens ends within PATIENCE_S
BY_DESIGN = (503, 504)
PLAIN = (417,)  # what the HTTP library answers by itself, in words of its own
PATIENCE_S = 120.0  # with a request whose client stays
SHOWN = 300  # characters of a request or an answer that is told
PIPES = 8  # descriptors of processes that try constraints, which come and go
_ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete")
_FAILED = (b"event: error", b"event: response.failed", b'data: {"error"')


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--requests", type=count, default=10_000)
    made.add_argument("--concurrency", type=count, default=16)
    made.add_argument("--canary-every", type=count, default=500, help="requests")
    made.add_argument("--compared", type=count, default=200, help="completions that are asked again, alone")
    return made.parse_args()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response; the client that left has none."""

    status: int
    kind: str  # its content type
    body: bytes


class Run:
    """All requests. `num_sent` of them have been sent."""

    def __init__(self, session: aiohttp.ClientSession, canary: Canary, findings: Findings, compared: int) -> None:
        self.num_sent = 0
        self.num_left = 0
        self.num_wrong = 0
        self.statuses: Counter[str] = Counter()
        self.broken: list[dict[str, Any]] = []  # the whole requests whose answers kept no promise
        self.kept: list[tuple[dict[str, Any], str, Any]] = []  # fields, path and choices of what is to be compared
        self.findings, self._session, self._canary, self._compared = findings, session, canary, compared

    async def go(self, made: Iterator[Request], concurrency: int, canary_every: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(made, canary_every))

    async def _work(self, made: Iterator[Request], canary_every: int) -> None:
        for request in made:
            self.num_sent += 1
            self.num_wrong += request.is_wrong
            if self.num_sent % canary_every == 0:
                await self._canary.check(Client(self._session))
                note(f"{self.num_sent} requests, {dict(sorted(self.statuses.items()))}")
            await self._one(request)

    async def _one(self, request: Request) -> None:
        try:
            async with asyncio.timeout(request.leave_s or PATIENCE_S):
                answer = await ask(self._session, request)
        except TimeoutError:
            self.num_left += 1
            self.findings.require(request.leave_s is not None, f"No answer within {PATIENCE_S} s: {shown(request)}")
            return
        except aiohttp.ClientError as error:
            self.findings.breaks(f"The connection broke ({type(error).__name__}: {error}): {shown(request)}")
            return
        self.statuses[str(answer.status)] += 1
        for trouble in troubles(request, answer):
            sent = {"path": request.path, "headers": request.headers, "body": request.body.decode("latin-1")}
            self.broken.append({**sent, "trouble": trouble, "answer": answer.body[-SHOWN:].decode("latin-1")})
            self.findings.breaks(f"{trouble}: {shown(request)} was answered {answer.status} {answer.body[:SHOWN]!r}")
        if request.fields is not None and is_compared(request.path, answer) and len(self.kept) < self._compared:
            self.kept.append((request.fields, request.path, choices_of(answer)))

    async def compare(self) -> None:
        """The same completions, one after the other, on a server that does nothing else."""
        for fields, path, choices in self.kept:
            answer = await ask(
                self._session, Request("POST", path, written(fields), {"Content-Type": "application/json"})
            )
            alone = choices_of(answer) if answer.status == 200 else answer.body[:SHOWN]
            differs = f"Alone it is {str(alone)[:SHOWN]} and among others {str(choices)[:SHOWN]}"
            self.findings.require(alone == choices, f"{differs}: {written(fields)[:SHOWN]!r}")


async def ask(session: aiohttp.ClientSession, request: Request) -> Answer:
    body = request.body or None
    async with session.request(request.method, request.path, headers=request.headers, data=body) as response:
        return Answer(response.status, response.content_type, await response.read())


def shown(request: Request) -> str:
    headers = {name: value[:40] for name, value in request.headers.items()}
    return f"{request.method} {request.path} {headers} {request.body[:SHOWN]!r}"


# --- what a response must be ------------------------------------------------------------------------------------------


def troubles(request: Request, answer: Answer) -> Iterator[str]:
    """What is wrong with a response."""
    if answer.status >= 500 and answer.status not in BY_DESIGN:
        yield "A status that is a fault of the server"
    if request.method == "HEAD" or not answer.body:
        return
    if answer.kind == "text/event-stream":
        yield from _stream_troubles(answer.body)
    elif answer.kind == "application/json":
        told = _parsed(answer.body)
        if told is None:
            yield "A body that is no JSON"
        elif answer.status >= 400 and not (isinstance(told, dict) and _message(told)):
            yield "An error that says nothing"
    elif answer.status >= 400 and answer.status not in PLAIN:
        yield f"An error as {answer.kind}"


def _stream_troubles(body: bytes) -> Iterator[str]:
    events = body.split(b"\n\n")
    if events[-1]:
        yield "A stream that ends in the middle of an event"
    said = [line[6:] for event in events for line in event.split(b"\n") if line.startswith(b"data: ")]
    told = [_parsed(text) for text in said if text != b"[DONE]"]
    if any(event is None for event in told):
        yield "An event that is no JSON"
    last = b"\n".join(events[-3:])
    if not any(end in last for end in (*_ENDS, *_FAILED)):
        yield "A stream without its end"
    for event in told:
        error = _error(event)
        if error.get("type") in ("server_error", "api_error") or error.get("code") == "server_error":
            yield "An event that tells of a fault of the server"


def _parsed(text: bytes) -> Any:
    """None for what is no JSON; an event or a body is never null."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _error(event: Any) -> dict[str, Any]:
    """The error object of an event, in whatever dialect."""
    if not isinstance(event, dict):
        return {}
    inner = event.get("response") if isinstance(event.get("response"), dict) else event
    error = inner.get("error") if isinstance(inner, dict) else None
    return error if isinstance(error, dict) else {}


def _message(told: dict[str, Any]) -> bool:
    """Whether an error's body has words."""
    return bool(_error(told).get("message")) or told.get("status") in ("loading", "stopping", "restarting")


def is_compared(path: str, answer: Answer) -> bool:
    return path in (COMPLETIONS, CHAT) and answer.status == 200 and answer.kind == "application/json"


def choices_of(answer: Answer) -> Any:
    """What of a completion is the same whenever it is asked: all but ids and times."""
    found = json.loads(answer.body)["choices"]
    for choice in found:
        calls = (choice.get("message") or {}).get("tool_calls") or ()
        for call in calls:
            call.pop("id", None)
    return found


# --- the run ----------------------------------------------------------------------------------------------------------


def tell(run: Run, findings: Findings, seconds: float) -> None:
    findings.figure("requests", run.num_sent, places=0)
    findings.figure("seconds", seconds)
    findings.figure("of them wrong in some way", run.num_wrong, places=0)
    findings.figure("of them left by their client", run.num_left, places=0)
    for status, times in sorted(run.statuses.items()):
        findings.figure(f"  answered {status}", times, places=0)
    findings.figure("compared with themselves alone", len(run.kept), places=0)


async def look_for_leaks(served: Served, before: dict[str, int], findings: Findings) -> None:
    leftover = await served.until_idle()
    findings.require(leftover is None, f"The server did not become idle: {leftover}.")
    allowed = {name: number + PIPES for name, number in before.items()}
    now = await served.descriptors_within(allowed)
    for name, most in allowed.items():
        findings.figure(f"descriptors of the {name} process, before", before[name], places=0)
        findings.figure(f"descriptors of the {name} process, after", now.get(name), places=0)
        findings.require(name in now, f"There is no {name} process.")
        findings.require(
            now.get(name, 0) <= most, f"The {name} process has {now.get(name)} descriptors; {most} may be."
        )


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with serving(options.model, options.serve, SERVE) as served, served.session(keepalive=False) as session:
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        findings.keep("engine", await engine_of(client))
        await served.until_idle()
        engine = served.engine_pid
        try:
            await fuzz(served, Run(session, canary, findings, options.compared), prompts, options)
        finally:
            findings.require(served.engine_pid == engine, "The engine was started again.")
        await canary.check(client)
        findings.figure("canaries right", canary.num_right, places=0)


def log_of(served: Served) -> str:
    """What the server has said, but for its answers."""
    lines = served.log.read_text("utf-8", errors="replace").splitlines()
    return "\n".join(line for line in lines if " specserve.access: " not in line)


async def fuzz(served: Served, run: Run, prompts: Prompts, options: argparse.Namespace) -> None:
    before, begun = served.descriptors(), time.perf_counter()
    requests = Requests(random.Random(options.seed), 1 + max(prompts.ids), prompts.most)
    try:
        made = (requests.next() for _ in range(options.requests))
        await run.go(made, options.concurrency, options.canary_every)
        await served.until_idle()
        await run.compare()
    finally:
        tell(run, run.findings, time.perf_counter() - begun)
        run.findings.keep("requests that broke a promise", run.broken)
        if run.findings.broken:
            note(log_of(served))
    await look_for_leaks(served, before, run.findings)


def main() -> None:
    options = parse()
    findings = Findings("fuzz_server", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
