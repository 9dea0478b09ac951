"""What happens at many times what the server can do? Measures its capacity with as many requests at once as it runs,
then sends requests at a multiple of that rate, whether or not earlier ones have ended: what is too much must be refused
at once, and what was let in must end well.

    python benchmarks/server/overload.py --factor 10 --seconds 30 --json result.json

Goodput is tokens of requests that ended well, counted when they came, while the load lasts. The queue is short by
default, as a request that waits long is of no use: with --max-queue the time to the first token grows. The load
generator shares the machine with the server; it tells how late it sent its requests, and its figures are worth as much
as those are small.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

from client import COMPLETIONS, Client, Reading, completion
from findings import Findings, count, engine_of, finish, parser
from prompts import Canary, Prompts
from served import Served, serving

SERVE = {"max-queue": 32}
REFUSED = (429, 503)
REFUSED_MARK_MS = 50.0
GOODPUT_MARK = 95.0  # percent of the peak
PROMPT = 64  # tokens
SETTLE_S = 300.0  # for those let in, after the load


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--factor", type=float, default=10.0, help="times the capacity")
    made.add_argument("--seconds", type=float, default=30.0, help="of load; capacity is measured as long")
    made.add_argument("--max-tokens", type=count, default=32)
    return made.parse_args()


class Load:
    """Requests of one shape, and what came back."""

    def __init__(self, client: Client, prompts: Prompts, max_tokens: int, numbers: random.Random) -> None:
        self.readings: list[Reading] = []
        self.late_s: list[float] = []  # between when a request was due and when it was sent
        self._client, self._numbers, self._prompts = client, numbers, prompts
        self.max_tokens = prompts.within(max_tokens)
        self._length = prompts.within(PROMPT, 0.25)

    async def closed(self, streams: int, seconds: float) -> None:
        """So many at once, each followed by another one, for so long."""
        end = time.perf_counter() + seconds

        async def follow() -> None:
            while time.perf_counter() < end:
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(follow())

    async def open(self, rate: float, seconds: float) -> None:
        """So many a second on average, at random times, whatever becomes of them; then the end of all."""
        begun = due = time.perf_counter()
        async with asyncio.timeout(seconds + SETTLE_S), asyncio.TaskGroup() as group:
            while (due := due + self._numbers.expovariate(rate)) < begun + seconds:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                self.late_s.append(max(0.0, time.perf_counter() - due))
                group.create_task(self._one())

    async def _one(self) -> None:
        asked = completion(self._prompts.some(self._length), self.max_tokens)
        self.readings.append(await self._client.ask(COMPLETIONS, asked))

    @property
    def admitted(self) -> list[Reading]:
        return [reading for reading in self.readings if reading.status not in REFUSED]

    @property
    def refused(self) -> list[Reading]:
        return [reading for reading in self.readings if reading.status in REFUSED]

    def goodput(self, begun: float, seconds: float) -> float:
        """Tokens a second of requests that ended well, of those tokens that came in this time."""
        said = [entry for reading in self.admitted if reading.ended_well for entry in reading.said]
        return sum(len(tokens) for now, tokens in said if begun <= now < begun + seconds) / seconds

    def check(self, findings: Findings) -> None:
        """Everybody who was let in has all tokens; everybody else was told when to come again."""
        wrong = [r for r in self.admitted if r.trouble or len(r.tokens) != self.max_tokens]
        first = (wrong[0].trouble or "tokens are missing") if wrong else ""
        findings.require(not wrong, f"{len(wrong)} of {len(self.admitted)} requests let in failed: {first}.")
        untold = [r for r in self.refused if r.error is None or r.broken]
        findings.require(not untold, f"{len(untold)} requests were refused without a reason.")


async def peak(load: Load, streams: int, options: argparse.Namespace, findings: Findings) -> tuple[float, float]:
    """Requests and tokens a second at capacity."""
    begun = time.perf_counter()
    await load.closed(streams, options.seconds)
    seconds = time.perf_counter() - begun
    rate = sum(reading.ended_well for reading in load.readings) / seconds
    tokens = load.goodput(begun, options.seconds)
    findings.figure("capacity", rate, "requests/s", places=2)
    findings.figure("peak goodput", tokens, "tokens/s")
    load.check(findings)
    return rate, tokens


def tell(load: Load, goodput: float, peak_goodput: float, findings: Findings) -> None:
    refused: Sequence[Reading] = load.refused
    findings.figure("requests sent", len(load.readings), places=0)
    findings.figure("requests let in", len(load.admitted), places=0)
    for status, number in sorted(Counter(reading.status for reading in refused).items()):
        findings.figure(f"requests refused with {status}", number, places=0)
    findings.percentiles("a refusal", [r.ended - r.begun for r in refused], REFUSED_MARK_MS)
    findings.figure("goodput", goodput, "tokens/s")
    share = 100 * goodput / peak_goodput if peak_goodput else None
    findings.figure("goodput of the peak", share, f"% (mark: at least {GOODPUT_MARK:.0f})")
    findings.percentiles("to the first token, let in", [r.first_s for r in load.admitted if r.said])
    findings.percentiles("requests were sent late by", load.late_s)


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with serving(options.model, options.serve, SERVE) as served, served.session() as session:
        client = Client(session)
        numbers = random.Random(options.seed)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        engine = await engine_of(client)
        findings.keep("engine", engine)
        rate, peak_goodput = await peak(
            Load(client, prompts, options.max_tokens, numbers), engine["max_num_seqs"], options, findings
        )
        load = Load(client, prompts, options.max_tokens, numbers)
        findings.figure("load", options.factor * rate, "requests/s", places=2)
        begun = time.perf_counter()
        try:
            await load.open(options.factor * rate, options.seconds)
        except TimeoutError:
            findings.breaks(f"Requests had not ended {SETTLE_S:.0f} s after the load.")
        tell(load, load.goodput(begun, options.seconds), peak_goodput, findings)
        load.check(findings)
        await check_after(served, canary, findings)


async def check_after(served: Served, canary: Canary, findings: Findings) -> None:
    leftover = await served.until_idle()
    findings.require(leftover is None, f"The server did not become idle: {leftover}.")
    findings.require((await served.stats())["num_restarts"] == 0, "The engine was started again.")
    await canary.check(served.client)


def main() -> None:
    options = parse()
    findings = Findings("overload", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
