"""Random schemas against an oracle, by the program that can do it for hours: a short run is clean, and a planted fault
is found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specserve.structured.base import Vocabulary
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "structured" / "fuzz.py"
TOOL = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("structured_fuzz", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["structured_fuzz"] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    tokenizer = Tokenizer(write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama"))
    return vocabulary(tokenizer, tokenizer.vocab_size)


def test_a_short_run_is_clean(program: ModuleType, words: Vocabulary) -> None:
    fuzz = program.Fuzz(words, 7, [TOOL])
    for _ in range(250):
        fuzz.one()
    assert fuzz.found.wrong_accepts == []
    assert fuzz.found.broken == []
    assert fuzz.found.counts["compiled"] > 100
    assert fuzz.found.counts["texts"] > 300
    assert fuzz.found.counts["valid instances"] > 100


def test_equal_seeds_are_equal_runs(program: ModuleType, words: Vocabulary) -> None:
    runs = [program.Fuzz(words, 3, [TOOL]) for _ in range(2)]
    for fuzz in runs:
        for _ in range(40):
            fuzz.one()
    assert runs[0].found == runs[1].found


def test_a_wrong_grammar_is_noticed(program: ModuleType, words: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a grammar that lets anything through, and with one that lets hardly anything through."""
    for planted, field in ((True, "wrong_accepts"), ({"const": "no"}, "wrong_rejects")):
        fuzz = program.Fuzz(words, 7, [TOOL])
        grammar: Any = fuzz._backend.compile(Structured.json(planted))
        monkeypatch.setattr(fuzz._backend, "compile", lambda _, grammar=grammar: grammar)
        for _ in range(40):
            fuzz.one()
        assert len(getattr(fuzz.found, field)) > 5
