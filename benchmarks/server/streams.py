"""How many streams can be open at once, and what do clients that do not read cost those that do?

    python benchmarks/server/streams.py --streams 256 --json result.json

First so many streams at once, all running: errors, memory of each, gaps between events, throughput. Then, in turns, a
few streams that are measured beside many that are not: in one turn the many read what they are sent and throw it away,
in the other they never read. Both turns give the engine the same work, so the change of the gaps is what not reading
does to others. Those that do not read ask for many log-probabilities and take little into their sockets' buffers, so
that the server soon has nowhere to write; it keeps them until the turn ends, as its patience is set beyond it. To how
many it could write no more is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from client import COMPLETIONS, Client, Reading, completion
from findings import MIB, Findings, count, engine_of, finish, note, parser, percentile
from prompts import Canary, Prompts
from served import Sampler, Served, serving

SERVE = {"max-model-len": 512, "max-queue": 1024, "queue-timeout-s": 0, "write-timeout-s": 3600}
PROMPT = 64  # tokens
RECEIVE_BUFFER = 4096  # bytes
CHANGE_MARK = 5.0  # percent
LOGPROBS = 20  # per token, for those beside: some 2 kB an event


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--streams", type=count, default=256)
    made.add_argument("--max-tokens", type=count, default=64)
    made.add_argument("--good", type=count, default=8, help="streams that are measured beside the stalled ones")
    made.add_argument("--stalled", type=count, default=100, help="clients that do not read")
    made.add_argument("--repeats", type=count, default=5, help="turns with and without stalled clients")
    return made.parse_args()


def check(readings: list[Reading], max_tokens: int, findings: Findings) -> int:
    """How many did not end well with all their tokens; each breaks a promise."""
    wrong = [r for r in readings if r.trouble or len(r.tokens) != max_tokens or r.finish_reason != "length"]
    for reading in wrong[:3]:
        findings.breaks(f"A stream failed: {reading.trouble or f'{len(reading.tokens)} of {max_tokens} tokens'}.")
    return len(wrong)


async def many(
    served: Served, client: Client, prompts: Prompts, options: argparse.Namespace, findings: Findings
) -> None:
    """All streams at once."""
    before, begun = served.rss(), time.perf_counter()
    max_tokens = prompts.within(options.max_tokens)
    bodies = [completion(prompts.some(prompts.within(PROMPT, 0.25)), max_tokens) for _ in range(options.streams)]
    async with Sampler(served, lambda: 0.0) as sampler:
        readings = await asyncio.gather(*(client.ask(COMPLETIONS, body) for body in bodies))
    seconds = max(reading.ended for reading in readings) - begun
    findings.figure("streams", len(readings), places=0)
    findings.figure("streams that failed", check(readings, max_tokens, findings), places=0)
    for name, resident in before.items():
        each = (sampler.highest(name) - resident) / len(readings)
        findings.figure(f"RSS of the {name} process for each stream", each / MIB, "MiB", places=3)
    findings.percentiles("to the first token", [r.first_s for r in readings if r.said])
    findings.percentiles("between events with tokens", [gap for reading in readings for gap in reading.gaps_s])
    findings.figure("throughput", sum(len(reading.tokens) for reading in readings) / seconds, "tokens/s")


@asynccontextmanager
async def beside(served: Served, bodies: list[dict[str, Any]], reads: bool) -> AsyncIterator[list[asyncio.Task[bool]]]:
    """Clients that were sent a stream each, closed at the end. Yields the tasks of those that read, which tell whether
    their streams came to the end mark; of those that do not read there are none."""
    place, loop = urlsplit(served.url), asyncio.get_running_loop()
    sockets = [socket.socket() for _ in bodies]
    try:
        for each, body in zip(sockets, bodies, strict=True):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            each.setblocking(False)
            await loop.sock_connect(each, (place.hostname, place.port))
            await loop.sock_sendall(each, _request(body))
        yield [asyncio.create_task(_throw_away(each)) for each in sockets if reads]
    finally:
        for each in sockets:
            each.close()


def _request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


async def _throw_away(each: socket.socket) -> bool:
    end = b""
    while piece := await asyncio.get_running_loop().sock_recv(each, 2**16):
        end = (end + piece)[-64:]
    return b"[DONE]" in end


def num_unsent(port: int) -> int:
    """Connections on which the server at this port has bytes to send that nobody takes."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text("utf-8").splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and not row[4].startswith("00000000:") for row in rows)


