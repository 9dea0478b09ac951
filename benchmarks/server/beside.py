"""What do requests that are much work cost those beside them? One stream and questions to /health go on all the time;
beside them nothing and, in turns, each kind of work: texts to count, prompts that are too long, long conversations,
forced calls of tools, structured answers. All of it in one run, so that the machine is the same for all.

    python benchmarks/server/beside.py --seconds 10 --rounds 5 --json result.json

Work is sent by a process of its own, so that what is measured here waits for nothing that is sent. The growth of a
stream's longest gap is told as the median of the rounds: of each, the longest beside the work less the longest of the
quiet turn before it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import aiohttp
from client import CHAT, COMPLETIONS, Client, completion
from findings import MIB, Findings, count, engine_of, finish, note, parser, percentile
from prompts import Canary, Prompts
from served import Sampler, serving

from specserve.bench.prompts import load_prompts

SERVE = {"max-num-seqs": 16}
QUIET = "nothing"
GROWTH_MARK_MS, HEALTH_MARK_MS = 20.0, 50.0
ASK_S = 0.02  # between two questions to /health
SETTLE_S = 0.5  # after a turn, at most as long as that; no part of the next
KB = 1000

Work = tuple[str, bytes]  # a path and a body
Answer = tuple[float, int]  # seconds and status


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    made.add_argument("--rounds", type=count, default=5)
    made.add_argument("--scale", type=float, default=1.0, help="of all lengths; 1 is what the marks are for")
    made.add_argument("--conversations", type=count, default=100, help="that are sent at once")
    made.add_argument("--only", default="", help="kinds of work whose name has this in it")
    return made.parse_args()


def kinds(texts: str, scale: float, num_conversations: int) -> dict[str, tuple[int, list[Work]]]:
    """By name how many requests are open at once, and what is sent again and again while a turn lasts."""

    def text(size: float) -> str:
        size = max(1, int(scale * size))
        return (texts * (size // len(texts) + 1))[:size]

    def chat(content: str, **more: Any) -> Work:
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0, **more}
        return CHAT, json.dumps(asked).encode()

    def fields(i: int) -> dict[str, Any]:
        """A schema of its own, so that none is remembered."""
        kinds = {f"name{i}_{j}": {"type": kind} for j, kind in enumerate(("string", "integer", "boolean"))}
        return {"type": "object", "properties": kinds, "required": list(kinds)}

    def tools(i: int) -> Work:
        function = {"name": f"tool{i}", "parameters": fields(i)}
        return chat("Call it.", tools=[{"type": "function", "function": function}], tool_choice="required")

    def structured(i: int) -> Work:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": fields(-i - 1)}}
        return chat("Fill it in.", response_format=form)

    def tokenize(size: float) -> Work:
        return "/tokenize", json.dumps({"prompt": text(size)}).encode()

    long = json.dumps({"prompt": text(MIB), "max_tokens": 1}).encode()
    numbers = random.randrange(2**30)  # of this run
    return {
        "/tokenize of 4 MiB": (1, [tokenize(4 * MIB)]),
        "/tokenize of 1 MiB": (1, [tokenize(MIB)]),
        "a prompt of 1 MiB": (1, [(COMPLETIONS, long)]),
        "a conversation of 1 MiB": (1, [chat(text(MIB))]),
        "conversations of 100 KB": (num_conversations, [chat(f"{i} {text(100 * KB)}") for i in range(64)]),
        "forced tools": (1, [tools(numbers + i) for i in range(2000)]),
        "structured answers": (1, [structured(numbers + i) for i in range(2000)]),
    }


def send(url: str, at_once: int, work: list[Work], seconds: float) -> list[Answer]:
    """In a process of its own: so many requests at once, each after the one before, as long as the turn lasts."""

    async def live() -> list[Answer]:
        found: list[Answer] = []
        until, left = time.perf_counter() + seconds, itertools.cycle(work)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout()) as session:
            client = Client(session)

            async def one() -> None:
                while time.perf_counter() < until:
                    reading = await client.ask(*next(left))
                    found.append((reading.ended - reading.begun, reading.status))

            await asyncio.gather(*(one() for _ in range(at_once)))
        return found

    return asyncio.run(live())


@dataclass
class Turn:
    """What went on beside one kind of work, [begun, ended) of time.perf_counter()."""

    name: str
    begun: float
    ended: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    def within(self, spans: list[tuple[float, float]]) -> list[float]:
        """The lengths of those that lie within it or reach into it."""
        return [end - begin for begin, end in spans if begin < self.ended and end > self.begun]


class Background:
    """The stream and the questions that go on all the time."""

    def __init__(self, client: Client, prompts: Prompts) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.health: list[tuple[float, float]] = []
        self.troubles: list[str] = []
        self.ending = False
        self._client, self._prompts = client, prompts

    async def stream(self) -> None:
        """One request after another, each with its own prompt; the time between two is no gap."""
        while not self.ending:
            reading = await self._client.ask(
                COMPLETIONS, completion(self._prompts.some(64), self._prompts.within(2048))
            )
            if reading.trouble:
                self.troubles.append(reading.trouble)
            self.gaps += itertools.pairwise(now for now, _ in reading.said)

    async def ask(self) -> None:
        while not self.ending:
            begun = time.perf_counter()
            status = await self._client.status("/health")
            self.health.append((begun, time.perf_counter()))
            if status != 200:
                self.troubles.append(f"/health said {status}")
            await asyncio.sleep(ASK_S)


async def run(options: argparse.Namespace, findings: Findings) -> None:
    texts = "\n\n".join(prompt.text for prompt in load_prompts(options.prompts))
    work = kinds(texts, options.scale, options.conversations)
    if not any(options.only in name for name in work):
        raise SystemExit(f"--only {options.only}: none of {', '.join(work)} has that in its name.")
    work = {name: each for name, each in work.items() if options.only in name}
    async with serving(options.model, options.serve, SERVE) as served, served.session() as session:
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        findings.keep("engine", await engine_of(client))
        background = Background(client, prompts)
        running = [asyncio.create_task(each()) for each in (background.stream, background.ask)]
        engine, turns = served.engine_pid, []
        context = multiprocessing.get_context("spawn")
        async with Sampler(served, lambda: 0.0) as sampler:
            with ProcessPoolExecutor(1, mp_context=context) as sender:
                begin = functools.partial(asyncio.get_running_loop().run_in_executor, sender)
                await begin(functools.partial(send, served.url, 0, [], 0.0))  # the process
                for name in in_turns(work, options.rounds):
                    await asyncio.sleep(min(SETTLE_S, options.seconds))
                    turn = Turn(name, time.perf_counter())
                    if name == QUIET:
                        await asyncio.sleep(options.seconds)
                    else:
                        turn.answers = await begin(functools.partial(send, served.url, *work[name], options.seconds))
                    turn.ended = time.perf_counter()
                    turns.append(turn)
                    note(f"{name}: {len(turn.answers)} answers")
                background.ending = True
                await asyncio.gather(*running)  # before the executor is shut down, which holds up this program
        await canary.check(client)
        tell(findings, background, turns)
        findings.figure("highest RSS of the API process", sampler.highest("API") / MIB, "MiB")
        findings.require(not background.troubles, f"Beside the work: {background.troubles[:3]}.")
        findings.require(served.engine_pid == engine, "The engine was started again.")


def in_turns(work: dict[str, Any], rounds: int) -> Iterator[str]:
    """A quiet turn before each kind of work, in an order that begins elsewhere in each round."""
    names = list(work)
    for number in range(rounds):
        start = number % len(names)
        for name in (*names[start:], *names[:start]):
            yield QUIET
            yield name


def tell(findings: Findings, background: Background, turns: list[Turn]) -> None:
    longest = [max(turn.within(background.gaps), default=0.0) for turn in turns]
    quiet = [gap for gap, turn in zip(longest, turns, strict=True) if turn.name == QUIET]
    findings.figure("a stream's longest gap beside nothing, median of turns", 1e3 * median(quiet), "ms")
    for name in dict.fromkeys(turn.name for turn in turns):
        places = [i for i, turn in enumerate(turns) if turn.name == name]
        health = [seconds for i in places for seconds in turns[i].within(background.health)]
        answers = [answer for i in places for answer in turns[i].answers]
        if name != QUIET:
            growth = [1e3 * (longest[i] - longest[i - 1]) for i in places]
            findings.figure(f"{name}: the longest gap grows by", median(growth), "ms", GROWTH_MARK_MS)
            findings.keep(f"{name}: growth by round, ms", growth)
            findings.figure(f"{name}: answers", len(answers), places=0)
            findings.percentiles(f"{name}: an answer", [seconds for seconds, _ in answers])
            findings.keep(f"{name}: statuses", dict(Counter(status for _, status in answers)))
            failed = sum(status == 0 or status >= 500 for _, status in answers)
            findings.require(not failed, f"{failed} requests failed beside a stream: {name}.")
        findings.figure(f"{name}: /health, p99", 1e3 * percentile(health, 99), "ms")
        findings.figure(f"{name}: /health, longest", 1e3 * max(health), "ms", HEALTH_MARK_MS)


def main() -> None:
    options = parse()
    findings = Findings("beside", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
