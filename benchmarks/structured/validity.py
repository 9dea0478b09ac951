"""Does every constrained output fit, and does no free one notice? A real model answers schemas and tool calls with
every drafter and temperature, in batches that hold constrained and free rows in turn.

    python benchmarks/structured/validity.py --suite json-schema-suite-dev.json --tools bfcl-dev.jsonl

Schemas are those of the suite and the tools' parameters that the backend takes, filled up with made ones to --schemas
distinct ones; each is answered once with each drafter and temperature, and so is each of --tools-limit tool calls. The
oracle is jsonschema-rs with formats asserted. An output that max_tokens cut off is counted apart. Free rows ask the
same prompts without a constraint and must have the tokens that they have alone, without a draft; constrained ones must
have those that they had with the first drafter. The drafter `prediction` follows what the rows of its batch said before
at that temperature, whose it finds out itself. Exits with 1 on an output that does not fit, a row that differs, or a
request that failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import jsonschema_rs
from cases import Case, distinct, made_schemas, schema_cases, suite_schemas, tool_calls

from specserve import LLM, SamplingParams
from specserve.outputs import CompletionOutput
from specserve.structured.base import RefusedError
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary

Tokens = tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """What came of one drafter at one temperature. `faults` are told one a line."""

    drafter: str
    temperature: float
    fits: int = 0
    invalid: int = 0
    cut_off: int = 0
    failed: int = 0
    free: int = 0
    free_differs: int = 0
    bound_differs: int = 0
    tokens: int = 0
    accepted: int = 0
    forced_and_accepted: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not (self.invalid or self.failed or self.free_differs or self.bound_differs)


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--suite", type=Path, help="JSON-Schema-Test-Suite as one file")
    made.add_argument("--tools", type=Path, help="tool calls, one a line")
    made.add_argument("--schemas", type=int, default=300, help="distinct schemas")
    made.add_argument("--tools-limit", type=int, default=200, help="tool calls")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--drafter", default="none,grammar,ngram,prediction")
    made.add_argument("--temperature", default="0,1")
    made.add_argument("--batch", type=int, default=8, help="rows at once, every other one free")
    made.add_argument("--max-tokens", type=int, default=160)
    made.add_argument("--limit", type=int, help="that many cases of all, evenly")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path)
    return made.parse_args()


def gather(compiler: Compiler, options: argparse.Namespace) -> tuple[list[Case], Counter[str]]:
    """All cases, and how many schemas of which source were refused."""
    sources = {
        "suite": suite_schemas(options.suite) if options.suite else [],
        "tools": [case.schema for case in tool_calls(options.tools)] if options.tools else [],
        "made": list(islice(made_schemas(options.seed), 2 * options.schemas)),
    }
    refused: Counter[str] = Counter()
    taken: list[Any] = []
    for name, schemas in sources.items():
        different = distinct(schemas, len(schemas))
        known = [schema for schema in different if is_taken(compiler, schema)]
        refused[name] = len(different) - len(known)
        taken += known[: _share(name, options.schemas, len(known))]
    calls = tool_calls(options.tools, options.tools_limit) if options.tools else []
    found = schema_cases(distinct(taken, options.schemas)) + [case for case in calls if is_taken(compiler, case.schema)]
    return _evenly(found, options.limit), refused


def _share(source: str, wanted: int, there: int) -> int:
    """Of the suite all, of the tools' at most a third, of made ones the rest."""
    return min(there, wanted // 3) if source == "tools" else there


def _evenly(cases: list[Case], limit: int | None) -> list[Case]:
    return cases if limit is None or limit >= len(cases) else [cases[i * len(cases) // limit] for i in range(limit)]


def is_taken(compiler: Compiler, schema: Any) -> bool:
    try:
        compiler.compile(Structured.json(schema))
    except RefusedError:
        return False
    return True


class Trial:
    """One engine, the cases, and what free rows say alone."""

    def __init__(self, llm: LLM, cases: list[Case], options: argparse.Namespace) -> None:
        self._llm, self._cases, self._options = llm, cases, options
        self._alone: dict[tuple[int, float], Tokens] = {}
        self._bound: dict[tuple[int, float], Tokens] = {}  # what constrained rows said first

    def run(self, drafter: str, temperature: float) -> Tally:
        tally = Tally(drafter, temperature)
        half = max(1, self._options.batch // 2)
        for start in range(0, len(self._cases), half):
            group = list(range(start, min(start + half, len(self._cases))))
            self._group(group, drafter, temperature, tally)
            if sys.stderr.isatty():
                print(f"\r{drafter} {temperature} {group[-1] + 1}/{len(self._cases)}", end="", file=sys.stderr)
        return tally

    def _group(self, group: list[int], drafter: str, temperature: float, tally: Tally) -> None:
        """Each case of the group constrained and free, in turn, all in one batch."""
        alone = [self._free_alone(case, temperature) for case in group]
        rows = [(case, is_bound) for case in group for is_bound in (True, False)]
        said = [*alone, *(self._bound.get((case, temperature), ()) for case in group)]
        outputs = self._ask(rows, drafter, temperature, sum(said, ()) if drafter == "prediction" else ())
        for (case, is_bound), output in zip(rows, outputs, strict=True):
            if is_bound:
                self._judge(case, output, tally)
                if self._bound.setdefault((case, temperature), tuple(output.token_ids)) != tuple(output.token_ids):
                    tally.bound_differs += 1
                    tally.faults.append(f"case {case}, constrained: {output.text!r} is not what it said first")
        free = [output for (_, is_bound), output in zip(rows, outputs, strict=True) if not is_bound]
        for case, tokens, output in zip(group, alone, free, strict=True):
            tally.free += 1
            if tuple(output.token_ids) != tokens:
                tally.free_differs += 1
                tally.faults.append(f"case {case}, free: {output.text!r} is not what it says alone")

    def _ask(
        self, rows: list[tuple[int, bool]], drafter: str, temperature: float, prediction: Tokens = ()
    ) -> list[CompletionOutput]:
        params = [self._params(case, is_bound, temperature) for case, is_bound in rows]
        messages = [[{"role": "user", "content": self._cases[case].prompt}] for case, _ in rows]
        return [
            result.outputs[0]
            for result in self._llm.chat(messages, params, drafter=drafter, prediction=list(prediction))
        ]

    def _params(self, case: int, is_bound: bool, temperature: float) -> SamplingParams:
        structured = Structured.json(self._cases[case].schema) if is_bound else None
        longest = self._options.max_tokens if is_bound else self._options.max_tokens // 4
        return SamplingParams(temperature=temperature, seed=case, max_tokens=longest, structured=structured)

    def _free_alone(self, case: int, temperature: float) -> Tokens:
        key = case, temperature
        if key not in self._alone:
            (output,) = self._ask([(case, False)], "none", temperature)
            self._alone[key] = tuple(output.token_ids)
        return self._alone[key]

    def _judge(self, case: int, output: CompletionOutput, tally: Tally) -> None:
        tally.tokens += len(output.token_ids)
        tally.accepted += output.stats.num_accepted_tokens
        tally.forced_and_accepted += output.stats.num_accepted_jump_forward_tokens
        if output.finish_reason == "length":
            tally.cut_off += 1
        elif output.finish_reason != "stop":
            tally.failed += 1
            tally.faults.append(f"case {case}: {output.error}")
        elif fits(self._cases[case].schema, output.text):
            tally.fits += 1
        else:
            tally.invalid += 1
            tally.faults.append(f"case {case}: {output.text!r} does not fit {json.dumps(self._cases[case].schema)}")


def fits(schema: Any, text: str) -> bool:
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text))
    except ValueError:
        return False


def tell(tally: Tally) -> str:
    counts = asdict(tally)
    del counts["faults"]
    return "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in counts.items())


def main() -> int:
    options = parse()
    with LLM(options.model, max_num_seqs=max(2, options.batch), adaptive=False) as llm:
        print(llm.summary, file=sys.stderr)
        words = vocabulary(llm.tokenizer, llm.tokenizer.vocab_size)
        cases, refused = gather(Compiler(lambda: words), options)
        num_schemas = len({json.dumps(case.schema, sort_keys=True) for case in cases})
        print(f"{len(cases)} cases with {num_schemas} distinct schemas; refused: {dict(refused)}")
        trial = Trial(llm, cases, options)
        tallies, begun = [], perf_counter()
        for temperature in map(float, options.temperature.split(",")):
            for drafter in options.drafter.split(","):
                tallies.append(trial.run(drafter, temperature))
                print(tell(tallies[-1]), *tallies[-1].faults, sep="\n  ", flush=True)
    print(f"{perf_counter() - begun:.0f} s")
    if options.json is not None:
        about = {"machine": platform.platform(), "options": {k: str(v) for k, v in vars(options).items()}}
        figures = {**about, "cases": len(cases), "refused": refused, "runs": [asdict(tally) for tally in tallies]}
        options.json.write_text(json.dumps(figures, indent=1), "utf-8")
    return 0 if all(tally.is_sound for tally in tallies) else 1


if __name__ == "__main__":
    sys.exit(main())