class Neighbours:
    """Turns with the many reading and not reading, and the gaps of those that are measured."""

    def __init__(self, served: Served, client: Client, prompts: Prompts, options: argparse.Namespace) -> None:
        self.num_stalled = 0  # clients to which the server could send no more, the most of all turns
        self._served, self._client, self._prompts, self._options = served, client, prompts, options
        self._length, self._max_tokens = prompts.within(PROMPT, 0.25), prompts.within(2 * options.max_tokens)

    async def turn(self, reads: bool, findings: Findings) -> float:
        """p99 of the gaps between events of the measured streams, in ms, all turns having the same prompts."""
        good = [completion(self._prompts.at(i, self._length), self._max_tokens) for i in range(self._options.good)]
        others = [
            completion(self._prompts.at(50 + i, self._length), self._prompts.most - self._length, logprobs=LOGPROBS)
            for i in range(self._options.stalled)
        ]
        async with beside(self._served, others, reads) as readers:
            await self._served.until(lambda stats: int(stats["num_running"]) >= len(others), 60)
            readings = await asyncio.gather(*(self._client.ask(COMPLETIONS, body) for body in good))
            if not reads:
                self.num_stalled = max(self.num_stalled, num_unsent(urlsplit(self._served.url).port or 0))
            ends = await asyncio.gather(*readers)
        findings.require(all(ends), f"{ends.count(False)} streams that were thrown away did not end well.")
        check(readings, self._max_tokens, findings)
        leftover = await self._served.until_idle()
        findings.require(leftover is None, f"The server did not become idle: {leftover}.")
        return 1e3 * percentile([gap for reading in readings for gap in reading.gaps_s], 99)

    async def turns(self, findings: Findings) -> None:
        found: dict[bool, list[float]] = {True: [], False: []}
        resident: dict[bool, list[int]] = {True: [], False: []}
        for repeat in range(self._options.repeats):
            for reads in (True, False) if repeat % 2 == 0 else (False, True):
                async with Sampler(self._served, lambda: 0.0) as sampler:
                    found[reads].append(await self.turn(reads, findings))
                resident[reads].append(sampler.highest("API"))
                note(f"repeat {repeat + 1}, others {'read' if reads else 'stalled'}: p99 {found[reads][-1]:.1f} ms")
        findings.figure("clients with a full socket", self.num_stalled, f"of {self._options.stalled}", places=0)
        changes = [100 * (b / a - 1) for a, b in zip(found[True], found[False], strict=True)]
        findings.figure("between events with tokens, beside readers, p99", median(found[True]), "ms")
        findings.figure("between events with tokens, beside stalled clients, p99", median(found[False]), "ms")
        findings.figure("change, median of repeats", median(changes), "%", CHANGE_MARK)
        findings.figure("highest RSS of the API process beside readers", max(resident[True]) / MIB, "MiB")
        findings.figure("highest RSS of the API process, clients stalled", max(resident[False]) / MIB, "MiB")
        findings.keep("p99 in ms by turn", {"reading": found[True], "stalled": found[False]})


async def run(options: argparse.Namespace, findings: Findings) -> None:
    serve = {"max-num-seqs": max(options.streams, options.good + options.stalled), **SERVE}
    async with serving(options.model, options.serve, serve) as served, served.session() as session:
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        findings.keep("engine", await engine_of(client))
        await many(served, client, prompts, options, findings)
        await served.until_idle()
        before, engine = served.descriptors(), served.engine_pid
        await Neighbours(served, client, prompts, options).turns(findings)
        now = await served.descriptors_within(before)
        findings.require(all(now[name] <= before[name] for name in before), f"Descriptors: {before}, then {now}.")
        await canary.check(client)
        findings.require(served.engine_pid == engine, "The engine was started again.")


def main() -> None:
    options = parse()
    findings = Findings("streams", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
