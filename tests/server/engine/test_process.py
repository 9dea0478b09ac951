"""The engine's process while it rests: how long it waits for commands, and what it does with the time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.compiling import Compiling
from specserve.engine.port import LocalPort
from specserve.engine.request import Request
from specserve.server.engine import process
from specserve.server.engine.messages import Command, Stop, Wake
from specserve.server.engine.process import EngineProcess
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams


class Script:
    """A wire on which one command comes, and nothing more until it has waited for a whole second twice in a row. `now`
    goes on by each wait, and by 0.1 ms where it does not wait."""

    def __init__(self, first: Command) -> None:
        self.now = 100.0  # seconds
        self.waits: list[int] = []
        self._first = first

    def commands(self, wait_ms: int) -> list[Command]:
        self.waits.append(wait_ms)
        self.now += max(1e-3 * wait_ms, 1e-4)
        if len(self.waits) == 1:
            return [self._first]
        return [Stop()] if self.waits[-2:] == [1000, 1000] else []


def test_after_the_warm_up_everything_is_counted_and_the_warm_up_is_not(tmp_path: Path) -> None:
    """The phase "draft" too, which is timed by whoever drafts."""
    folder = write_tiny_model(tmp_path, "llama", seed=3)
    built = build(EngineConfig(model=str(folder), dtype="float32", drafter="ngram"))
    port = LocalPort(built.engine, Compiling(built.compiler, built.tokenizer.markers))
    process._warm_up(port)
    counters = built.engine.counters
    assert (counters.num_steps, counters.seconds["total"], counters.seconds["draft"]) == (0, 0.0, 0.0)
    port.submit(Request(id="r", prompt_ids=[5, 6, 7] * 4, params=SamplingParams(ignore_eos=True)), lambda event: None)
    while port.step():
        pass
    assert counters.num_steps > 1
    assert counters.seconds["draft"] >= sum(counters.draft_seconds.values()) > 0
    port.close()


def test_it_stays_awake_for_a_request_that_is_about_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 3 ms. What grammars need was made before the first command: Python does nothing else for 0.1 s of it."""
    wire = Script(Wake())
    prepared: list[float] = []
    monkeypatch.setattr(process.time, "monotonic", lambda: wire.now)
    port: Any = SimpleNamespace(
        num_awaiting=0, wait_s=None, step=lambda: False, prepare=lambda: prepared.append(wire.now)
    )
    engine = EngineProcess(wire, port)  # type: ignore[arg-type]
    engine.run()
    awake = wire.waits.count(0)
    assert wire.waits == [1000, *[0] * awake, 1000, 1000]
    assert 28 <= awake <= 31, "0.1 ms each"
    assert prepared == [100.0], "once, before anything came"
