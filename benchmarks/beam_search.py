"""Beam search of specserve against transformers' `generate(num_beams=...)`, and with a JSON schema against itself
without drafts of tokens that the grammar leaves no choice of. The same prompts, in turns; prints the ratios and writes
JSON.

    python benchmarks/beam_search.py --width 4 --limit 4 --max-tokens 48 --repeats 5 --json result.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specserve.bench.prompts import load_prompts, spread
from specserve.checkpoint import catalog
from specserve.config import DEFAULT_MODEL
from specserve.llm import LLM
from specserve.structured.spec import Structured
from specserve.types import SamplingParams

Search = Callable[[list[int]], int]  # of a prompt; how many tokens the best answer has

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "description": {"type": "string", "maxLength": 40},
        "category": {"enum": ["question", "request", "statement"]},
        "language": {"enum": ["English", "French", "German"]},
        "is_polite": {"type": "boolean"},
        "number_of_sentences": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["title", "description", "category", "language", "is_polite", "number_of_sentences"],
    "additionalProperties": False,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="catalog name or Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--width", type=int, default=4, help="beams")
    parser.add_argument("--prompts", default="demo", help="JSON lines, or demo")
    parser.add_argument("--limit", type=int, default=4, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=48, help="new tokens of each prompt, end tokens ignored")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def ours(llm: LLM, width: int, params: SamplingParams) -> Search:
    def search(ids: list[int]) -> int:
        llm.reset_prefix_cache()
        return len(llm.beam_search([ids], params, beam_width=width, n=1)[0].outputs[0].token_ids)

    return search


def theirs(folder: Path, dtype: str, device: str, width: int, max_tokens: int) -> Search:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval().to(torch.device(device))

    def search(ids: list[int]) -> int:
        prompt = torch.tensor([ids], device=device)  # [1, tokens]
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=width,
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return len(out[0]) - len(ids)

    return search


def in_turns(searches: dict[str, Search], prompts: list[list[int]], repeats: int) -> dict[str, list[float]]:
    """Tokens of answers per second of each, one figure a repeat; who goes first alternates from prompt to prompt."""
    for search in searches.values():
        search(prompts[0])
    rates: dict[str, list[float]] = {name: [] for name in searches}
    for repeat in range(repeats):
        seconds, tokens = dict.fromkeys(searches, 0.0), dict.fromkeys(searches, 0)
        for index, ids in enumerate(prompts):
            order = list(searches) if (repeat + index) % 2 == 0 else list(reversed(searches))
            for name in order:
                begun = time.perf_counter()
                tokens[name] += searches[name](ids)
                seconds[name] += time.perf_counter() - begun
        for name in searches:
            rates[name].append(tokens[name] / seconds[name])
    return rates


def main() -> None:
    options = parse()
    found = catalog.resolve(options.model)
    folder = catalog.as_safetensors(found, catalog.cache_folder() / "safetensors" / found.name)
    prompts = spread(load_prompts(options.prompts), options.limit)
    free = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    schema = SamplingParams(temperature=0, max_tokens=160, structured=Structured.json(SCHEMA))
    plain = SamplingParams(temperature=0, max_tokens=160, structured=Structured.json(SCHEMA), num_speculative_tokens=0)
    figures: dict[str, Any] = {key: value for key, value in vars(options).items() if key != "json"}
    with LLM(options.model, dtype=options.dtype) as llm:
        ids = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
        pairs = {
            "free text, over transformers": {
                "specserve": ours(llm, options.width, free),
                "transformers": theirs(folder, options.dtype, llm.device, options.width, options.max_tokens),
            },
            "a schema, over itself without drafts": {
                "drafted": ours(llm, options.width, schema),
                "plain": ours(llm, options.width, plain),
            },
        }
        for what, searches in pairs.items():
            rates = in_turns(searches, ids, options.repeats)
            first, second = rates.values()
            figures[what] = {
                "tokens_per_second": {name: median(values) for name, values in rates.items()},
                "ratio": median(a / b for a, b in zip(first, second, strict=True)),
            }
            for name, values in rates.items():
                print(f"{name:12} {median(values):7.1f} tokens/s")
            print(f"{what}: {figures[what]['ratio']:.2f}x")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
