"""Constraints that are compiled beside the engine's steps."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specserve.engine.compiling import Compiling
from specserve.engine.request import Request
from specserve.errors import InputError
from specserve.structured.base import Grammar, RefusedError
from specserve.structured.compiler import Compiler
from specserve.structured.spec import Structured
from specserve.structured.vocabulary import vocabulary
from specserve.testing import write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.types import SamplingParams


@pytest.fixture
def compiling(tmp_path: Path) -> Compiling:
    tokenizer = Tokenizer(write_tiny_model(tmp_path, "llama"))
    return Compiling(Compiler(lambda: vocabulary(tokenizer, tokenizer.vocab_size)), None)


def asking(name: str, asked: Structured, is_slow: bool = False) -> Request:
    return Request(id=name, prompt_ids=[1], params=SamplingParams(structured=asked), compiles_slowly=is_slow)


def compiled(compiling: Compiling, asked: Structured, is_slow: bool = False) -> Grammar | None:
    compiling.add(asking("1", asked, is_slow))
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for _, found in compiling.done():
            assert not isinstance(found, InputError)
            return found
        time.sleep(0.001)
    raise AssertionError("it was not compiled")


def niceness(pool: ThreadPoolExecutor) -> list[int]:
    return [os.getpriority(os.PRIO_PROCESS, thread.native_id) for thread in pool._threads]


def test_slow_constraints_are_compiled_behind_everything_else(compiling: Compiling) -> None:
    ordinary = os.getpriority(os.PRIO_PROCESS, 0)
    assert compiled(compiling, Structured.choice(["a", "b"])) is not None
    assert niceness(compiling._thread) == [ordinary]
    assert niceness(compiling._background) == []
    words = Structured.choice([f"word {i}" for i in range(1000)])
    assert compiled(compiling, words, is_slow=True) is not None
    assert niceness(compiling._background) == [max(15, ordinary)]
    assert niceness(compiling._thread) == [ordinary] == [os.getpriority(os.PRIO_PROCESS, 0)]


class Held(Compiler):
    """Compiles when it is let, and says what it was asked for."""

    def __init__(self) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type, return-value]
        self.asked: list[str] = []
        self.begun, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def compile(self, asked: Structured) -> Grammar:
        self.asked.append(asked.text)
        self.begun.release()
        self.may_go_on.acquire()
        raise RefusedError("enough")


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_is_dropped_before_it_has_begun_is_not_compiled(is_slow: bool) -> None:
    compiler = Held()
    compiling = Compiling(compiler, None)
    for name in ("a", "b", "c", "d"):
        compiling.add(asking(name, Structured.regex(name), is_slow))
    compiler.begun.acquire()
    dropped = [compiling.drop(name) for name in ("a", "b", "c", "b", "x")]
    assert [request and request.id for request in dropped] == ["a", "b", "c", None, None]
    for _ in range(2):
        compiler.may_go_on.release()
    end = time.monotonic() + 30
    while compiling and time.monotonic() < end:
        assert [each.id for each, _ in compiling.done()] in ([], ["d"])
    assert compiler.asked == ["a", "d"]


def test_what_is_known_does_not_wait_behind_slow_ones(compiling: Compiling) -> None:
    """A slow one that has been compiled is at hand, whatever is being compiled."""
    known = Structured.regex("a{3}")
    compiled(compiling, known, is_slow=True)
    may_end = threading.Event()
    compiling._background.submit(may_end.wait, 60)
    try:
        assert compiled(compiling, known, is_slow=True) is not None
    finally:
        may_end.set()
