"""Do streams notice that somebody sends constraints that nobody should? Runs streams, and beside them in turns nothing,
ordinary constraints that are all new, and hostile ones; compares the gaps between a stream's tokens.

    python benchmarks/server/grammars.py --streams 4 --seconds 20 --json result.json

Every hostile constraint must be answered, with 200 or 400, within 2 s and the time that answers take under this load;
no stream may be told an error, and a short request beside each kind must get the tokens that it gets alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

from client import COMPLETIONS, Client, completion
from findings import Findings, count, engine_of, finish, note, parser, percentile
from prompts import Canary, Prompts
from served import serving

SERVE = {"max-num-seqs": 16}
MARK_S = 2.0
MOST_A_SECOND = 30  # constraints; more than are answered beside streams on two cores
_AROUND_S = 0.5  # an answer's way there and back on busy cores
Answers: TypeAlias = list[tuple[float, int]]  # seconds and status
QUIET, ORDINARY, HOSTILE = "nothing", "ordinary", "hostile"


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--streams", type=count, default=4)
    made.add_argument("--seconds", type=float, default=20.0, help="of each kind, in every round")
    made.add_argument("--rounds", type=count, default=3)
    return made.parse_args()


def ordinary() -> Iterator[dict[str, Any]]:
    """Objects such as applications ask for, each with names of its own."""
    for i in itertools.count():
        fields = {f"name{i}_{j}": {"type": kind} for j, kind in enumerate(("string", "integer", "boolean"))}
        yield {"guided_json": {"type": "object", "properties": fields, "required": list(fields)}, "max_tokens": 4}


def hostile() -> Iterator[dict[str, Any]]:
    """What takes long, becomes large, never ends, or cannot be; each anew, so that none is remembered."""
    for i in itertools.count():
        yield from (
            {"regex": f"((a{{100}}){{100}}){{100}}{i}"},
            {"regex": f"(.*a){{25}}b{i}"},
            {"regex": f"(a|b)*a(a|b){{18}}{i}"},
            {"guided_json": {"enum": [f"value {i} {j}" for j in range(20_000)]}},
            {"guided_json": {"type": "object", "properties": {f"p{i}_{j}": {} for j in range(1500)}}},
            {"guided_json": {"type": "integer", "multipleOf": 999_983 + i}},
            {"guided_json": {"type": "string", "maxLength": 10**9 + i}},
            {"guided_json": {"allOf": [{"anyOf": [{"minimum": j}, {"type": "string"}]} for j in range(40 + i % 9)]}},
            {"guided_choice": [f"{i} word number {j}" for j in range(4000)]},
            {"grammar": "start: r0\n" + "\n".join(f"r{j}: r{j + 1}" for j in range(900)) + f'\nr900: "{i}"'},
            {"ebnf": f'root ::= {"(" * 40}"{i}"{")" * 40}{{500}}'},
        )


class Streams:
    """Streams that never cease; `gaps` of tokens that came while something went on, by its name."""

    def __init__(self, client: Client, prompts: Prompts) -> None:
        self.gaps: dict[str, list[float]] = {QUIET: [], ORDINARY: [], HOSTILE: []}
        self.spans: list[tuple[float, float, str]] = []
        self.troubles: list[str] = []
        self.ending = False
        self._client, self._prompts = client, prompts

    async def run(self) -> None:
        body = completion(self._prompts.some(64), 1024)
        while not self.ending:
            reading = await self._client.ask(COMPLETIONS, body)
            if reading.trouble:
                self.troubles.append(reading.trouble)
            for (before, _), (after, _) in itertools.pairwise(reading.said):
                self._note(before, after)

    def _note(self, before: float, after: float) -> None:
        for begun, ended, name in self.spans:
            if begun <= before and after <= ended:
                self.gaps[name].append(after - before)


def written(asked: Iterator[dict[str, Any]], num: int, prompt: list[int]) -> list[bytes]:
    """So many requests, as JSON: made before anything is measured, as this program reads the streams too."""
    whole = {**completion(prompt, 8), "stream": False, "ignore_eos": False}
    return [json.dumps({**whole, **each}).encode() for each in itertools.islice(asked, num)]


async def send(client: Client, bodies: list[bytes], until: float) -> Answers:
    """One constraint after the other, until the time is over or there are no more."""
    found = []
    for body in bodies:
        if time.perf_counter() > until:
            break
        reading = await client.ask(COMPLETIONS, body)
        found.append((reading.ended - reading.begun, reading.status))
    return found


async def run(options: argparse.Namespace, findings: Findings) -> None:
    async with serving(options.model, options.serve, SERVE) as served, served.session() as session:
        client = Client(session)
        prompts = await Prompts.of(client, options.seed, options.prompts)
        canary = Canary(prompts)
        await canary.check(client)
        findings.keep("engine", await engine_of(client))
        answers: dict[str, Answers] = {ORDINARY: [], HOSTILE: []}
        asked = {ORDINARY: ordinary(), HOSTILE: hostile()}
        most = math.ceil(MOST_A_SECOND * options.seconds)
        bodies = {
            name: [written(made, most, prompts.some(8)) for _ in range(options.rounds)] for name, made in asked.items()
        }
        streams = Streams(client, prompts)
        running = [asyncio.create_task(streams.run()) for _ in range(options.streams)]
        await asyncio.sleep(3.0)
        for turn in range(options.rounds):
            for name in (QUIET, ORDINARY, HOSTILE):
                begun = time.perf_counter()
                right = asyncio.create_task(canary.check(client))
                if name == QUIET:
                    await asyncio.sleep(options.seconds)
                else:
                    answers[name] += await send(client, bodies[name][turn], begun + options.seconds)
                await right
                streams.spans.append((begun, time.perf_counter(), name))
                note(f"{name}: {sum(map(len, answers.values()))} constraints so far")
        streams.ending = True
        await asyncio.gather(*running)
        await canary.check(client)
        tell(findings, streams, answers, served.engine_pid)


def tell(findings: Findings, streams: Streams, answers: dict[str, Answers], engine: int | None) -> None:
    for name, gaps in streams.gaps.items():
        findings.figure(f"gaps beside {name}: median", 1e3 * percentile(gaps, 50), "ms")
        findings.figure(f"gaps beside {name}: p99", 1e3 * percentile(gaps, 99), "ms")
        findings.figure(f"gaps beside {name}: longest", 1e3 * max(gaps), "ms")
    step_s = percentile(streams.gaps[QUIET], 50)
    for name, found in answers.items():
        findings.percentiles(f"an answer, {name}", [seconds for seconds, _ in found])
        findings.figure(f"{name}: constraints", len(found), places=0)
        findings.figure(f"{name}: refused", sum(status == 400 for _, status in found), places=0)
    grown = percentile(streams.gaps[HOSTILE], 99) - percentile(streams.gaps[QUIET], 99)
    findings.figure("hostile: growth of the gaps' p99 in steps", grown / step_s, "", 1.0)
    slowest = max(seconds for seconds, status in answers[HOSTILE] if status == 400)
    findings.figure("hostile: slowest refusal", slowest, "s", MARK_S)
    odd = sorted({status for found in answers.values() for _, status in found} - {200, 400})
    findings.require(not odd, f"Constraints were answered with {odd}.")
    findings.require(slowest <= MARK_S + _AROUND_S, f"A constraint was refused after {slowest:.1f} s.")
    troubles = streams.troubles
    findings.require(not troubles, f"{len(troubles)} streams failed; the first: {troubles[:1]}.")
    findings.require(engine is not None, "The engine has ended.")


def main() -> None:
    options = parse()
    findings = Findings("grammars", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
