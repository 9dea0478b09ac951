"""The engine part of gpu.py: whole engines on the GPU. Each checks first that speculation changes no text, then says
what it gives, what a step of 1 to 64 rows takes, and what transformers takes for the same. Needs specserve installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from vs_transformers import run_all, specserve_generate, transformers_generate

from specserve.bench.compare import Plan, Question
from specserve.bench.grid import figures as grid_figures, groups, measure
from specserve.bench.prompts import load_prompts, spread
from specserve.bench.random_target import random_llm
from specserve.bench.synthetic import DrafterCost, Question as Sizes, figures as size_figures, synthetic
from specserve.bench.text import load_text, prompt
from specserve.bench.verify_cost import settings, verify_cost
from specserve.checkpoint import catalog
from specserve.config import DEFAULT_MODEL
from specserve.llm import LLM
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from gpu import Report

WEIGHTS = ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"quantization": "int4"})
ROWS = (1, 2, 4, 8, 16, 32, 64)
SHAPES = ("1.5b", "8b")
CONCURRENCY, TEMPERATURE = (1, 4, 16), (0.0, 0.8)
NUM_PROMPTS, NUM_TOKENS, CONTEXT, REPEATS = 16, 96, 512, 5
MODEL_LEN = 1024
COSTS = (DrafterCost(0.0), DrafterCost(0.08))


def measure_engines(report: Report, model: str = DEFAULT_MODEL, device: str = "cuda") -> None:
    """Sections of the report, the shortest first."""
    for name, run in sections(model, {"device": device, "max_model_len": MODEL_LEN}):
        report.section(name, run)


def sections(model: str, engine: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Their names, and what measures them."""
    yield "ahead", partial(ahead, model, {**engine, "dtype": "bfloat16"})
    for weights in WEIGHTS:
        yield f"engine {'_'.join(weights.values())}", partial(measured, model, {**engine, **weights})
    flash = {**engine, "dtype": "bfloat16", "block_size": 256, "bit_identity": False}
    for attention in ("exact", "flash"):
        yield f"attention {attention}", partial(steps_of, model, {**flash, "attention": attention})
    yield "transformers", partial(against_transformers, model, engine)
    for shape in SHAPES:
        yield f"shape {shape}", partial(of_shape, shape, engine)


def measured(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """What steps cost by rows, and each drafter against plain decoding by streams and temperature. Raises EngineError
    for a text that a drafter or the company of others changed."""
    with LLM(model, max_num_seqs=max(CONCURRENCY), **engine) as llm:
        print(llm.summary, flush=True)
        steps = steps_in(llm)
        asked = spread(load_prompts(), NUM_PROMPTS)
        questions = [
            Question(llm.tokenizer.encode_chat([{"role": "user", "content": each.text}]), "all") for each in asked
        ]
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=0, ignore_eos=True)
        plan = Plan(drafters=["ngram", "auto"], params=params, repeats=REPEATS)
        grid = groups(["all"] * len(questions), ["all"], plan, CONCURRENCY, TEMPERATURE, NUM_PROMPTS)
        measure(llm, questions, grid)
        found = grid_figures(grid, settings(llm, 0, REPEATS, REPEATS))
    for cell in found["cells"]:
        rate = cell["prompts"] * NUM_TOKENS / cell["seconds"]
        print(
            f"  {cell['drafter']:6} {cell['concurrency']:3} at once, temperature {cell['temperature']:.1f}: "
            f"{rate:7.0f} tokens/s, {cell['ratio']:.2f} of plain decoding, {cell['tokens_per_step']:.2f} tokens a step",
            flush=True,
        )
    return {"steps": steps, "grid": found}


def ahead(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step of plain decoding by streams, in turns: where each begins when the one before it has ended
    for everybody, and where it begins ahead, as it does on a GPU."""
    with LLM(model, drafter="none", max_num_seqs=max(CONCURRENCY), **engine) as llm:
        asked, found = spread(load_prompts(), NUM_PROMPTS), {}
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        for streams in CONCURRENCY:
            took: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(REPEATS):
                for begins_ahead, times in took.items():
                    llm.engine.begins_ahead = begins_ahead
                    begun = time.perf_counter()
                    llm.generate([each.text for each in asked[:streams]], params)
                    times.append(1000 * (time.perf_counter() - begun) / NUM_TOKENS)
            found[str(streams)] = {"plain_ms": median(took[False]), "ahead_ms": median(took[True])}
            print(f"  {streams:3} at once: {median(took[False]):.3f} ms, ahead {median(took[True]):.3f} ms", flush=True)
    return found


def steps_of(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """What steps cost by rows."""
    with LLM(model, **engine) as llm:
        print(llm.summary, flush=True)
        return steps_in(llm)


def steps_in(llm: LLM) -> dict[str, Any]:
    ids = prompt(llm.tokenizer, load_text(), CONTEXT)
    found = verify_cost(llm, ids, ROWS, REPEATS)
    columns = (found[name] for name in ("rows", "step_ms", "cost", "host_ms"))
    for rows, step, cost, host in zip(*columns, strict=True):
        print(f"  {rows:3} rows: {step:7.3f} ms, {cost:.2f} of one, host {host:.3f} ms", flush=True)
    print(f"  {found['bandwidth_utilisation']:.0%} of the bandwidth", flush=True)
    return found


def of_shape(shape: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Steps of random weights, and drafts that coins accept."""
    asked = Sizes(shape=shape, costs=COSTS, rows=ROWS[:5], context=CONTEXT, repeats=REPEATS, max_tokens=NUM_TOKENS)
    options = {**engine, "dtype": "bfloat16", "max_model_len": max(MODEL_LEN, asked.max_model_len), "max_num_seqs": 1}
    with random_llm(shape, **options) as llm:
        print(llm.summary, flush=True)
        found = size_figures(llm, synthetic(llm, asked))
    for each in found["drafters"]:
        print(f"  drafter at {each['cost']} of a step: {each['best_speedup']:.2f} at {each['best']} tokens", flush=True)
    return found


def against_transformers(model: str, engine: dict[str, Any]) -> dict[str, Any]:
    """Plain greedy decoding of one stream, in turns: of transformers as it comes, and compiled with a static cache."""
    found = catalog.resolve(model)
    folder = catalog.as_safetensors(found, catalog.cache_folder() / "safetensors" / found.name)
    with LLM(model, dtype="bfloat16", drafter="none", **engine) as llm:
        asked = spread(load_prompts(), 4)
        prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": each.text}]) for each in asked]
        peers = {
            f"transformers{', compiled' if compiled else ''}": transformers_generate(
                Path(folder), "bfloat16", llm.device, NUM_TOKENS, compiled
            )
            for compiled in (False, True)
        }
        rates = run_all({"specserve": specserve_generate(llm, NUM_TOKENS), **peers}, prompts, REPEATS)
    middle = {name: median(each) for name, each in rates.items()}
    print("  " + ", ".join(f"{name} {rate:.0f} tokens/s" for name, rate in middle.items()), flush=True)
    return {"tokens_per_second": middle, "ratio": {name: middle["specserve"] / middle[name] for name in peers}}
