"""Is structured output faster than free output? The same prompts, one stream, free and constrained in turns, with each
drafter: time per token after the first, tokens a step, and whether every constrained output fits its schema.

    python benchmarks/structured/speed.py --tools bfcl-dev.jsonl --limit 40 --schemas 20 --json result.json

FILE has a line for each case: {"question": [[message]], "function": [{"name", "description", "parameters"}]}, as BFCL
does; "dict" there means object. The answer is to be the arguments of the first function. --schemas adds as many made
ones, as pydantic and OpenAPI make them. Free output gets as many tokens as the constrained one had. A case's ratio is
that of its fastest constrained turn to its fastest free one with the same drafter: what the host adds is in neither.
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
from specserve.constraint.base import RefusedError
from specserve.engine.outputs import CompletionOutput
from specserve.errors import InputError

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


def parse() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tools", type=Path, required=True)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--drafters", default="none,grammar,ngram", help="one after the other")
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

    def pair(self, case: Case, drafter: str) -> tuple[Turn, Turn] | None:
        """Constrained and free, as often as asked for in turns; of each the fastest. None where there is no grammar, or
        nothing to time."""
        try:
            first = self.turn(case, drafter, None)
        except (RefusedError, InputError) as error:
            self.refused[json.dumps(case.schema)[:80]] = str(error)
            return None
        if first.num_tokens < 4:
            return None
        turns = [
            (self.turn(case, drafter, None), self.turn(case, drafter, first.num_tokens))
            for _ in range(self._options.repeats)
        ]
        bound, free = zip(*turns, strict=True)
        return min(bound, key=lambda turn: turn.per_token_ms), min(free, key=lambda turn: turn.per_token_ms)


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


def tell(drafter: str, pairs: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    bound, free = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    tokens = sum(turn.num_tokens for turn in bound)
    ratios = [b.per_token_ms / f.per_token_ms for b, f in pairs]
    num_drafted, num_accepted = sum(t.num_drafted for t in bound), sum(t.num_accepted for t in bound)
    found = {
        "drafter": drafter,
        "cases": len(pairs),
        "constrained ms a token": median(turn.per_token_ms for turn in bound),
        "free ms a token": median(turn.per_token_ms for turn in free),
        "ratio": median(ratios),
        "worst ratio": max(ratios),
        "cases above the mark": sum(ratio > WORST_MARK for ratio in ratios),
        "tokens a step": tokens / sum(turn.num_steps for turn in bound),
        "share drafted and accepted": num_accepted / tokens,
        "share of drafts rejected": 1 - num_accepted / num_drafted if num_drafted else 0.0,
        "invalid": sum(turn.fits is False for turn in bound),
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
        for drafter in options.drafters.split(","):
            speed = Speed(llm, options)
            pairs = [pair for case in asked if (pair := speed.pair(case, drafter)) is not None]
            figures.append({**tell(drafter, pairs), "refused": speed.refused})
    if options.json is not None:
        about = {"machine": platform.platform(), "options": {k: str(v) for k, v in vars(options).items()}}
        options.json.write_text(json.dumps({**about, "drafters": figures}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
