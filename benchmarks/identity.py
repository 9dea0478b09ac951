"""Are outputs the same, bit for bit, whatever runs them? Greedy and seeded answers to the same prompts: plain, with
each drafter, weighed as by default, and with scripted trees; alone and in batches; with one thread and more. Writes
JSON; exits with 1 on a difference.

    python benchmarks/identity.py --prompts FILE --max-tokens 48 --batches 1,4,16 --threads 1,2 --json result.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specserve.bench.prompts import load_prompts, spread
from specserve.config import DEFAULT_MODEL
from specserve.llm import LLM
from specserve.speculation.host import DraftHost
from specserve.testing import ScriptedDrafter
from specserve.types import SamplingParams

Tokens = list[int]
DRAFTERS = ("none", "auto", "ngram", "recycle", "tree")


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", default="demo", help="JSON lines, or demo")
    parser.add_argument("--limit", type=int, help="prompts (default: all)")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def sampling(index: int, temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_p=0.95, seed=index, max_tokens=max_tokens, ignore_eos=True)


def answers(llm: LLM, prompts: list[Tokens], temperature: float, max_tokens: int, batch: int) -> list[Tokens]:
    """Output token ids, prompts taken `batch` at a time."""
    found: list[Tokens] = []
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        params = [sampling(first + i, temperature, max_tokens) for i in range(len(some))]
        found += [output.outputs[0].token_ids for output in llm.generate(some, params)]
    return found


def draft_with(llm: LLM, drafter: str, prompts: list[Tokens], right: list[Tokens] | None) -> None:
    """Let the engine draft trees that hold the right answer four times in five, among wrong siblings."""
    if drafter != "tree" or right is None:
        return
    engine = llm.engine
    vocab_size = engine.limits.vocab_size
    scripts = {tuple(prompt): answer for prompt, answer in zip(prompts, right, strict=True)}
    scripted = ScriptedDrafter(scripts, vocab_size, accuracy=0.8, decoys=1)
    engine.use(DraftHost(scripted, vocab_size, timeout_s=10.0), engine.policy.num_tokens)


def differing(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry for each combination: how many answers differ from those of plain decoding alone."""
    right: dict[float, list[Tokens]] = {}
    for threads, drafter in itertools.product(sorted(options.threads, reverse=True), DRAFTERS):
        with LLM(
            options.model,
            dtype=options.dtype,
            quantization=options.quantization,
            threads=threads,
            drafter="none" if drafter == "tree" else drafter,
            max_num_seqs=max(options.batches),
        ) as llm:
            texts = spread(load_prompts(options.prompts), options.limit)
            prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": each.text}]) for each in texts]
            for temperature, batch in itertools.product((0.0, 0.8), options.batches):
                draft_with(llm, drafter, prompts, right.get(temperature))
                llm.reset_prefix_cache()
                before, begun = llm.counters(), time.perf_counter()
                got = answers(llm, prompts, temperature, options.max_tokens, batch)
                wanted = right.setdefault(temperature, got)
                yield {
                    "threads": threads,
                    "drafter": drafter,
                    "temperature": temperature,
                    "batch": batch,
                    "different": sum(a != b for a, b in zip(got, wanted, strict=True)),
                    "tokens": sum(map(len, got)),
                    "steps": llm.counters().num_steps - before.num_steps,
                    "seconds": round(time.perf_counter() - begun, 1),
                }


def main() -> None:
    options = parse()
    found = []
    for entry in differing(options):
        print(*(f"{key} {value}" for key, value in entry.items()), sep="  ", flush=True)
        found.append(entry)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(entry["different"] for entry in found))


if __name__ == "__main__":
    main()
