"""Where a step's time goes: every op under its own name, with its own time and bytes, and everything outside."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.bench import profile as module, traffic, verify_cost
from specserve.bench.profile import PLAN, profile
from specserve.bench.text import load_text, prompt
from specserve.bench.traffic import WatchedOps, watched
from specserve.bench.verify_cost import VerifySteps
from specserve.cli.main import run
from specserve.engine.counters import PHASES
from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.ops import AttentionRows
from specserve.testing import write_tiny_model

CONTEXT = 37
CALLS = {  # of a llama with three layers
    "embed": 1,
    "fused_add_norm": 6,
    "linear after fused_add_norm": 3,
    "rope_and_cache": 3,
    "attention": 3,
    "linear after attention": 3,
    "gated": 3,
    "linear after gated": 3,
    "gather_rows": 1,
    "norm": 1,
    "quantize_activation": 1,
    "linear after quantize_activation": 1,
    "argmax": 1,
}
HOST = {"host: attention plan, launch", "host: drafter", "host: masks", "host: sampler"}
HOST |= {"host: scheduler, pack, commit"}
READING = {
    name for name in CALLS if name.startswith(("embed", "fused_add_norm", "linear", "gated", "attention", "norm"))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


def small(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "kv_cache_gib": 0.02, "max_model_len": 512, "threads": 1} | options)


@pytest.fixture(params=["native", "reference"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    if request.param == "native":
        pytest.importorskip("specserve.kernels._native", reason="Built without native kernels.")
    else:
        request.getfixturevalue("without_native")
    with small(folder) as made:
        yield made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (module, verify_cost):
        monkeypatch.setattr(user, "read_bandwidth", lambda ops: 4e9)


def ids_of(llm: LLM) -> list[int]:
    return prompt(llm.tokenizer, load_text()[: 16 * CONTEXT], CONTEXT)


def test_every_op_is_there_once_for_each_call(llm: LLM) -> None:
    parts = profile(llm, ids_of(llm), rows=1, repeats=2)["parts"]
    assert {part["part"]: part["calls"] for part in parts if part["calls"]} == CALLS
    assert {part["part"] for part in parts if not part["calls"]} == HOST
    assert {part["part"] for part in parts if part["bytes"]} == READING


def test_shares_make_a_whole_and_bytes_those_of_verify_cost(llm: LLM) -> None:
    found = profile(llm, ids_of(llm), rows=1, repeats=3)
    parts = found["parts"]
    assert sum(part["share"] for part in parts) == pytest.approx(1)
    assert sum(part["ms"] for part in parts if part["part"] in HOST) == pytest.approx(found["host_ms"])
    assert found["host_share"] == pytest.approx(found["host_ms"] / sum(part["ms"] for part in parts))
    assert all(part["ms"] >= 0 for part in parts)
    assert sum(part["bytes"] for part in parts) == found["bytes_per_step"]
    assert found["bytes_per_step"] == verify_cost.verify_cost(llm, ids_of(llm), [1], 1)["bytes_per_step"]
    for part in parts:
        if part["bytes"]:
            assert part["bandwidth_utilisation"] == pytest.approx(part["bytes"] / (part["ms"] / 1e3 * 4e9))
    assert (found["rows"], found["context"], found["repeats"]) == (1, CONTEXT, 3)
    json.dumps(found)


def test_more_rows_read_the_same_weights(llm: LLM) -> None:
    one, five = (
        {part["part"]: part["bytes"] for part in profile(llm, ids_of(llm), rows, 1)["parts"]} for rows in (1, 5)
    )
    assert five["embed"] == 5 * one["embed"]
    assert five["attention"] * (CONTEXT + 1) == one["attention"] * (CONTEXT + 5)
    weights = READING - {"embed", "attention"}
    assert {name: five[name] for name in weights} == {name: one[name] for name in weights}


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_experts_are_one_part_and_read_what_rows_go_to(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    """2 of 5 with one row; with so many rows that all may be read, the most that can be."""
    if kind == "native":
        pytest.importorskip("specserve.kernels._native", reason="Built without native kernels.")
    else:
        request.getfixturevalue("without_native")
    with small(write_tiny_model(tmp_path, "mixtral")) as llm:
        for rows, experts in ((1, 2), (2, 4), (3, 5), (9, 5)):
            parts = {part["part"]: part for part in profile(llm, ids_of(llm), rows, 1)["parts"]}
            assert (parts["route"]["calls"], parts["experts"]["calls"]) == (3, 3)
            assert parts["experts"]["bytes"] == 3 * experts * 3 * 64 * 128 * 4
            assert parts["route"]["bytes"] == 3 * 64 * (32 if kind == "native" else 5) * 4
            assert not {"combine", "gather_pairs", "experts_down"} & set(parts)


def test_ops_that_are_called_are_timed_one_by_one(
    folder: Path, without_native: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that moves by a second whenever it is read, each op of the reference takes one second."""
    clock = itertools.count()
    monkeypatch.setattr(traffic, "perf_counter", lambda: float(next(clock)))
    with small(folder) as llm, VerifySteps(llm, ids_of(llm), [2]) as steps, watched(llm.engine, 64) as runner:
        taken = [(runner.parts(), runner.watched.seconds) for _ in steps.round([2, 2])]
    for parts, seconds in taken:
        assert {part.seconds for part in parts} == {1.0}
        assert seconds == len(parts) == sum(CALLS.values())


