"""How long until a server takes requests? From starting the process to the first 200 of /health, with the server's own
account of where the time went.

    python benchmarks/server/startup.py --repeats 5 --json result.json

One start comes before and is told apart: it may have to write packed weights to the cache folder, and to read files
that no one has read yet. /health is asked every 20 ms.
"""

from __future__ import annotations

import argparse
from statistics import median

from findings import Findings, count, engine_of, finish, note, parser
from prompts import Canary, Prompts
from served import Served, serving

READY_MARK_S = 3.0


def parse() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--repeats", type=count, default=5)
    return made.parse_args()


class Starts:
    """One start after another; all servers must give the canary the same answer."""

    def __init__(self, options: argparse.Namespace, findings: Findings) -> None:
        self.ready_s: list[float] = []
        self.timelines: list[dict[str, float]] = []
        self._options, self._findings = options, findings
        self._canary: Canary | None = None

    async def one(self) -> None:
        async with serving(self._options.model, self._options.serve) as served:
            self.ready_s.append(served.ready_s)
            self.timelines.append((await served.client.get("/server_info"))["timeline"])
            self._findings.keep("engine", await engine_of(served.client))
            await self._check(served)
            status = await served.end()
        self._findings.require(status == 0, f"A server ended with status {status}.")
        note(f"ready after {self.ready_s[-1]:.2f} s")

    async def _check(self, served: Served) -> None:
        if self._canary is None:
            prompts = await Prompts.of(served.client, self._options.seed, self._options.prompts)
            self._canary = Canary(prompts)
        await self._canary.check(served.client)


async def run(options: argparse.Namespace, findings: Findings) -> None:
    starts = Starts(options, findings)
    for _ in range(1 + options.repeats):
        await starts.one()
    counted = starts.ready_s[1:]
    findings.figure("ready, first start", starts.ready_s[0], "s", places=2)
    findings.figure("ready, median", median(counted), "s", READY_MARK_S, places=2)
    findings.figure("ready, longest", max(counted), "s", places=2)
    for phase in starts.timelines[0]:
        seconds = median(timeline[phase] for timeline in starts.timelines[1:])
        findings.figure(f"  {phase}", seconds, "s", places=2)
    findings.keep("starts in seconds", starts.ready_s)
    findings.keep("timelines", starts.timelines)


def main() -> None:
    options = parse()
    findings = Findings("startup", options)
    finish(findings, lambda: run(options, findings))


if __name__ == "__main__":
    main()
