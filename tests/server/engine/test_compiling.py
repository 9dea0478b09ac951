"""Constraints that the engine's process compiles beside its steps."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from specserve.constraint.compiler import Compiler
from specserve.constraint.vocabulary import vocabulary
from specserve.engine.request import Request
from specserve.models.tokenizer import Tokenizer
from specserve.server.engine.compiling import Compiling
from specserve.structured import Structured
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams


@pytest.fixture
def compiling(tmp_path: Path) -> Compiling:
    tokenizer = Tokenizer(write_tiny_model(tmp_path, "llama"))
    return Compiling(Compiler(lambda: vocabulary(tokenizer, tokenizer.vocab_size)), None)


def compiled(compiling: Compiling, asked: Structured) -> Request:
    compiling.add(Request(id="1", prompt_ids=[1], params=SamplingParams(structured=asked)))
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for request, error in compiling.done():
            assert error is None
            return request
        time.sleep(0.001)
    raise AssertionError("it was not compiled")


def niceness(name: str) -> list[int]:
    """Of the threads with such a name."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(name)]
    return [os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in threads]


def test_long_constraints_are_compiled_behind_everything_else(compiling: Compiling) -> None:
    ordinary = os.getpriority(os.PRIO_PROCESS, 0)
    assert compiled(compiling, Structured.choice(["a", "b"])).grammar is not None
    assert niceness("specserve-grammars") == [ordinary]
    assert niceness("specserve-long-grammars") == []
    words = [f"word {i}" for i in range(1000)]
    assert compiled(compiling, Structured.choice(words)).grammar is not None
    assert niceness("specserve-long-grammars") == [max(15, ordinary)]
    assert niceness("specserve-grammars") == [ordinary] == [os.getpriority(os.PRIO_PROCESS, 0)]
