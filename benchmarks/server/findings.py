"""What a program found: its command line, figures with marks, and broken promises."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from client import Client
from prompts import WrongCanary
from served import ServerError

from specserve.bench.prompts import BUNDLED
from specserve.config import DEFAULT_MODEL

MIB = 2**20


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest of the sorted values, in proportion. Of none there is none."""
    assert values, "a percentile of nothing"
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def parser(description: str | None) -> argparse.ArgumentParser:
    """What the command lines of all programs share."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=DEFAULT_MODEL, help="catalog name, Hugging Face folder or .gguf file")
    made.add_argument("--prompts", default=BUNDLED, help="JSON lines, or demo")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, help="write the figures here")
    made.add_argument("serve", nargs="*", metavar="-- OPTION", help="options of specserve serve, as --NAME=VALUE")
    return made


def count(text: str) -> int:
    """An argument: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


class Findings:
    """Figures in the order they were found, and promises that were broken, which alone decide the exit status."""

    def __init__(self, program: str, options: argparse.Namespace) -> None:
        self.figures: dict[str, Any] = {}
        self.broken: Counter[str] = Counter()  # how often each
        self._program, self._options = program, options
        self._rows: list[tuple[str, str, str]] = []

    def figure(
        self, name: str, value: float | None, unit: str = "", most: float | None = None, places: int = 1
    ) -> None:
        """One line of the table. `most` is a mark: what a good value does not exceed. Missing it breaks no promise."""
        self.figures[name] = value
        shown = "-" if value is None else f"{value:,.{places}f} {unit}".rstrip()
        mark = ""
        if most is not None:
            self.figures[f"{name}, mark"] = most
            met = "" if value is None else ", met" if value <= most else ", MISSED"
            mark = f"mark {most:,.{places}f} {unit}".rstrip() + met
        self._rows.append((name, shown, mark))

    def percentiles(self, name: str, seconds: Sequence[float], most_p99_ms: float | None = None) -> None:
        """p50 and p99 of times, in ms."""
        for percent, most in ((50, None), (99, most_p99_ms)):
            value = 1e3 * percentile(seconds, percent) if seconds else None
            self.figure(f"{name}, p{percent}", value, "ms", most)

    def keep(self, name: str, value: Any) -> None:
        """For the JSON alone."""
        self.figures[name] = value

    def breaks(self, promise: str) -> None:
        self.broken[promise] += 1

    def require(self, kept: bool, promise: str) -> None:
        if not kept:
            self.breaks(promise)

    def close(self) -> int:
        """Print and write everything; the exit status."""
        widths = [max((len(row[column]) for row in self._rows), default=0) for column in range(2)]
        for name, shown, mark in self._rows:
            print(f"{name:{widths[0]}}  {shown:>{widths[1]}}  {mark}".rstrip())
        for promise, times in self.broken.items():
            print(f"BROKEN: {promise}" + (f" ({times} times)" if times > 1 else ""))
        print("Promises were broken." if self.broken else "All promises were kept.")
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self._told(), indent=1) + "\n", encoding="utf-8")
        return 1 if self.broken else 0

    def _told(self) -> dict[str, Any]:
        asked = {key: str(v) if isinstance(v, Path) else v for key, v in vars(self._options).items() if key != "json"}
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        about = {"program": self._program, "options": asked, "machine": machine}
        return {**about, "figures": self.figures, "broken": list(self.broken)}


def note(text: str) -> None:
    """Progress, which is no part of what was found."""
    print(text, file=sys.stderr, flush=True)


class HeldUp:
    """How long this program itself did not get to run: figures of a run in which it is long are worth nothing."""

    longest_s = 0.0

    async def watch(self, interval_s: float = 0.05) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(interval_s)
            self.longest_s = max(self.longest_s, time.monotonic() - begun - interval_s)


def finish(findings: Findings, run: Callable[[], Awaitable[None]]) -> None:
    """Run a program's coroutine and leave with its exit status. A server that fails, and a canary that is wrong, are
    broken promises; what was found before is told all the same."""

    async def live() -> None:
        held_up = HeldUp()
        watch = asyncio.create_task(held_up.watch())
        try:
            await run()
        finally:
            watch.cancel()
            findings.figure("longest hold-up of this program", held_up.longest_s, "s", places=3)

    try:
        asyncio.run(live())
    except* (ServerError, WrongCanary) as group:
        for error in _single(group):
            findings.breaks(str(error))
    sys.exit(findings.close())


def _single(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """The errors in a group and in the groups in it."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _single(error)
        else:
            yield error


async def engine_of(client: Client) -> dict[str, Any]:
    """What the server says of its engine, for the JSON."""
    engine: dict[str, Any] = (await client.get("/server_info"))["engine"]
    return engine
