"""Does memory stay flat over thousands of different schemas? They are compiled here, through the cache that is bounded
in bytes, and in the process that tries them; resident memory of both is read as they go.

    python benchmarks/structured/memory.py --schemas 20000

Linux only. The exit status is 1 if memory grew by more than `--most-mib` between a fifth of the
way, when the caches are full, and the end.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.trial import Trial
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

SAMPLES = 20
SETTLED = 0.2  # of the way: by then the caches are full and the allocator has its arenas


@dataclass(frozen=True, slots=True)
class Sample:
    """MiB after so many schemas; `kept_mib` is what the cache says it keeps."""

    num_schemas: int
    here_mib: float
    worker_mib: float
    kept_mib: float


def schema(i: int) -> dict[str, Any]:
    """Schemas as tools have them, no two alike, all of one size; one in four has to be rewritten."""
    number = 100_000 + i
    properties: dict[str, Any] = {
        "name": {"type": "string", "maxLength": 10 + i % 50},
        f"field_{number}": {"type": "integer", "minimum": number},
        "kind": {"enum": [f"a{number}", "b", "c"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    }
    found = {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}
    if i % 4 == 0:
        found["dependentRequired"] = {"kind": [f"field_{number}"]}
    return found


def resident_mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(folder: Path, num_schemas: int, max_bytes: int) -> Iterator[Sample]:
    words = vocabulary(tokenizer := Tokenizer(folder), tokenizer.vocab_size)
    compiler = Compiler(lambda: words, max_bytes=max_bytes)
    trial = Trial(folder, tokenizer.vocab_size, limit_s=60.0)
    try:
        for i in range(num_schemas):
            asked = Structured.json(schema(i))
            compiler.compile(asked)
            outcome = trial.run(asked, ['{"name": "a"}'])
            assert outcome.accepted == [True], outcome
            if (i + 1) % max(1, num_schemas // SAMPLES) == 0:
                gc.collect()
                worker = trial.process_id
                assert worker is not None, "it has just answered"
                yield Sample(i + 1, resident_mib(os.getpid()), resident_mib(worker), compiler.num_bytes / 2**20)
    finally:
        trial.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=20_000)
    parser.add_argument("--max-mib", type=float, default=64.0, help="that the cache here may keep")
    parser.add_argument("--most-mib", type=float, default=16.0, help="that either process may grow once settled")
    options = parser.parse_args()
    samples = list[Sample]()
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'schemas':>8} {'here MiB':>9} {'worker MiB':>11} {'kept MiB':>9}")
        for each in run(
            write_tiny_model(Path(folder) / "tiny", "llama"), options.schemas, int(options.max_mib * 2**20)
        ):
            print(f"{each.num_schemas:8} {each.here_mib:9.1f} {each.worker_mib:11.1f} {each.kept_mib:9.1f}", flush=True)
            samples.append(each)
    settled = next(each for each in samples if each.num_schemas >= SETTLED * options.schemas)
    here, worker = samples[-1].here_mib - settled.here_mib, samples[-1].worker_mib - settled.worker_mib
    print(
        f"grown from {settled.num_schemas} to {samples[-1].num_schemas}: here {here:+.1f} MiB, worker {worker:+.1f} MiB"
    )
    return 1 if max(here, worker) > options.most_mib else 0


if __name__ == "__main__":
    sys.exit(main())
