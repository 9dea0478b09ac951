"""Does a server that has as much to do as it can take look like one that hangs? Keeps it full of long prompts and many
streams for minutes: the engine must not be started again, and nobody may be turned away.

    python benchmarks/server/saturated.py --minutes 10 --json result.json

The longest gap between steps is seen from outside: /stats is asked every 50 ms, and a gap is the time in which the
number of steps did not change, so what is told is too long by up to two such intervals and what an answer takes.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from client import COMPLETIONS, Client, completion
from findings import Findings, count, engine_of, finish, note, parser
from prompts import Canary, Prompts
from served import Served, serving

SERVE = {"queue-timeout-s": 0}
LOOK_S = 0.05
NOTE_S = 30.0


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--streams", type=count, default=64, help="requests that are open at any time")
    made.add_argument("--prompt", type=count, default=3000, help="tokens of the longest prompt; others are shorter")
    made.add_argument("--max-tokens", type=count, default=256)
    return made.parse_args()


class Load:
    """Streams that never cease until the time has come; each request is let end."""

    def __init__(self, client: Client, prompts: Prompts, options: argparse.Namespace) -> None:
        self.num_ended = 0
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.troubles: list[str] = []
        self._client, self._prompts = client, prompts
        self._longest, self._max_tokens = prompts.within(options.prompt, 0.7), prompts.within(options.max_tokens, 0.25)

    async def stream(self, number: int, until: float) -> None:
        turn = 0
        while time.monotonic() < until:
            length = self._prompts.numbers.randint(max(1, self._longest // 4), self._longest)
            # A salt of its own: no prompt may be spared because another began alike.
            asked = completion(self._prompts.some(length), self._max_tokens, cache_salt=f"{number}-{turn}")
            reading = await self._client.ask(COMPLETIONS, asked)
            turn += 1
            self.num_ended += 1
            self.num_prompt_tokens += length
            self.num_tokens += len(reading.tokens)
            if reading.trouble or len(reading.tokens) != self._max_tokens:
                self.troubles.append(reading.trouble or f"{len(reading.tokens)} tokens")


class Steps:
    """How long the number of the engine's steps stayed the same, looked at again and again."""

    def __init__(self, served: Served) -> None:
        self.answers_s: list[float] = []
        self.longest_s = 0.0
        self._served = served

    async def watch(self, until: float) -> None:
        """`longest_s` is at least the longest gap: each is counted from the look before its first step was seen to the
        look that saw the next."""
        number, since, noted = -1, time.monotonic(), time.monotonic()
        before = since
        while (asked := time.monotonic()) < until:
            stats = await self._served.stats()
            now = time.monotonic()
            self.answers_s.append(now - asked)
            self.longest_s = max(self.longest_s, now - since)
            if stats["steps"]["num_steps"] != number:
                number, since = stats["steps"]["num_steps"], before
            before = asked
            if now - noted > NOTE_S:
                noted = now
                note(f"{number} steps, {stats['num_running']} running, {stats['num_waiting']} waiting")
            await asyncio.sleep(LOOK_S)


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with serving(options.model, options.serve, SERVE) as served, served.session() as session:
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        findings.keep("engine", await engine_of(client))
        info = await client.get("/server_info")
        load, steps = Load(client, prompts, options), Steps(served)
        before, begun = (await served.stats())["steps"]["num_steps"], time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(options.streams):
                group.create_task(load.stream(number, begun + 60 * options.minutes))
            group.create_task(steps.watch(begun + 60 * options.minutes))
        seconds, stats = time.monotonic() - begun, await served.stats()
        await canary.check(client)
        leftover = await served.until_idle()
        findings.figure("seconds", seconds)
        findings.figure("requests", load.num_ended, places=0)
        findings.figure("prompt tokens", load.num_prompt_tokens / seconds, "a second")
        findings.figure("new tokens", load.num_tokens / seconds, "a second")
        findings.figure("steps", stats["steps"]["num_steps"] - before, places=0)
        findings.figure("preemptions", stats["kv_cache"]["num_preemptions"], places=0)
        findings.figure("longest gap between steps", steps.longest_s, "s", info["options"]["stall_timeout_s"], places=2)
        findings.percentiles("an answer of /stats", steps.answers_s)
        findings.figure("restarts", stats["num_restarts"], places=0)
        findings.require(stats["num_restarts"] == 0, f"{stats['num_restarts']} restarts of an engine that worked.")
        findings.require(not load.troubles, f"{len(load.troubles)} requests failed; the first: {load.troubles[:1]}.")
        findings.require(leftover is None, f"The server did not become idle: {leftover}.")


def main() -> None:
    options = parse()
    findings = Findings("saturated", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
