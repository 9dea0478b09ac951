"""What dividing a model among processes costs or saves on this machine: steps, and answers, of one process with all
threads and of several that share them, in turns; and how long the first of these waits in sums.

    python benchmarks/tensor_parallel.py [--size 2] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from specserve import LLM, SamplingParams
from specserve.machine.cores import default_threads
from specserve.parallel.messages import Run
from specserve.runtime.executor import Executor
from specserve.runtime.pack import SequenceRows, StepInput, pack

ROWS = (1, 4, 6, 16, 128)
CONTEXT = 128  # tokens before the rows of a step
STEPS, ROUNDS = 60, 5
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SUMS = ("sum_peers", "gather_peers", "share_broken")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--threads", type=int, default=default_threads(), help="of all processes together")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine: dict[str, Any] = {"quantization": options.quantization, "max_model_len": 1024, "drafter": "ngram"}
    with ExitStack() as stack:
        llms = {
            size: stack.enter_context(
                LLM(options.model, tensor_parallel_size=size, threads=options.threads // size, **engine)
            )
            for size in (1, options.size)
        }
        found: dict[str, Any] = {
            "steps_ms": step_times(llms),
            "share of sums": {str(rows): share_of_sums(llms[options.size], rows) for rows in ROWS},
            "tokens_per_s": throughput(llms),
        }
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, **found}, indent=1)
        )


def inputs(executor: Executor, rows: int) -> StepInput:
    """A row of each of so many sequences, or a chunk of one. All is written to block 0, which is nobody's."""
    blocks = [0] * (CONTEXT // executor.block_size + 1)
    if rows > 16:
        return pack([SequenceRows([7] * rows, 0, [0] * (rows // executor.block_size + 1), num_logits=1)], 1)
    return pack([SequenceRows([7], CONTEXT, blocks, num_logits=1) for _ in range(rows)], executor.row_multiple)


def step_times(llms: dict[int, LLM]) -> dict[str, dict[str, float]]:
    """Milliseconds, medians, by rows and number of processes, and their ratio."""
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        seconds: dict[int, list[float]] = {size: [] for size in llms}
        for _ in range(STEPS):
            for size, llm in llms.items():
                executor = llm.engine.executor
                step = inputs(executor, rows)
                begun = time.perf_counter()
                executor.start(step)
                executor.finish(lambda best: None)
                seconds[size].append(time.perf_counter() - begun)
        medians = {str(size): 1000 * median(each) for size, each in seconds.items()}
        first, second = medians.values()
        found[str(rows)] = medians | {"ratio": second / first}
    return found


def share_of_sums(llm: LLM, rows: int) -> float:
    """Of a step's time in native code, of the first process: what it adds, and how long it waits for others."""
    executor: Any = llm.engine.executor
    runner, shares = executor._local.runner, []
    for _ in range(STEPS // 3):
        step = inputs(executor, rows)
        plan = runner.ops.plan(step.rows, runner.block_size)
        num_rows, num_gathered = step.rows.num_rows, len(step.logit_rows)
        recording = runner._captured._recording(num_rows, num_gathered, plan)
        recording.fill([step.token_ids, step.positions, step.logit_rows])
        executor._ranks.send(Run.of(step))
        seconds: Counter[str] = Counter()
        for name, took in recording.recording.profile(num_rows, num_gathered, plan):
            seconds[name] += took
        shares.append(sum(seconds[name] for name in SUMS) / seconds.total())
    return median(shares)


def throughput(llms: dict[int, LLM]) -> dict[str, dict[str, float]]:
    """Tokens a second of one stream and of 8, plain and drafted."""
    found: dict[str, dict[str, float]] = {}
    prompts = [[5 + i, 17, 23, 9, 40 + i, 3, 8] for i in range(8)]
    for name, some, drafter in (
        ("1 stream", prompts[:1], "none"),
        ("1 stream, ngram", prompts[:1], "ngram"),
        ("8 streams", prompts, "none"),
    ):
        rates: dict[int, list[float]] = {size: [] for size in llms}
        for _ in range(ROUNDS):
            for size, llm in llms.items():
                llm.reset_prefix_cache()
                begun = time.perf_counter()
                llm.generate(some, PARAMS, drafter=drafter)
                rates[size].append(len(some) * (PARAMS.max_tokens or 0) / (time.perf_counter() - begun))
        found[name] = {str(size): median(each) for size, each in rates.items()}
    return found


if __name__ == "__main__":
    main()
