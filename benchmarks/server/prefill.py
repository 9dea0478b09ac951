"""What do long prompts cost streams that decode, where other engines compute the prompts, and what does it take to send
their KV?

    python benchmarks/server/prefill.py --way memory --json result.json
    python benchmarks/server/prefill.py --way tcp --json result.json
    python benchmarks/server/prefill.py --way none --json result.json

`memory`: two engines of one server, one of which computes prompts, which share memory. `tcp`: the same as two headless
engines on this machine, which are connected over TCP without TLS. `none`: one engine for both, with the threads of two.
Options after -- are those of the engines.

In turns some streams run alone, and beside prompts of so many tokens, all different, of which one is always on its way.
The longest gap of a turn is the longest between two events of any stream. To compute a prompt takes what its first
token takes, less the time that its KV was awaited.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from client import COMPLETIONS, Client, Reading, completion
from findings import Findings, count, engine_of, finish, note, parser
from prompts import Canary, Prompts
from served import Served, ServerError, serving

ENGINE = {"drafter": "none", "kv-cache-gib": "1", "max-model-len": "4096"}
GAP_MARK, SEND_MARK = 1.2, 0.1  # over the idle gap; of the time of computing
STREAM_PROMPT = 32  # tokens
START_S = 120.0
_LISTENING = re.compile(r"Listening on (\S+) for a server")


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--way", choices=("memory", "tcp", "none"), default="memory")
    made.add_argument("--threads", type=count, default=1, help="of each engine")
    made.add_argument("--streams", type=count, default=4)
    made.add_argument("--max-tokens", type=count, default=300, help="of each stream")
    made.add_argument("--length", type=count, default=2048, help="of a prompt, in tokens")
    made.add_argument("--rounds", type=count, default=5)
    return made.parse_args()


@asynccontextmanager
async def headless(model: str, role: str, secret: Path, options: Sequence[str]) -> AsyncIterator[str]:
    """Where an engine listens. Raises ServerError where it does not."""
    with tempfile.TemporaryDirectory(prefix="specserve-benchmark-") as folder:
        log = Path(folder) / "engine.log"
        told = ["--listen=127.0.0.1:0", f"--secret-file={secret}", f"--role={role}", *options]
        with log.open("wb") as stream:
            command = [sys.executable, "-m", "specserve", "engine", model, *told]
            process = await asyncio.create_subprocess_exec(*command, stdout=stream, stderr=stream)
        try:
            end = time.monotonic() + START_S
            while (said := _LISTENING.search(log.read_text("utf-8", errors="replace"))) is None:
                if process.returncode is not None or time.monotonic() > end:
                    raise ServerError(f"The engine does not listen. It said: {log.read_text('utf-8', 'replace')}")
                await asyncio.sleep(0.05)
            yield said[1]
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


@asynccontextmanager
async def laid_out(options: argparse.Namespace) -> AsyncIterator[Served]:
    """A server as `--way` says."""
    threads = options.threads * (2 if options.way == "none" else 1)
    named = {word.partition("=")[0].removeprefix("--") for word in options.serve}
    engine = {name: value for name, value in {**ENGINE, "threads": str(threads)}.items() if name not in named}
    told = [*options.serve, *(f"--{name}={value}" for name, value in engine.items())]
    async with AsyncExitStack() as stack:
        if options.way == "tcp":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="specserve-benchmark-"))
            secret = Path(folder) / "secret"
            secret.write_text(secrets.token_hex(32), "utf-8")
            places = [
                await stack.enter_async_context(headless(options.model, role, secret, told))
                for role in ("decode", "prefill")
            ]
            told = [f"--engine-secret-file={secret}", *(f"--engine={place}" for place in places)]
        elif options.way == "memory":
            told += ["--data-parallel-size=2", "--prefill-replicas=1"]
        told += [f"--prefill-min-tokens={max(1, options.length // 2)}"] if options.way != "none" else []
        served = await stack.enter_async_context(serving(options.model, told))
        await served.until(lambda stats: all(each["state"] == "ready" for each in stats.get("replicas", ())), START_S)
        yield served


class Turns:
    """Of streams alone, and beside prompts."""

    def __init__(self, client: Client, prompts: Prompts, options: argparse.Namespace, findings: Findings) -> None:
        self.firsts_s: list[float] = []  # of the prompts, to their first token
        self._client, self._prompts, self._options, self._findings = client, prompts, options, findings

    async def turn(self, with_prompts: bool) -> float:
        """The longest gap of a stream, in ms."""
        asked = [
            completion(self._prompts.at(i, STREAM_PROMPT), self._options.max_tokens)
            for i in range(self._options.streams)
        ]
        streams = asyncio.gather(*(self._client.ask(COMPLETIONS, body) for body in asked))
        if with_prompts:
            while not streams.done():
                await self._prompt()
        readings = await streams
        for reading in readings:
            self._findings.require(reading.trouble is None, f"A stream failed: {reading.trouble}.")
        return 1e3 * max(self._gap(reading) for reading in readings)

    def _gap(self, reading: Reading) -> float:
        """The longest but for those of the first tokens, in which other streams' prompts are computed."""
        return max(reading.gaps_s[self._options.streams :])

    async def _prompt(self) -> None:
        """One that nobody has cached, up to its first token."""
        body = completion(self._prompts.some(self._options.length), 1, cache_salt=secrets.token_hex(8))
        reading = await self._client.ask(COMPLETIONS, body)
        self._findings.require(reading.trouble is None, f"A prompt failed: {reading.trouble}.")
        self.firsts_s.append(reading.first_s)


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with laid_out(options) as served, served.session() as session:
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        findings.keep("engine", await engine_of(client))
        turns = Turns(client, prompts, options, findings)
        await turns.turn(True)  # costs are measured then
        turns.firsts_s.clear()
        before = await transfers(client)
        gaps: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.rounds):
            for with_prompts in (False, True):
                gaps[with_prompts].append(await turns.turn(with_prompts))
            note(f"round {number + 1}: alone {gaps[False][-1]:.1f} ms, beside prompts {gaps[True][-1]:.1f} ms")
        after = await transfers(client)
        told(findings, options, gaps, turns.firsts_s, [b - a for a, b in zip(before, after, strict=True)])
        await canary.check(client)


