"""What does a server do in another layout? Servers of several run side by side, and get the same load one after the
other, round by round, so that the machine is the same for all: those that wait meanwhile take next to no time.

    python benchmarks/server/layouts.py --streams 32 --layout "--threads 2" \\
        --layout "--data-parallel-size 2 --threads 1"
    python benchmarks/server/layouts.py --streams 256 --max-tokens 16 --layout "--threads 1" \\
        --layout "--threads 1 --api-processes 2" --model MODEL

The first layout is what others are compared with: medians of the rounds' ratios. A round is as many greedy requests as
there are streams, several times, each stream's next one when its last has ended; no two of them begin alike.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import time
from contextlib import AsyncExitStack
from statistics import median

from client import COMPLETIONS, Client, completion
from findings import Findings, count, finish, note, parser, percentile
from prompts import Canary, Prompts
from served import serving

SERVE = {"max-num-seqs": 64, "max-queue": 4096}


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--layout", action="append", required=True, help="options of a server; several times")
    made.add_argument("--streams", type=count, default=32, help="requests that are open at any time")
    made.add_argument("--rounds", type=count, default=5)
    made.add_argument("--turns", type=count, default=2, help="requests of a stream in a round")
    made.add_argument("--prompt", type=count, default=64, help="tokens of a prompt")
    made.add_argument("--max-tokens", type=count, default=64)
    return made.parse_args()


async def load(client: Client, prompts: Prompts, options: argparse.Namespace, salt: str) -> tuple[float, list[float]]:
    """Seconds of a round, and those to the first token. Raises ExceptionGroup where a request failed."""
    firsts: list[float] = []
    length, most = prompts.within(options.prompt), prompts.within(options.max_tokens, 0.25)

    async def stream(number: int) -> None:
        for turn in range(options.turns):
            asked = completion(prompts.at(97 * number + 31 * turn, length), most, cache_salt=f"{salt}-{number}-{turn}")
            reading = await client.ask(COMPLETIONS, asked)
            if reading.trouble:
                raise RuntimeError(reading.trouble)
            firsts.append(reading.first_s)

    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(options.streams):
            group.create_task(stream(number))
    return time.perf_counter() - begun, firsts


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with AsyncExitStack() as stack:
        servers: list[tuple[str, Client, Prompts]] = []
        for layout in options.layout:
            server = serving(options.model, [*options.serve, *shlex.split(layout)], SERVE)
            served = await stack.enter_async_context(server)
            client = Client(await stack.enter_async_context(served.session()))
            prompts = await Prompts.of(client, options.seed, options.prompts)
            canary = Canary(prompts)
            await canary.check(client)
            await canary.check(client)
            servers.append((layout, client, prompts))
        seconds: dict[str, list[float]] = {layout: [] for layout in options.layout}
        firsts: dict[str, list[float]] = {layout: [] for layout in options.layout}
        for turn in range(options.rounds + 1):  # the first is not counted
            for layout, client, prompts in servers:
                took, waited = await load(client, prompts, options, str(turn))
                note(f"round {turn}, {layout or 'no options'}: {took:.2f} s")
                if turn:
                    seconds[layout].append(took)
                    firsts[layout] += waited
        requests = options.streams * options.turns
        baseline = seconds[options.layout[0]]
        for layout, _, prompts in servers:
            name = layout or "no options"
            tokens = requests * prompts.within(options.max_tokens, 0.25)
            findings.figure(f"{name}: requests", requests / median(seconds[layout]), "a second")
            findings.figure(f"{name}: new tokens", tokens / median(seconds[layout]), "a second", places=0)
            findings.figure(f"{name}: to the first token, p50", 1e3 * percentile(firsts[layout], 50), "ms")
            ratio = median(first / own for first, own in zip(baseline, seconds[layout], strict=True))
            findings.figure(f"{name}: throughput over the first layout's", ratio, places=3)


def main() -> None:
    options = parse()
    findings = Findings("layouts", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