def test_recorded_ops_have_the_native_programs_own_times(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_ops = pytest.importorskip("specserve.kernels._cpu_recording", reason="Built without native kernels.")
    measure = native_ops.Recording.profile
    replayed: list[list[tuple[str, float]]] = []

    def keep(self: Any, *rows: Any) -> Any:
        replayed.append([(name, float(i)) for i, (name, _) in enumerate(measure(self, *rows))])
        return replayed[-1]

    monkeypatch.setattr(native_ops.Recording, "profile", keep)
    with small(folder) as llm, VerifySteps(llm, ids_of(llm), [2]) as steps, watched(llm.engine, 64) as runner:
        (parts,) = [runner.parts() for _ in steps.round([2])]
    assert [part.seconds for part in parts] == [float(i) for i in range(len(parts))]
    native = {"norm": "fused_add_norm"}
    ops = [part.name.split(" after ")[0] for part in parts]
    assert [native.get(op, op) for op in ops] == [name for name, _ in replayed[-1]]


class TwoForOne:
    """Kernels whose attention becomes two ops of a recording."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.device = torch.device("cpu")

    def linear(self, x: Any, weight: torch.Tensor) -> None:
        self.ops.append("linear")

    def attention(self, q: Any, kv: torch.Tensor, plan: Any, scale: float, window: int | None) -> None:
        self.ops += ["attention", "quantize_activation"]

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    def profile(self, num_rows: int, num_collected: int, plan: Any) -> list[tuple[str, float]]:
        return [(name, 1.0 + i) for i, name in enumerate(self.ops)]

    @contextmanager
    def recording(self) -> Iterator[TwoForOne]:
        yield self


def test_what_more_comes_of_a_call_has_its_own_name_and_reads_nothing() -> None:
    ops: Any = WatchedOps(TwoForOne())  # type: ignore[arg-type]
    with ops.recording() as recording:
        ops.linear(None, torch.zeros(3))
        ops.attention(None, torch.zeros(2, 64, 1, 8), None, 1.0, window=4)
        ops.linear(None, torch.zeros(5))
    recording.start(1, 1, None)
    recording.finish()
    rows = AttentionRows.pack([0, 1], [9], [[]], [-1], 1)
    assert [(part.name, part.seconds, part.num_bytes) for part in ops.parts(rows)] == [
        ("linear after linear", 1.0, 12),
        ("attention", 2.0, 4 * 2 * 8 * 4),
        ("quantize_activation", 3.0, 0),
        ("linear after attention", 4.0, 20),
    ]


def test_a_head_that_shares_a_group_is_quantised_apart(tmp_path: Path) -> None:
    pytest.importorskip("specserve.kernels._native", reason="Built without native kernels.")
    qwen = write_tiny_model(tmp_path / "qwen", "qwen3")  # 48 numbers a kv head, and a scale for each 32
    with small(qwen, quantization="int8") as llm:
        parts = {part["part"]: part for part in profile(llm, ids_of(llm), 1, 1)["parts"]}
        assert parts["quantize_activation"]["calls"] == 1 + 3
        assert parts["quantize_activation"]["bytes"] == 0
        assert parts["rope_and_cache"]["bytes"] == 3 * 2 * 32 * 4  # the norms of q and k, padded


def test_times_are_sorted_into_ops_and_phases(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every phase takes a known time, the third step longer than the others: medians leave that out."""
    phases = {phase: 2.0**i for i, phase in enumerate([*PHASES, "host"])}
    play = VerifySteps.round
    number = itertools.count(-module.WARM_UP_ROUNDS)

    def scripted(self: VerifySteps, order: list[int]) -> Any:
        factor = [1, 1, 50][n] if (n := next(number)) >= 0 else 1000
        for timing in play(self, order):
            seconds = {phase: value * factor for phase, value in phases.items()}
            yield verify_cost.Timing(timing.rows, {**seconds, "total": 31.0 * factor})

    monkeypatch.setattr(VerifySteps, "round", scripted)
    monkeypatch.setattr(WatchedOps, "seconds", property(lambda self: 1.5))
    found = profile(llm, ids_of(llm), 1, 3)
    times = {part["part"]: part["ms"] / 1e3 for part in found["parts"]}
    expected = {name: phases[phase] for phase, name in module.HOST.items()}
    assert {name: times[name] for name in expected} == pytest.approx(expected)
    assert times[PLAN] == pytest.approx(phases["forward"] - 1.5)
    assert found["step_ms"] == pytest.approx(31e3)


def test_what_cannot_be_measured(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        profile(llm, ids_of(llm), 1000, 1)
    assert not llm.engine.has_work


def test_the_command_prints_a_table_and_writes_the_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = ("--model", str(folder), "--dtype", "float32", "--kv-cache-gib", "0.02", "--threads", "1")
    assert (
        run(("bench", "profile", *engine, "--rows", "3", "--context", "20", "--repeats", "1", "--json", "o.json")) == 0
    )
    found = json.loads(Path("o.json").read_text())
    out = capsys.readouterr().out
    assert (found["rows"], found["context"]) == (3, 20)
    for part in found["parts"]:
        assert (part["part"] in out) == (part["ms"] > 0)
    assert f"{found['host_share']:.1%}" in out
    assert "…" not in out
