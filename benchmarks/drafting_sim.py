"""What drafting gains on a virtual clock: an engine that says recorded answers, with its own scheduler, drafters and
weighing, whose steps take what was measured. No machine disturbs it, so two versions of a rule can be told apart where
a clock on the wall cannot, in two minutes for a grid.

    specserve bench --prompts FILE --max-tokens 96 --temperature 1 --record sampled.jsonl
    python benchmarks/simulation/measure.py smollm2-135m --json costs.json
    python benchmarks/drafting_sim.py sampled.jsonl --costs costs.json --concurrency 1 4 16 32

All numbers of streams run in one engine, one after another, as a server meets them: what is learned of step costs goes
on. A step's time scatters by --scatter, and one of a hundred takes twice as long. Drafters take --asking-us for each
sequence that they are asked for, and no time beside that. They must be look-ups (auto, ngram, suffix): a
recording has no hidden states, and nothing says how long a drafter's model takes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

import numpy as np
from cluster_sim import COSTS
from simulation.costs import StepCosts

from specserve.bench.replay import Record, accepted_path, read_records
from specserve.engine.engine import Engine, step_load
from specserve.engine.request import Request
from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.runtime.cost import ROWS
from specserve.runtime.executor import Executor, MakeMasks, StepOutput
from specserve.runtime.pack import Step, StepInput
from specserve.sampling.inputs import SamplingOutput
from specserve.speculation.host import DraftHost
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence, Verdict

PLAIN = "none"
PAUSES = 0.01  # of steps, which take twice as long


@dataclass(slots=True)
class Clock:
    """What stands in for time.perf_counter."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Recorded:
    """An executor without a model: sequences say what was recorded, and steps take their time of a clock."""

    inner: Executor
    costs: StepCosts
    clock: Clock
    scatter: float
    answers: dict[str, list[int]] = field(default_factory=dict)  # by request
    under_way: deque[Step] = field(default_factory=deque)
    draw: random.Random = field(default_factory=random.Random)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def start(self, step: StepInput) -> None: ...
    def copy_slots(self, sources: list[int], targets: list[int]) -> None: ...
    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None: ...

    def finish(self, masks: MakeMasks) -> StepOutput:
        step = self.under_way.popleft()
        pause = 2.0 if self.scatter and self.draw.random() < PAUSES else 1.0
        self.clock.now += self.costs.seconds(*step_load(step)) * math.exp(self.draw.gauss(0.0, self.scatter)) * pause
        return StepOutput(SamplingOutput([self._verdict(each) for each in step.sampled], []))

    def _verdict(self, each: ScheduledSeq) -> Verdict:
        rest = self.answers[each.seq.request_id][each.seq.num_output :]
        path = accepted_path(each.draft, rest)
        return Verdict(rest[: len(path) + 1], path)


@dataclass
class Tally:
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0


