"""Does anything remain of requests whose clients leave? Drops requests at random moments, then looks at what is left:
blocks of the KV cache, descriptors, memory. A canary's tokens are compared before, meanwhile and after.

    python benchmarks/server/aborts.py --requests 10000 --json result.json
    python benchmarks/server/aborts.py --requests 500 -- --drafter=ngram

Moments: while waiting in the queue (of low priority, so that it waits while there are others), while a long prompt is
computed, after some tokens, around the last token, while a whole (not streamed) answer is computed; one request in ten
is kept to its end and must have all its tokens. Which moment a drop meets is not seen from outside before the first
token, so the counts are of what was intended. Memory: medians of what is resident at 20-30 % and at 90-100 % of the
run; the KV cache is small by default, so that all of it has been written once by then.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from client import COMPLETIONS, Client, Reading, completion, never
from findings import MIB, Findings, count, engine_of, finish, note, parser
from prompts import Canary, Prompts
from served import Sampler, Served, serving

SERVE = {"kv-cache-gib": 0.25}
MOMENTS = ("queued", "prefill", "stream", "last token", "whole")
KEPT = "kept"
KEPT_SHARE = 0.1
GROWTH_MARK = 1.0  # percent
GROWTH_LIMIT = 10.0  # percent; more is a leak
SHORT_RUN = 2000  # requests; memory of a shorter run still grows into its buffers, and is only told
LAST_PRIORITY = 1000  # behind all others
LEAST_S = (
    0.1  # drops are spread over at least so long: with many at once, a request needs some of it to reach the engine
)


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--requests", type=count, default=10_000)
    made.add_argument("--concurrency", type=count, default=64)
    made.add_argument("--canary-every", type=count, default=500, help="requests")
    return made.parse_args()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, and about how long things take alone, in seconds."""

    short: int
    long: int
    output: int
    prefill_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. It is left after `seconds`, or after `num_events` events with tokens; or never."""

    moment: str
    prompt_length: int
    max_tokens: int
    stream: bool = True
    priority: int = 0
    seconds: float | None = None
    num_events: int | None = None


def plans(number: int, sizes: Sizes, numbers: random.Random) -> Iterator[Plan]:
    """The requests of a run; the same numbers give the same plans."""
    for _ in range(number):
        kept = numbers.random() < KEPT_SHARE
        yield plan(KEPT if kept else numbers.choice(MOMENTS), sizes, numbers)


def plan(moment: str, sizes: Sizes, numbers: random.Random) -> Plan:
    short, output = numbers.randint(1, sizes.short), numbers.randint(2, sizes.output)
    match moment:
        case "queued":
            return Plan(moment, short, output, priority=LAST_PRIORITY, seconds=numbers.uniform(0, sizes.whole_s))
        case "prefill":
            return Plan(moment, sizes.long, output, priority=-1, seconds=numbers.uniform(0, 2 * sizes.prefill_s))
        case "stream":
            return Plan(moment, short, output, num_events=numbers.randint(1, output - 1))
        case "last token":
            return Plan(moment, short, output, num_events=output - numbers.randint(0, 1))
        case "whole":
            return Plan(moment, short, output, stream=False, seconds=numbers.uniform(0, 2 * sizes.whole_s))
        case _:
            return Plan(moment, short, output, stream=numbers.random() < 0.5)


class Run:
    """All requests of one run. `num_begun` of them have been sent or left."""

    def __init__(self, served: Served, client: Client, prompts: Prompts, canary: Canary, findings: Findings) -> None:
        self.num_begun = 0
        self.moments: Counter[str] = Counter()
        self.num_ended: Counter[str] = Counter()  # came to their end before they were left
        self._served, self._client, self._prompts = served, client, prompts
        self._canary, self._findings = canary, findings

    async def go(self, planned: Iterator[Plan], concurrency: int, canary_every: int | None = None) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._work(planned, canary_every))

    async def _work(self, planned: Iterator[Plan], canary_every: int | None) -> None:
        for each in planned:
            self.num_begun += 1
            if canary_every is not None and self.num_begun % canary_every == 0:
                await self._canary.check(self._client)
                note(f"{self.num_begun} requests, {self._canary.num_right} canaries right")
            self.moments[each.moment] += 1
            await self._one(each)

    async def _one(self, each: Plan) -> None:
        asked = completion(
            self._prompts.some(each.prompt_length), each.max_tokens, stream=each.stream, priority=each.priority
        )
        if each.moment == "prefill":
            asked["cache_salt"] = f"{self.num_begun}"  # computed anew, whatever was computed before
        reading = await self._asked(each, asked)
        if reading is None or reading.left:
            return
        self.num_ended[each.moment] += 1
        right = reading.ended_well and len(reading.tokens) == each.max_tokens
        self._findings.require(right, f"A request ({each.moment}) ended wrong: {reading.trouble or reading.tokens}.")

    async def _asked(self, each: Plan, asked: dict[str, object]) -> Reading | None:
        if each.seconds is not None:
            return await self._client.ask_briefly(each.seconds, COMPLETIONS, asked)
        return await self._client.ask(COMPLETIONS, asked, never if each.num_events is None else after(each.num_events))


def after(num_events: int) -> Callable[[Reading], bool]:
    return lambda reading: reading.num_heard >= num_events


async def sizes_of(client: Client, prompts: Prompts) -> Sizes:
    short, long, output = prompts.within(96, 0.25), prompts.within(1024), prompts.within(32, 0.25)
    begun = time.perf_counter()
    await client.ask(COMPLETIONS, completion(prompts.some(long), 1))
    prefill_s = max(LEAST_S, time.perf_counter() - begun)
    begun = time.perf_counter()
    await client.ask(COMPLETIONS, completion(prompts.some(short), output))
    return Sizes(short, long, max(2, output), prefill_s, max(LEAST_S, time.perf_counter() - begun))


async def look_for_leaks(served: Served, before: dict[str, int], findings: Findings) -> None:
    leftover = await served.until_idle()
    findings.require(leftover is None, f"The server did not become idle: {leftover}.")
    blocks = (await served.stats())["kv_cache"]
    findings.figure(
        "blocks not free when idle",
        blocks["num_blocks"] - blocks["num_free_blocks"],
        f"of {blocks['num_blocks']}",
        places=0,
    )
    now = await served.descriptors_within(before)
    for name, number in before.items():
        findings.figure(f"descriptors of the {name} process, before", number, places=0)
        findings.figure(f"descriptors of the {name} process, after", now[name], places=0)
        findings.require(now[name] <= number, f"The {name} process has {now[name]} descriptors open and had {number}.")


def tell_memory(sampler: Sampler, findings: Findings, is_long: bool) -> None:
    for name in ("API", "engine"):
        growth = sampler.growth(name)
        percent = None if growth is None else 100 * growth
        findings.figure(f"highest RSS of the {name} process", sampler.highest(name) / MIB, "MiB")
        findings.figure(f"RSS growth of the {name} process, 20-100 %", percent, "%", GROWTH_MARK, places=2)
        leaks = is_long and percent is not None and percent > GROWTH_LIMIT
        findings.require(not leaks, f"The memory of the {name} process grew by {percent} %.")
    findings.keep("samples", [{"progress": s.progress, **s.rss} for s in sampler.samples])


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with (
        serving(options.model, options.serve, SERVE) as served,
        served.session(keepalive=False) as session,
    ):
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        findings.keep("engine", await engine_of(client))
        sizes = await sizes_of(client, prompts)
        numbers = random.Random(options.seed)
        warm_up = Run(served, client, prompts, canary, findings)
        await warm_up.go(plans(min(options.concurrency, options.requests), sizes, numbers), options.concurrency)
        await served.until_idle()
        before, engine = served.descriptors(), served.engine_pid
        begun = time.perf_counter()
        all_of = Run(served, client, prompts, canary, findings)
        async with Sampler(served, lambda: all_of.num_begun / options.requests) as sampler:
            await all_of.go(plans(options.requests, sizes, numbers), options.concurrency, options.canary_every)
        findings.figure("requests", all_of.num_begun, places=0)
        findings.figure("seconds", time.perf_counter() - begun)
        for moment in (*MOMENTS, KEPT):
            findings.figure(f"  {moment}", all_of.moments[moment], f"({all_of.num_ended[moment]} ended)", places=0)
        aborted = (await served.stats())["requests"]["abort"]
        findings.figure("aborted in the engine", aborted, "with warm-up", places=0)
        await look_for_leaks(served, before, findings)
        tell_memory(sampler, findings, options.requests >= SHORT_RUN)
        await canary.check(client)
        findings.figure("canaries right", canary.num_right, places=0)
        findings.require(served.engine_pid == engine, "The engine was started again.")


def main() -> None:
    options = parse()
    findings = Findings("aborts", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
