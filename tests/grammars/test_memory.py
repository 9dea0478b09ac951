"""Memory does not grow with the number of different schemas: the cache keeps to its bound, and what it has forgotten is
gone from the backend as well. The program that measures both processes runs here for a moment."""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest

from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

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


MEASURED = r"""
import ctypes, gc, json, random, sys
import numpy as np
from specserve.structured.base import Vocabulary
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured

noise = random.Random(1)
letters = "etaoinshrdlucmfwygpbvkxqjz" * 3 + "ETAOINS 0123456789 .,-:@_/" + "äéжñ"
texts = {bytes([i]) for i in range(256)}
texts |= {"".join(noise.choices(letters, k=noise.randint(2, 9))).encode() for _ in range(49_000)}
tokens = [*sorted(texts), b""]
ids = {text: i for i, text in enumerate(tokens)}
encode = lambda text: [ids[bytes([byte])] for byte in text.encode()]
words = Vocabulary(tokens, (len(texts),), len(tokens), encode)
kinds = {
    "formats": lambda i: Structured.json({"type": "object", "additionalProperties": False, "properties": {
        f"d{i}": {"type": "string", "format": "date-time"}, "e": {"type": "string", "format": "email"},
        "s": {"type": "string", "maxLength": 100 + i}, "p": {"type": "string", "pattern": "^[A-Z][a-z]{2,30}$"}},
        "required": [f"d{i}", "e", "s", "p"]}),
    "unicode": lambda i: Structured.regex(rf"\w{{1,{30 + i}}} \w+ [\p{{L}}]{{3,9}}{i}"),
    "fields": lambda i: Structured.json({"type": "object", "properties": {
        f"field_{i}_{k}": {"type": ["string", "number", "boolean"][k % 3]} for k in range(25)}}),
    "enum": lambda i: Structured.json({"enum": [f"value {i} {k}" for k in range(300)]}),
    "choice": lambda i: Structured.regex(f"yes {i}|no"),
}
kind, compiler = kinds[sys.argv[1]], Compiler(lambda: words, "llguidance", max_bytes=2**34)


def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * 4096


def use(grammar, seed):
    state, row, dice = grammar.start(), np.zeros(words.num_words, np.int32), random.Random(seed)
    for _ in range(60):
        state.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != words.eos_ids[0]]
        if not len(allowed) or not state.advance(int(allowed[dice.randrange(len(allowed))])):
            return


for i in range(4):
    use(compiler.compile(kind(1000 + i)), i)
before, counted = resident(), compiler.num_bytes
grammars = [compiler.compile(kind(i)) for i in range(12)]
for i, grammar in enumerate(grammars):
    use(grammar, i)
    use(grammar, 100 + i)
after = resident()
compiler.compile(Structured.regex("the last"))
print(json.dumps([after - before, compiler.num_bytes - counted]))
"""


@pytest.mark.parametrize("kind", ["formats", "unicode", "fields", "enum", "choice"])
def test_what_is_counted_is_what_is_held(kind: str) -> None:
    """Resident memory of grammars that were used, in a process of their own. With classes of Unicode it was nine times
    what was counted."""
    run = subprocess.run([sys.executable, "-c", MEASURED, kind], capture_output=True, text=True, check=True)
    held, counted = json.loads(run.stdout)
    assert held <= 1.5 * counted
