"""Plain decoding of specserve against `generate` of transformers: the same prompts as token ids, greedy, same dtype,
same number of new tokens, in turns. Prints the ratio and writes JSON.

    python benchmarks/vs_transformers.py --limit 6 --max-tokens 64 --repeats 5 --json result.json
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
from specserve.types import SamplingParams

Generate = Callable[[list[int]], list[int]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="catalog name or Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts", default="demo", help="JSON lines, or demo")
    parser.add_argument("--limit", type=int, default=6, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of each prompt, end tokens ignored")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def specserve_generate(llm: LLM, max_tokens: int) -> Generate:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def generate(ids: list[int]) -> list[int]:
        llm.reset_prefix_cache()
        return llm.generate([ids], params)[0].outputs[0].token_ids

    return generate


def transformers_generate(
    folder: Path, dtype: str, device: str, max_tokens: int, is_compiled: bool = False
) -> Generate:
    """`is_compiled`: with a static cache, which has transformers compile the model's decoding on a GPU."""
    cache = {"cache_implementation": "static"} if is_compiled else {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval().to(torch.device(device))

    def generate(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids], device=device)  # [1, tokens]
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
                **cache,
            )
        new: list[int] = out[0, len(ids) :].tolist()
        return new

    return generate


def run_all(engines: dict[str, Generate], prompts: list[list[int]], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each engine, one figure a repeat; who goes first alternates from prompt to prompt."""
    for generate in engines.values():
        generate(prompts[0])
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for repeat in range(repeats):
        seconds = dict.fromkeys(engines, 0.0)
        tokens = dict.fromkeys(engines, 0)
        for index, ids in enumerate(prompts):
            order = list(engines) if (repeat + index) % 2 == 0 else list(reversed(engines))
            for name in order:
                begun = time.perf_counter()
                tokens[name] += len(engines[name](ids))
                seconds[name] += time.perf_counter() - begun
        for name in engines:
            rates[name].append(tokens[name] / seconds[name])
    return rates


def main() -> None:
    options = parse()
    found = catalog.resolve(options.model)
    folder = catalog.as_safetensors(found, catalog.cache_folder() / "safetensors" / found.name)
    prompts = spread(load_prompts(options.prompts), options.limit)
    with LLM(options.model, dtype=options.dtype) as llm:
        ids = [llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
        engines = {
            "specserve": specserve_generate(llm, options.max_tokens),
            "transformers": transformers_generate(folder, options.dtype, llm.device, options.max_tokens),
        }
        rates = run_all(engines, ids, options.repeats)
        figures = {
            **{key: getattr(options, key) for key in ("model", "dtype", "limit", "max_tokens", "repeats")},
            "device": llm.device,
            "threads": llm.threads,
            "tokens_per_second": {name: median(values) for name, values in rates.items()},
            "ratio": median(a / b for a, b in zip(rates["specserve"], rates["transformers"], strict=True)),
        }
    for name, rate in figures["tokens_per_second"].items():
        print(f"{name:12} {rate:7.1f} tokens/s")
    print(f"specserve over transformers, plain greedy decoding: {figures['ratio']:.2f}x")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
