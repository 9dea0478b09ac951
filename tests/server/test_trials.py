"""Constraints are tried where nothing is lost: once each, at most two at a time, and remembered."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specserve.constraint.base import RefusedError
from specserve.server import trials as module
from specserve.server.trials import Trials
from specserve.structured import Structured
from specserve.testing import tiny_tokenizer, write_tiny_model

SIZE = tiny_tokenizer().get_vocab_size()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def trials(folder: Path) -> Iterator[Trials]:
    made = Trials(folder, "llguidance", limit_s=30)
    yield made
    made.close()


def tried(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> list[Structured]:
    """What is tried from now on."""
    found: list[Structured] = []
    run = module.Trial.run

    def counted(self: Any, asked: Structured) -> Any:
        found.append(asked)
        return run(self, asked)

    monkeypatch.setattr(module.Trial, "run", counted)
    return found


def test_each_is_tried_once(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(trials, monkeypatch)
    good, bad = Structured.regex("a+"), Structured.regex("a(?=b)")

    async def run() -> None:
        for _ in range(3):
            await asyncio.gather(*(trials.check(good, SIZE) for _ in range(5)))
            results = await asyncio.gather(*(trials.check(bad, SIZE) for _ in range(5)), return_exceptions=True)
            assert {str(error) for error in results} == {
                "structured: look-around, including look-ahead and look-behind, is not supported."
            }
            assert all(isinstance(error, RefusedError) for error in results)

    asyncio.run(run())
    assert found == [good, bad]


def test_who_leaves_takes_nothing_from_the_others(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tried(trials, monkeypatch)

    async def run() -> None:
        asked = Structured.regex("b+")
        first, second = (asyncio.create_task(trials.check(asked, SIZE)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
        await trials.check(asked, SIZE)

    asyncio.run(run())
    assert len(found) == 1


def test_what_is_remembered_is_bounded(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BYTES", 40)
    found = tried(trials, monkeypatch)
    first, second, third = (Structured.regex(letter * 15) for letter in "abc")

    async def run() -> None:
        for asked in (first, second, first, third, first, second):
            await trials.check(asked, SIZE)

    asyncio.run(run())
    assert found == [first, second, third, second], "the one that was not used for longest is forgotten"


def test_a_worker_that_hangs_is_the_fault_of_one(folder: Path) -> None:
    trials = Trials(folder, limit_s=0.5)

    async def run() -> None:
        await trials.check(Structured.regex("a"), SIZE)
        (trial,) = trials._trials
        assert trial._process is not None
        os.kill(trial._process.pid, signal.SIGSTOP)
        slow = asyncio.create_task(trials.check(Structured.regex("b"), SIZE))
        await asyncio.sleep(0.05)
        with pytest.raises(RefusedError, match=r"takes longer than 0\.5 s, the most that is allowed"):
            await slow
        with pytest.raises(RefusedError, match="takes longer"):
            await trials.check(Structured.regex("b"), SIZE)  # from memory

    asyncio.run(run())
    trials.close()


def test_closing_ends_all_workers(folder: Path) -> None:
    trials = Trials(folder)
    trials.prepare(SIZE)
    trials.close()
    assert [trial for trial in trials._trials if trial._process is not None] == []