class Simulation:
    """An engine that says what was recorded while its clock is `virtual`."""

    def __init__(self, llm: LLM, costs: StepCosts, scatter: float, asking_s: float) -> None:
        self.llm, self._asking_s, self._num_asked = llm, asking_s, 0
        self.clock = Clock()
        engine: Engine = llm.engine
        self.executor = Recorded(engine.executor, costs, self.clock, scatter)
        engine.executor = self.executor
        engine.scheduler.cost.decoding.begin(np.array([costs.decoding(rows) for rows in ROWS]))
        self._engine = engine

    @contextmanager
    def virtual(self) -> Iterator[None]:
        propose, begin = DraftHost.propose, self._engine.scheduler.begin

        def ask(host: DraftHost, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
            self.clock.now += self._asking_s * sum(map(bool, budgets))
            return propose(host, seqs, budgets)

        def note(step: Step) -> None:
            self.executor.under_way.append(step)
            begin(step)

        with (
            patch.object(time, "perf_counter", self.clock),
            patch.object(DraftHost, "propose", ask),
            patch.object(self._engine.scheduler, "begin", note),
        ):
            yield

    def run(self, records: Many[Record], drafter: str, tally: Tally) -> None:
        """All of them at once, drafted for by one that knows nothing yet."""
        self.llm.use_drafter(drafter)
        needs = self._engine.policy.own.needs
        if needs.cost_class != "free" or needs.hidden_layers or needs.top_k:
            raise ConfigError(f"{drafter} drafts from what a recording has not. Name auto, ngram or suffix.")
        self.llm.reset_prefix_cache()
        engine, begun, before = self._engine, self.clock.now, self._engine.counters.num_steps
        seqs: list[Sequence] = []
        for record in records:
            self._num_asked += 1
            name, said = str(self._num_asked), record.output_ids
            self.executor.answers[name] = said
            params = SamplingParams(max_tokens=len(said), ignore_eos=True, temperature=0)
            engine.add(Request(id=name, prompt_ids=record.prompt_ids, params=params))
            seqs += engine.requests[name]
        with self.llm.exclusive():
            while engine.has_work:
                engine.step()
        for seq, record in zip(seqs, records, strict=True):
            assert seq.tokens[seq.num_prompt :] == record.output_ids, "drafts change nothing"
            tally.drafted += seq.stats.num_draft_tokens
            tally.accepted += seq.stats.num_accepted_tokens
        self.executor.answers.clear()
        tally.seconds += self.clock.now - begun
        tally.steps += engine.counters.num_steps - before


def groups(records: Many[Record], concurrency: int) -> list[Many[Record]]:
    return [records[start : start + concurrency] for start in range(0, len(records), concurrency)]


def simulate(
    simulation: Simulation, categories: dict[str, list[Record]], concurrency: int, drafter: str, repeats: int
) -> dict[str, dict[str, float]]:
    """By category what the drafter gained over plain decoding, and how."""
    found: dict[str, dict[str, float]] = {}
    for name, records in categories.items():
        tallies = {PLAIN: Tally(), drafter: Tally()}
        for repeat in range(repeats):
            for group in groups(records, concurrency):
                for who, tally in tallies.items():
                    simulation.executor.draw.seed(repeat)
                    simulation.run(group, who, tally)
        plain, own = tallies[PLAIN], tallies[drafter]
        found[name] = {
            "speedup": plain.seconds / own.seconds,
            "plain_s": plain.seconds / repeats,
            "plain_steps": plain.steps / repeats,
            "steps": own.steps / repeats,
            "draft_tokens": own.drafted / repeats,
            "acceptance": own.accepted / max(own.drafted, 1),
        }
    return found


def parse(arguments: Many[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="+", help="of `specserve bench --record`")
    parser.add_argument("--model", default="smollm2-135m", help="whose answers they are")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--costs", type=Path, default=COSTS, help="of simulation/measure.py (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--limit", type=int, help="answers of each category (default: all)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scatter", type=float, default=0.05, help="standard deviation (default: %(default)s)")
    parser.add_argument("--asking-us", type=float, default=50.0, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if (
        min(*options.concurrency, options.repeats, options.max_tokens, 1 if options.limit is None else options.limit)
        < 1
    ):
        parser.error("--concurrency, --repeats, --limit and --max-tokens are at least 1.")
    return options


def main(arguments: Many[str] | None = None) -> None:
    options = parse(arguments)
    results: list[dict[str, Any]] = []
    recordings = {path: read(path, options.limit, options.max_tokens) for path in options.recordings}
    most = max(options.concurrency)
    with LLM(options.model, drafter=PLAIN, max_num_seqs=most, adaptive_cache=False) as llm:
        costs = StepCosts.read(options.costs)
        simulation = Simulation(llm, costs, options.scatter, options.asking_us / 1e6)
        with simulation.virtual():
            for concurrency in options.concurrency:
                for path, categories in recordings.items():
                    cells = simulate(simulation, categories, concurrency, options.drafter, options.repeats)
                    results.append({"recording": path.name, "concurrency": concurrency, "categories": cells})
                    print(line(results[-1]), flush=True)
    if options.json is not None:
        told = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": told, "runs": results}, indent=1) + "\n", "utf-8")


def read(path: Path, limit: int | None, max_tokens: int) -> dict[str, list[Record]]:
    """By category, each answer cut."""
    found: dict[str, list[Record]] = {}
    for record in read_records(path):
        short = Record(record.prompt_ids, record.output_ids[:max_tokens], record.category)
        found.setdefault(record.category, []).append(short)
    return {name: records[:limit] for name, records in found.items()}


def line(result: dict[str, Any]) -> str:
    cells = result["categories"]
    mean = geometric_mean(cell["speedup"] for cell in cells.values())
    each = "; ".join(
        f"{name} {cell['speedup']:.3f} ({cell['draft_tokens']:.0f}, {cell['acceptance']:.0%})"
        for name, cell in cells.items()
    )
    return f"{result['recording']}, {result['concurrency']} at once: {mean:.3f} | {each}"


if __name__ == "__main__":
    main()
