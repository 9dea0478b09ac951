"""What does HTTP cost? The same conversations, one at a time, through the server and through AsyncLLM in a process of
its own, in turns: time to the first token and time per token, by the wall clock of whoever asked.

    python benchmarks/server/overhead.py --repeats 7 --json result.json
    python benchmarks/server/overhead.py --engine drafter=ngram --engine quantization=int8

Only one engine is there at any time: an engine's threads would take the cores from the other even while it waits, so
each turn starts its process, warms it up with one conversation and ends it; who goes first alternates. A server that is
ready still gets itself ready for constraints, for one or two seconds, and is measured after that. Both have the options
of --engine and no prefix cache; what stands after -- is the server's alone. In the server's turn chunks are timed when
they arrive at a client in this process that only reads, in the SDK's turn when AsyncLLM's stream yields them. --client
aiohttp adds what a client's library costs. Figures are medians over prompts, of each prompt's median over turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bare import BareClient
from client import CHAT, Client
from findings import Findings, count, engine_of, finish, note, parser
from served import ServerError, serving

from specserve.bench.prompts import load_prompts, spread

FIRST_MARK_MS = 1.0
PER_TOKEN_MARK = 5.0  # percent
WARM_UP = "Tell me about the sea."
SDK_TURN = Path(__file__).with_name("sdk_turn.py")


@dataclass(frozen=True, slots=True)
class Timing:
    """One conversation in one turn."""

    first_s: float
    outside_s: float  # of that, before the engine had it, or once it had the token
    per_token_s: float
    tokens: list[int]


Turn = list[Timing]  # one a prompt


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--repeats", type=count, default=7, help="turns of each")
    made.add_argument("--limit", type=count, default=12, help="prompts")
    made.add_argument("--max-tokens", type=_some, default=64, help="at least 2")
    made.add_argument("--client", choices=("bare", "aiohttp"), default="bare", help="who reads the server's streams")
    made.add_argument("--engine", action="append", default=[], metavar="NAME=VALUE", help="EngineConfig's, for both")
    return made.parse_args()


def _some(text: str) -> int:
    if (number := count(text)) < 2:
        raise argparse.ArgumentTypeError("a time per token needs at least 2 tokens")
    return number


def engine_options(written: list[str]) -> dict[str, Any]:
    """NAME=VALUE as EngineConfig's fields; values are read as JSON where they are JSON."""
    found: dict[str, Any] = {"prefix_caching": False}
    for each in written:
        name, _, value = each.partition("=")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found


class Comparison:
    """Both ways to the same engine."""

    def __init__(self, options: argparse.Namespace, findings: Findings) -> None:
        self._options, self._findings = options, findings
        self._engine = engine_options(options.engine)
        self._prompts = [each.text for each in spread(load_prompts(options.prompts), options.limit)]

    async def over_http(self) -> Turn:
        defaults = {name.replace("_", "-"): value for name, value in self._engine.items()}
        async with serving(self._options.model, self._options.serve, defaults) as served, served.session() as session:
            client = Client(session)
            self._findings.keep("engine", await engine_of(client))
            reader = client if self._options.client == "aiohttp" else await BareClient.to(served.url)
            await served.at_rest()
            await self._converse(reader, WARM_UP)
            turn = [await self._converse(reader, prompt) for prompt in self._prompts]
            if isinstance(reader, BareClient):
                reader.close()
            return turn

    async def _converse(self, client: Client | BareClient, prompt: str) -> Timing:
        asked = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._options.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        reading = await client.ask(CHAT, asked)
        if reading.trouble:
            raise ServerError(f"A conversation failed: {reading.trouble}")
        _, last = reading.bodies[-1]
        outside_s = reading.first_s - 1e-3 * last["metrics"]["time_to_first_token_ms"]
        return Timing(reading.first_s, outside_s, reading.per_token_s, reading.tokens)

    async def with_sdk(self) -> Turn:
        """Raises ServerError when the SDK's process fails."""
        turn = {"model": self._options.model, "engine": self._engine, "warm_up": WARM_UP, "prompts": self._prompts}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, str(SDK_TURN), stdin=pipe, stdout=pipe)
        sent = json.dumps({**turn, "max_tokens": self._options.max_tokens}).encode()
        answers, _ = await process.communicate(sent)
        if process.returncode != 0:
            raise ServerError(f"The SDK's process ended with status {process.returncode}.")
        return [Timing(**json.loads(line)) for line in answers.splitlines()]


def tell(http: list[Turn], sdk: list[Turn], findings: Findings) -> None:
    """Compare prompt by prompt."""
    first = _pairs(http, sdk, "first_s")
    findings.figure("to the first token, HTTP", 1e3 * median(a for a, _ in first), "ms", places=3)
    findings.figure("to the first token, SDK", 1e3 * median(b for _, b in first), "ms", places=3)
    findings.figure("HTTP adds to it", 1e3 * median(a - b for a, b in first), "ms", FIRST_MARK_MS, places=3)
    outside = _pairs(http, sdk, "outside_s")
    findings.figure("of that outside of the engine, HTTP", 1e3 * median(a for a, _ in outside), "ms", places=3)
    findings.figure("of that outside of the engine, SDK", 1e3 * median(b for _, b in outside), "ms", places=3)
    each = _pairs(http, sdk, "per_token_s")
    findings.figure("per token, HTTP", 1e3 * median(a for a, _ in each), "ms", places=3)
    findings.figure("per token, SDK", 1e3 * median(b for _, b in each), "ms", places=3)
    findings.figure("HTTP adds to that", 100 * median(a / b - 1 for a, b in each), "%", PER_TOKEN_MARK, places=2)
    different = sum(a.tokens != b.tokens for turn in (*http, *sdk) for a, b in zip(turn, http[0], strict=True))
    findings.figure("answers that differ", different, places=0)
    findings.require(different == 0, f"{different} answers are not those of the first turn.")
    for side, turns in (("HTTP", http), ("SDK", sdk)):
        findings.keep(f"{side}: first_s, per_token_s", [[(t.first_s, t.per_token_s) for t in turn] for turn in turns])


def _pairs(http: list[Turn], sdk: list[Turn], name: str) -> list[tuple[float, float]]:
    """Of each prompt the figure over HTTP and that of the SDK."""
    return list(zip(_by_prompt(http, name), _by_prompt(sdk, name), strict=True))


def _by_prompt(turns: list[Turn], name: str) -> list[float]:
    """Each prompt's median over turns."""
    return [median(getattr(timing, name) for timing in timings) for timings in zip(*turns, strict=True)]


async def run(options: argparse.Namespace, findings: Findings) -> None:
    compared = Comparison(options, findings)
    http: list[Turn] = []
    sdk: list[Turn] = []
    for repeat in range(options.repeats):
        for is_http in (True, False) if repeat % 2 == 0 else (False, True):
            note(f"repeat {repeat + 1} of {options.repeats}: {'HTTP' if is_http else 'SDK'}")
            if is_http:
                http.append(await compared.over_http())
            else:
                sdk.append(await compared.with_sdk())
    tell(http, sdk, findings)


def main() -> None:
    options = parse()
    findings = Findings("overhead", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
