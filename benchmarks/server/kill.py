"""What do clients see when the engine dies, and how long is it gone? Kills the engine's process under load, round after
round: every client must be told, another engine must start, and the canary must be right again.

    python benchmarks/server/kill.py --rounds 20 --json result.json
    python benchmarks/server/kill.py --rounds 5 --stop           # SIGSTOP: an engine that hangs

Each client asks again and again until it is told of the failure, by an error event or, where its stream had not begun,
by an error response. The mark for being ready again is 2 s beyond what loading and warming up took the first engine, so
those 2 s hold the pause before a restart and a new process's imports. With --stop all that begins after the server's
own patience, and the mark for being told is 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from client import COMPLETIONS, Client, Reading, completion
from findings import Findings, count, engine_of, finish, note, parser, percentile
from prompts import Canary, Prompts
from served import Served, ServerError, is_alive, serving

PATIENCE_S = 120.0  # far beyond every mark: a client that has heard nothing by then is lost
TOLD_MARK_S = 1.0
READY_MARK_S = 2.0  # beyond the engine's own start
STALL_MARK_S = 10.0
PROMPT = 32  # tokens
LATEST_S = 0.5  # the engine is killed within so long after all clients have tokens


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--rounds", type=count, default=20)
    made.add_argument("--streams", type=count, default=24, help="clients at once; those beyond max-num-seqs wait")
    made.add_argument("--stop", action="store_true", help="SIGSTOP instead of SIGKILL")
    made.add_argument("--stall-timeout-s", type=float, default=9.5, help="the server's patience")
    return made.parse_args()


@dataclass
class Round:
    """Seconds from the signal on, and how many clients were not told."""

    told_s: list[float]
    num_lost: int
    down_s: float
    ready_s: float
    right_s: float


class Caller:
    """A client that streams long answers until it is told that the engine has failed. `last` is the newest response."""

    def __init__(self, client: Client, prompt: list[int], max_tokens: int) -> None:
        self.has_tokens = asyncio.Event()
        self.last: Reading | None = None
        self._client, self._asked = client, completion(prompt, max_tokens)

    async def call(self) -> None:
        while self.last is None or self.last.ended_well:
            self.last = await self._client.ask(COMPLETIONS, self._asked, self._heard)

    def _heard(self, reading: Reading) -> bool:
        self.has_tokens.set()
        return False

    @property
    def is_told(self) -> bool:
        """Whether the last response ended in an error's words, and not in mid-air."""
        return self.last is not None and self.last.error is not None and self.last.broken is None


class Death:
    """One round: load, a signal, and what follows it."""

    def __init__(self, served: Served, canary: Canary, numbers: random.Random) -> None:
        self._served, self._canary, self._numbers = served, canary, numbers
        self._down = 0.0
        self._up = 0.0

    async def come(self, callers: Sequence[Caller], number: signal.Signals, num_running: int) -> Round:
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(caller.call()) for caller in callers]
            await self._until_running(callers, num_running)
            await asyncio.sleep(self._numbers.uniform(0, LATEST_S))
            engine = self._served.require_engine()
            begun = time.perf_counter()
            os.kill(engine, number)
            watch = group.create_task(self._watch())
            _, silent = await asyncio.wait(calls, timeout=PATIENCE_S)
            for call in silent:
                call.cancel()
            await watch
        told = [caller.last.ended - begun for caller in callers if caller.is_told and caller.last]
        await self._canary.check(self._served.client)
        right_s = time.perf_counter() - begun
        return Round(told, len(callers) - len(told), self._down - begun, self._up - begun, right_s)

    async def _until_running(self, callers: Sequence[Caller], number: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while sum(caller.has_tokens.is_set() for caller in callers) < number:
            if time.monotonic() > end:
                raise ServerError(f"Not {number} of {len(callers)} clients got tokens. {self._served.said()}")
            await asyncio.sleep(0.01)

    async def _watch(self) -> None:
        """When /health ceased to be 200, and when it was again."""
        end = time.monotonic() + PATIENCE_S
        while await self._served.is_healthy():
            if time.monotonic() > end:
                raise ServerError(f"Nobody noticed the engine's end. {self._served.said()}")
            await asyncio.sleep(0.01)
        self._down = time.perf_counter()
        await self._served.until_healthy(look_s=0.01)
        self._up = time.perf_counter()


async def check_processes(served: Served, old: int, findings: Findings) -> None:
    """There is one engine, it is another one, and the old one is gone."""
    new = served.engine_pid
    findings.require(new not in (None, old), f"After process {old} the engine is {new}.")
    findings.require(not is_alive(old), f"The engine's process {old} still lives.")
    findings.require(not served.strays, f"Beside the engine {new} the server has the processes {served.strays}.")


def tell(rounds: Sequence[Round], timeline: dict[str, float], options: argparse.Namespace, findings: Findings) -> None:
    told = [seconds for each in rounds for seconds in each.told_s]
    patience_s = options.stall_timeout_s if options.stop else 0.0
    told_mark = STALL_MARK_S if options.stop else TOLD_MARK_S
    load_s = timeline["load"] + timeline["warm-up"]
    findings.figure("rounds", len(rounds), places=0)
    findings.figure("clients told", len(told), f"of {options.streams * len(rounds)}", places=0)
    findings.figure("first start of the server", timeline["total"], "s", places=3)
    findings.figure("load and warm-up in it", load_s, "s", places=3)
    for name, values, mark in (
        ("until a client was told", told, told_mark),
        ("until /health was not 200", [each.down_s for each in rounds], told_mark),
        ("until /health was 200 again", [each.ready_s for each in rounds], patience_s + load_s + READY_MARK_S),
        ("until the canary was right", [each.right_s for each in rounds], None),
    ):
        findings.figure(f"{name}, median", percentile(values, 50) if values else None, "s", places=3)
        findings.figure(f"{name}, longest", max(values, default=None), "s", mark, places=3)


async def run(options: argparse.Namespace, findings: Findings) -> None:
    serve = {"stall-timeout-s": options.stall_timeout_s, "queue-timeout-s": 0}
    async with serving(options.model, options.serve, serve) as served, served.session() as session:
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        engine = await engine_of(client)
        timeline = (await client.get("/server_info"))["timeline"]
        findings.keep("engine", engine)
        number = signal.SIGSTOP if options.stop else signal.SIGKILL
        death = Death(served, canary, random.Random(options.seed))
        length = prompts.within(PROMPT, 0.25)
        rounds = []
        for turn in range(options.rounds):
            callers = [Caller(client, prompts.some(length), prompts.most - length) for _ in range(options.streams)]
            old = served.require_engine()
            rounds.append(await death.come(callers, number, min(options.streams, engine["max_num_seqs"])))
            await check_processes(served, old, findings)
            findings.require(rounds[-1].num_lost == 0, f"{rounds[-1].num_lost} clients were not told.")
            note(f"round {turn + 1}: {rounds[-1]}")
        findings.require((await served.stats())["num_restarts"] == options.rounds, "There were other restarts.")
        leftover = await served.until_idle()
        findings.require(leftover is None, f"The server did not become idle: {leftover}.")
        tell(rounds, timeline, options, findings)
        findings.keep("rounds in seconds", [vars(each) for each in rounds])
        status = await served.end()
        findings.require(status == 0, f"The server ended with status {status}.")
        orphans = served.orphans()
        findings.figure("processes left behind", len(orphans), places=0)
        findings.require(not orphans, f"Left behind: {orphans}.")


def main() -> None:
    options = parse()
    findings = Findings("kill", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
