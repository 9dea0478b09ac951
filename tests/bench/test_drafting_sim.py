"""benchmarks/drafting_sim.py: recorded answers again, a clock that is exact, and gains where there are some."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specserve.bench.replay import Record
from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.testing import write_tiny_model

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
FLAT = {"rows": [1, 64], "step_ms": [10.0, 10.063], "context_token_ms": 0.0, "prompt_ms": 0.0}
PROMPTS = {"prompt_token_ms": 0.5, "prompt_context_token_ms": 0.0}
STEEP = {**FLAT, "step_ms": [10.0, 640.0]}


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("drafting_sim")
    sys.path.remove(str(FOLDER))
    for name in [name for name in sys.modules if name.split(".")[0] in ("simulation", "cluster_sim", "drafting_sim")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)), drafter="none") as made:
        yield made


def records(num: int, num_tokens: int, period: int) -> list[Record]:
    """Answers that say the same again after so many tokens."""
    return [Record([*range(5, 25)], [30 + (at + i) % period for at in range(num_tokens)], "words") for i in range(num)]


def simulate(program: ModuleType, llm: LLM, table: dict[str, Any], found: list[Record], **options: Any) -> Any:
    engine = llm.engine
    executor = engine.executor
    costs = program.StepCosts.of({**table, **PROMPTS})
    simulation = program.Simulation(llm, costs, options.get("scatter", 0.0), 0.0)
    try:
        with simulation.virtual():
            who, concurrency = options.get("drafter", "ngram"), options.get("concurrency", 1)
            return program.simulate(simulation, {"words": found}, concurrency, who, 1)["words"]
    finally:
        engine.executor = executor


def test_text_that_repeats_gains_what_its_steps_save(program: ModuleType, llm: LLM) -> None:
    cell = simulate(program, llm, FLAT, records(2, 60, 5))
    assert cell["plain_s"] == pytest.approx(2 * (20 * 0.0005 + 59 * 0.010), rel=0.02)
    assert cell["plain_steps"] == 2 * 60
    assert cell["acceptance"] > 0.8
    assert cell["speedup"] == pytest.approx(
        cell["plain_s"] / (cell["plain_s"] - 0.010 * (120 - cell["steps"])), rel=0.02
    )
    assert cell["speedup"] > 2


def test_where_a_row_takes_a_step_nothing_is_lost(program: ModuleType, llm: LLM) -> None:
    cell = simulate(program, llm, STEEP, records(8, 60, 50), concurrency=8, scatter=0.05)
    assert 0.95 < cell["speedup"] < 1.05


def test_the_same_again_is_the_same(program: ModuleType, llm: LLM) -> None:
    clock = time.perf_counter
    cells = [simulate(program, llm, FLAT, records(6, 40, 7), concurrency=3, scatter=0.05) for _ in range(2)]
    assert cells[0]["speedup"] == cells[1]["speedup"] > 1
    assert time.perf_counter is clock


def test_what_it_cannot_simulate_is_refused(program: ModuleType, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="recycle drafts from what a recording has not"):
        simulate(program, llm, FLAT, records(1, 20, 5), drafter="recycle")
    with pytest.raises(SystemExit):
        program.main(["said.jsonl", "--concurrency", "0", "4"])
    assert "at least 1" in capsys.readouterr().err


def test_the_program(program: ModuleType, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording, costs, out = tmp_path / "said.jsonl", tmp_path / "costs.json", tmp_path / "out.json"
    lines = [json.dumps({"prompt_ids": each.prompt_ids, "output_ids": each.output_ids}) for each in records(4, 30, 6)]
    recording.write_text("\n".join(lines))
    costs.write_text(json.dumps({**FLAT, **PROMPTS}))
    told = [str(recording), "--model", llm.config.model, "--drafter", "ngram", "--costs", str(costs), "--limit", "3"]
    program.main([*told, "--max-tokens", "20", "--concurrency", "1", "2", "--json", str(out)])
    said = capsys.readouterr().out.splitlines()
    assert [each.split(":")[0] for each in said] == ["said.jsonl, 1 at once", "said.jsonl, 2 at once"]
    runs = json.loads(out.read_text())["runs"]
    assert [run["categories"]["all"]["plain_steps"] for run in runs] == [60, 40]