async def transfers(client: Client) -> tuple[float, float, float]:
    """Seconds in which KV was awaited, prompts of which it came, and failures, so far."""
    stats = await client.get("/stats")
    found: dict[str, Any] = stats["prefill"]
    return found["transfer_s"], found["num_prompts"]["elsewhere"], found["num_transfer_failures"]


def told(
    findings: Findings,
    options: argparse.Namespace,
    gaps: dict[bool, list[float]],
    firsts_s: list[float],
    sent: list[float],
) -> None:
    idle, beside = median(gaps[False]), median(gaps[True])
    findings.figure("longest gap of a stream alone, median of rounds", idle, "ms")
    findings.figure("longest gap beside prompts, median of rounds", beside, "ms")
    findings.figure("the latter over the former", beside / idle, "x", GAP_MARK, places=2)
    findings.keep("longest gaps in ms", {"alone": gaps[False], "beside prompts": gaps[True]})
    findings.figure("prompts", len(firsts_s), places=0)
    findings.figure("to a prompt's first token, median", 1e3 * median(firsts_s), "ms")
    seconds, num_sent, num_failures = sent
    if options.way == "none":
        return
    findings.require(num_failures == 0, f"{num_failures:.0f} transfers failed.")
    findings.figure("prompts computed elsewhere", num_sent, f"of {len(firsts_s)}", places=0)
    if num_sent:
        each_ms = 1e3 * seconds / num_sent
        computed_ms = 1e3 * median(firsts_s) - each_ms
        findings.figure("KV of a prompt awaited, mean", each_ms, "ms")
        findings.figure("of the time of computing it", each_ms / computed_ms, "x", SEND_MARK, places=3)


def main() -> None:
    options = parse()
    findings = Findings("prefill", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
