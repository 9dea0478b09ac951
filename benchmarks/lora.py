"""What LoRA adapters cost: a step whose rows have them beside one whose rows have none, in turns, and the throughput of
many adapters over few slots. Adapters are random, of all linear layers.

    python benchmarks/lora.py [--rank 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence as Many
from pathlib import Path
from statistics import median
from typing import Any

from specserve import LLM, SamplingParams
from specserve.runtime.executor import LocalExecutor, local
from specserve.runtime.pack import SequenceRows, pack
from specserve.testing import write_adapter

ROWS = (1, 6, 16)
CONTEXT = 128  # tokens before the rows of a step
NUM_ADAPTERS, SLOTS = 32, 8
STEPS, ROUNDS = 80, 3
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, default=16, help="answers at a time, for the throughput")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine: dict[str, Any] = {"drafter": "none", "quantization": options.quantization, "max_model_len": 1024}
    engine["max_num_seqs"] = options.streams
    with tempfile.TemporaryDirectory() as folder, LLM(options.model, max_loras=SLOTS, **engine) as llm:
        executor = local(llm.engine.executor)
        shapes = executor.runner.model.spec.shapes()  # type: ignore[attr-defined]
        for i in range(NUM_ADAPTERS):
            path = write_adapter(Path(folder) / str(i), shapes, options.rank, seed=i, size=0.02)
            llm.load_adapter(str(i), path)
        with LLM(options.model, **engine) as without:
            steps = step_times(executor, local(without.engine.executor), llm)
        found = {"steps_ms": steps, "tokens_per_s": throughput(llm)}
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, **found}, indent=1)
        )


def step_times(executor: LocalExecutor, without: LocalExecutor, llm: LLM) -> dict[str, dict[str, float]]:
    """Milliseconds of steps, medians, by rows: of an engine that takes no adapters, then of one that does, whose rows
    have none, one, or up to eight different ones; and the ratios to the first."""
    llm.generate([[1, 2, 3]] * SLOTS, [PARAMS] * SLOTS, adapter="0")
    for i in range(SLOTS):  # so that each has a slot
        llm.generate([[1, 2, 3]], PARAMS, adapter=str(i))
    kinds: dict[str, tuple[LocalExecutor, Many[int]]] = {
        "off": (without, [-1]),
        "none": (executor, [-1]),
        "one": (executor, [0]),
        "eight": (executor, range(SLOTS)),
    }
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(STEPS):
            for kind, (runs, slots) in kinds.items():
                seconds[kind].append(step(runs, rows, slots))
        medians = {kind: 1000 * median(each) for kind, each in seconds.items()}
        found[str(rows)] = medians | {f"{kind} ratio": medians[kind] / medians["off"] for kind in kinds}
    return found


def step(executor: LocalExecutor, rows: int, slots: Many[int]) -> float:
    """Seconds of a step with a row of each of so many sequences. All is written to block 0, which is nobody's."""
    blocks = [0] * (CONTEXT // executor.block_size + 1)
    seqs = [SequenceRows([7], CONTEXT, blocks, num_logits=1, adapter=slots[i % len(slots)]) for i in range(rows)]
    inputs = pack(seqs, executor.row_multiple)
    begun = time.perf_counter()
    executor.start(inputs)
    executor.finish(lambda best: None)
    return time.perf_counter() - begun


def throughput(llm: LLM) -> dict[str, float]:
    """Tokens a second of 64 answers, `--streams` at a time: plain, with one adapter, with 32 adapters over 8 slots."""
    prompts = [[5 + i, 17, 23, 9, 40 + i, 3, 8] for i in range(64)]
    kinds: dict[str, list[str | None]] = {
        "plain": [None] * len(prompts),
        "one": ["0"] * len(prompts),
        "many": [str(i % NUM_ADAPTERS) for i in range(len(prompts))],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, names in kinds.items():
            llm.reset_prefix_cache()
            begun = time.perf_counter()
            answer(llm, prompts, names)
            seconds[kind].append(time.perf_counter() - begun)
    num_tokens = len(prompts) * (PARAMS.max_tokens or 0)
    rates = {kind: num_tokens / median(each) for kind, each in seconds.items()}
    return rates | {"many over one": rates["many"] / rates["one"], "one over plain": rates["one"] / rates["plain"]}


def answer(llm: LLM, prompts: list[list[int]], names: list[str | None]) -> None:
    """All prompts in the same steps, each with its adapter."""
    made = [
        llm._requests.of_prompt(prompt, PARAMS, **llm._requests.fields(None, None, adapter=name))
        for prompt, name in zip(prompts, names, strict=True)
    ]
    llm._run(made, progress=False)


if __name__ == "__main__":
    main()
