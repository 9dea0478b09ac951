"""Measures what steps of a model cost on this machine, for cluster_sim.py: decoding by rows and by tokens of context,
chunks of prompts by tokens and by what these read. All on the engine's own path, without drafts, in rounds.

    python benchmarks/simulation/measure.py smollm2-135m --threads 2 --json costs.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence as Many
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from specserve import LLM, SamplingParams
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.machine.cores import default_threads

ROWS = (1, 2, 4, 8, 16, 32, 64)
SHORT, LONG = 64, 1024  # tokens of context
LONG_ROWS = (1, 4, 16)  # sequences with a long one
CHUNKS = (32, 64, 128, 256, 512)  # tokens of a prompt, in one step
CHUNK = 512  # of a long prompt
STEPS = 8  # of decoding, in each round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True, help="where the table goes")
    options = parser.parse_args()
    engine: dict[str, Any] = {"drafter": "none", "quantization": options.quantization, "threads": options.threads}
    engine |= {"max_num_seqs": ROWS[-1], "max_num_batched_tokens": CHUNK, "max_model_len": 4 * CHUNK + SHORT}
    engine["max_step_ms"] = 10_000.0  # no chunk ends by the clock
    with LLM(options.model, prefix_caching=False, kv_cache_gib=2.0, **engine) as llm:
        table = measure(llm.engine, options.rounds)
        source = {
            "model": options.model,
            "threads": options.threads or default_threads(),
            "quantization": options.quantization,
        }
    options.json.write_text(json.dumps({**source, **table}, indent=1) + "\n")
    print(options.json.read_text())


def measure(engine: Engine, rounds: int) -> dict[str, Any]:
    """The table, of medians; the first round only warms up."""
    ids = map(str, count())
    decoding: dict[tuple[int, int], list[float]] = {}
    chunks: dict[tuple[int, int], list[float]] = {}
    for number in range(rounds + 1):
        for context, rows in [*((SHORT, rows) for rows in ROWS), *((LONG, rows) for rows in LONG_ROWS)]:
            decoding.setdefault((rows, context), []).extend(decode(engine, ids, rows, context))
        for tokens in (*CHUNKS, 4 * CHUNK):
            for context, seconds in prefill(engine, ids, tokens):
                chunks.setdefault((min(tokens, CHUNK), context), []).append(seconds)
        if not number:
            decoding.clear()
            chunks.clear()
    return fit({k: median(v) for k, v in decoding.items()}, {k: median(v) for k, v in chunks.items()})


def fit(decoding: dict[tuple[int, int], float], chunks: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Milliseconds: of decoding rows + `context_token_ms` * tokens of context; of chunks without decoding `prompt_ms` +
    tokens * (`prompt_token_ms` + `prompt_context_token_ms` * the tokens that each reads)."""
    slopes = [
        (decoding[rows, LONG] - decoding[rows, SHORT]) / (rows * (LONG - SHORT)) for rows in LONG_ROWS if rows > 1
    ]
    context_s = max(0.0, median(slopes))
    unknowns = np.array([(1.0, tokens, tokens * (context + tokens / 2)) for tokens, context in chunks])
    (fixed, each, read), *_ = np.linalg.lstsq(unknowns, np.array([*chunks.values()]), rcond=None)
    return {
        "rows": list(ROWS),
        "step_ms": [_ms(decoding[rows, SHORT] - context_s * rows * SHORT) for rows in ROWS],
        "context_token_ms": _ms(context_s),
        "prompt_ms": _ms(max(0.0, fixed)),
        "prompt_token_ms": _ms(each),
        "prompt_context_token_ms": _ms(max(0.0, read)),
    }


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.4g}")


def decode(engine: Engine, ids: Iterator[str], rows: int, context: int) -> list[float]:
    """Seconds of steps in which so many sequences decode, each with so many tokens before."""
    _add(engine, ids, [context] * rows, STEPS + 64 * rows)
    seconds: list[float] = []
    while len(seconds) < STEPS:
        begun = time.perf_counter()
        events = engine.step()
        if len(events) == rows and all(len(event.tokens) == 1 for event in events) and _all_decode(engine, rows):
            seconds.append(time.perf_counter() - begun)
    _end(engine)
    return seconds


def prefill(engine: Engine, ids: Iterator[str], tokens: int) -> list[tuple[int, float]]:
    """Of each chunk of a prompt of so many tokens: how many came before, and seconds of its step."""
    _add(engine, ids, [tokens], 2)
    found: list[tuple[int, float]] = []
    (seq,) = engine.scheduler.waiting
    while seq.num_output == 0:
        before, begun = seq.cached, time.perf_counter()
        engine.step()
        found.append((before, time.perf_counter() - begun))
    _end(engine)
    return found if len(found) == -(-tokens // CHUNK) else []  # before anything was measured a chunk is short


def _all_decode(engine: Engine, rows: int) -> bool:
    running = engine.scheduler.running
    return len(running) == rows and all(seq.num_output > 1 for seq in running)


def _add(engine: Engine, ids: Iterator[str], lengths: Many[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for length in lengths:
        prompt = [i % 199 for i in range(length)]
        engine.add(Request(id=next(ids), prompt_ids=prompt, params=params))


def _end(engine: Engine) -> None:
    for name in [*engine.requests]:
        engine.abort(name)


if __name__ == "__main__":
    main()
