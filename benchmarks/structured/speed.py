"""Is structured output faster than free output? The same prompts, one stream, free and constrained in turns, with each
drafter: time per token after the first, tokens a step, and whether every constrained output fits its schema.

    python benchmarks/structured/speed.py --tools bfcl-dev.jsonl --limit 40 --schemas 20 --json result.json

FILE has a line for each case: {"question": [[message]], "function": [{"name", "description", "parameters"}]}, as BFCL
does; "dict" there means object. The answer is to be the arguments of the first function. --schemas adds as many made
ones, as pydantic and OpenAPI make them. Free output gets as many tokens as the constrained one had. A case's ratio is
the median of its pairs', each a constrained turn and a free one with the same drafter right after the other, in
alternating order: a machine's speed can change by a third from one minute to the next, and not often within a pair.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema_rs
from cases import Case, distinct, made_schemas, schema_cases, tool_calls

from specserve import LLM, SamplingParams
from specserve.errors import InputError
from specserve.outputs import CompletionOutput
from specserve.structured.base import RefusedError

MARK, WORST_MARK = 0.80, 1.05


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. `fits`: None for a free one, and for one that max_tokens cut off."""

    per_token_ms: float
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    fits: bool | None = None


Pair = tuple[Turn, Turn]  # constrained, free


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tools", type=Path, required=True)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--drafter", default="none,grammar,ngram", help="one after the other")
    made.add_argument("--limit", type=int, default=40, help="tool calls")
    made.add_argument("--schemas", type=int, default=0, help="made ones")
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--max-tokens", type=int, default=128)
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--json", type=Path)
    return made.parse_args()


class Speed:
    """One engine, and what it was asked."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self._llm, self._options = llm, options
        self.refused: dict[str, str] = {}

    def turn(self, case: Case, drafter: str, num_tokens: int | None) -> Turn:
        """Constrained, or free with so many tokens."""
        params = SamplingParams(
            temperature=self._options.temperature,
            seed=0,
            max_tokens=num_tokens or self._options.max_tokens,
            ignore_eos=num_tokens is not None,
            structured=None if num_tokens is not None else case.schema,
        )
        messages = [{"role": "user", "content": case.prompt}]
        self._llm.reset_prefix_cache()
        output = self._llm.chat(messages, params, drafter=drafter)[0].outputs[0]
        return _turn(output, None if num_tokens is not None else case.schema)

    def pairs(self, case: Case, drafter: str) -> list[Pair]:
        """As many as asked for; none where there is no grammar, or nothing to time."""
        try:
            first = self.turn(case, drafter, None)
        except (RefusedError, InputError) as error:
            self.refused[json.dumps(case.schema)[:80]] = str(error)
            return []
        if first.num_tokens < 4:
            return []
        return [self._pair(case, drafter, first.num_tokens, i % 2 == 0) for i in range(self._options.repeats)]

    def _pair(self, case: Case, drafter: str, num_tokens: int, is_free_first: bool) -> Pair:
        if is_free_first:
            free = self.turn(case, drafter, num_tokens)
            return self.turn(case, drafter, None), free
        return self.turn(case, drafter, None), self.turn(case, drafter, num_tokens)


def _turn(output: CompletionOutput, schema: dict[str, Any] | None) -> Turn:
    stats = output.stats
    assert stats.first_token is not None and stats.finished is not None, "it has ended"
    after = max(1, len(output.token_ids) - 1)
    fits = None
    if schema is not None and output.finish_reason == "stop":
        fits = jsonschema_rs.is_valid(schema, json.loads(output.text))
    elapsed = 1e3 * (stats.finished - stats.first_token) / after
    return Turn(
        elapsed, len(output.token_ids), stats.num_steps, stats.num_draft_tokens, stats.num_accepted_tokens, fits
    )


def tell(drafter: str, cases: list[list[Pair]]) -> dict[str, Any]:
    bound = [pairs[0][0] for pairs in cases]  # all of a case say the same
    tokens = sum(turn.num_tokens for turn in bound)
    ratios = [median(b.per_token_ms / f.per_token_ms for b, f in pairs) for pairs in cases]
    num_drafted, num_accepted = sum(t.num_drafted for t in bound), sum(t.num_accepted for t in bound)
    found = {
        "drafter": drafter,
        "cases": len(cases),
        "constrained ms a token": median(b.per_token_ms for pairs in cases for b, _ in pairs),
        "free ms a token": median(f.per_token_ms for pairs in cases for _, f in pairs),
        "ratio": median(ratios),
        "worst ratio": max(ratios),
        "cases above the mark": sum(ratio > WORST_MARK for ratio in ratios),
        "tokens a step": tokens / sum(turn.num_steps for turn in bound),
        "share drafted and accepted": num_accepted / tokens,
        "share of drafts rejected": 1 - num_accepted / num_drafted if num_drafted else 0.0,
        "invalid": sum(b.fits is False for pairs in cases for b, _ in pairs),
        "cut off": sum(turn.fits is None for turn in bound),
    }
    print("; ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))
    told = f"mark of the ratio {MARK}: {_met(median(ratios), MARK)}"
    print(f"{told}; of the worst {WORST_MARK}: {_met(max(ratios), WORST_MARK)}")
    return found


def _met(ratio: float, mark: float) -> str:
    return "met" if ratio <= mark else "MISSED"


def main() -> None:
    options = parse()
    schemas = distinct(list(islice(made_schemas(0), 2 * options.schemas)), options.schemas)
    asked = tool_calls(options.tools, options.limit) + schema_cases(schemas)
    figures = []
    with LLM(options.model, prefix_caching=False) as llm:
        print(llm.summary, file=sys.stderr)
        for drafter in options.drafter.split(","):
            speed = Speed(llm, options)
            cases = [pairs for case in asked if (pairs := speed.pairs(case, drafter))]
            figures.append({**tell(drafter, cases), "refused": speed.refused})
    if options.json is not None:
        about = {"machine": platform.platform(), "options": {k: str(v) for k, v in vars(options).items()}}
        options.json.write_text(json.dumps({**about, "drafters": figures}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
