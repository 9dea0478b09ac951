"""Memory does not grow with the number of different schemas: the cache keeps to its bound, and what it has forgotten is
gone from the backend as well. The program that measures both processes runs here for a moment."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest

from specserve.constraint.compiler import Compiler
from specserve.constraint.vocabulary import vocabulary
from specserve.models.tokenizer import Tokenizer
from specserve.structured import Structured
from specserve.testing import write_tiny_model

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "structured" / "memory.py"
MOST_KEPT = 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structured_memory", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["structured_memory"] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


def test_what_the_cache_forgets_is_gone(tiny: Path, program: ModuleType) -> None:
    words = vocabulary(tokenizer := Tokenizer(tiny), tokenizer.vocab_size)
    size = Compiler(lambda: words).compile(Structured.json(program.schema(0))).num_bytes
    compiler = Compiler(lambda: words, max_bytes=MOST_KEPT * (size + 1000))
    made = []
    for i in range(40):
        grammar = compiler.compile(Structured.json(program.schema(i)))
        made.append(weakref.ref(grammar))
        assert compiler.num_bytes <= MOST_KEPT * (size + 1000)
    del grammar
    gc.collect()
    alive = [i for i, grammar in enumerate(made) if grammar() is not None]
    assert 1 <= len(alive) <= MOST_KEPT + 1
    assert alive == list(range(40 - len(alive), 40)), "the latest are kept"


def test_refusals_are_kept_within_the_bound(tiny: Path) -> None:
    words = vocabulary(tokenizer := Tokenizer(tiny), tokenizer.vocab_size)
    compiler = Compiler(lambda: words, max_bytes=20_000)
    for i in range(60):
        with pytest.raises(ValueError, match="multipleOf"):
            compiler.compile(Structured.json({"not": {"multipleOf": i + 2}}))
        assert compiler.num_bytes <= 20_000
    assert compiler.num_bytes > 10_000


def test_the_program_samples_both_processes(tiny: Path, program: ModuleType) -> None:
    samples = list(program.run(tiny, 4, 2**20))
    assert [sample.num_schemas for sample in samples] == [1, 2, 3, 4]
    assert all(sample.here_mib > 10 and sample.worker_mib > 10 and 0 < sample.kept_mib <= 1 for sample in samples)
