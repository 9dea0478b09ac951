"""Steps of exactly so many rows on the engine's own path, what they must read, and the figures made of them."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from specserve.bench import traffic, verify_cost as module
from specserve.bench.text import load_text, prompt
from specserve.bench.traffic import Call, num_bytes, read_bandwidth, watched
from specserve.bench.verify_cost import WARM_UP_ROUNDS, VerifySteps, verify_cost
from specserve.cli.main import run
from specserve.errors import ConfigError, EngineError
from specserve.llm import LLM
from specserve.ops import AttentionRows
from specserve.runtime.executor import local
from specserve.runtime.pack import StepInput
from specserve.testing import write_tiny_model
from specserve.types import Draft, SamplingParams

CONTEXT = 37
KEYS = {
    *("model", "device", "kernels", "dtype", "quantization", "threads", "context", "repeats", "rows", "step_ms"),
    "interrupted",
    *("cost", "forward_ms", "host_ms", "bytes_per_step", "read_bandwidth_gbs", "bandwidth_utilisation"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


def small(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "kv_cache_gib": 0.02, "max_model_len": 512, "threads": 1} | options)


@pytest.fixture(scope="module")
def usual(folder: Path) -> Iterator[LLM]:
    """On whichever kernels this machine has. One engine does for all tests: they leave it as it was."""
    with small(folder) as made:
        yield made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as hidden:
        hidden.setitem(sys.modules, "specserve.kernels._native", None)
        hidden.delitem(sys.modules, "specserve.kernels.cpu", raising=False)
        made = small(folder)
    assert local(made.engine.executor).runner.ops.name == "reference"
    with made:
        yield made


@pytest.fixture(params=["native", "reference"])
def llm(request: pytest.FixtureRequest) -> LLM:
    if request.param == "native":
        pytest.importorskip("specserve.kernels._native", reason="Built without native kernels.")
    found: LLM = request.getfixturevalue("usual" if request.param == "native" else "reference")
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth is measured once more only where a test asks for it."""
    monkeypatch.setattr(module, "read_bandwidth", lambda ops: 4e9)


def ids_of(llm: LLM, count: int = CONTEXT) -> list[int]:
    return prompt(llm.tokenizer, load_text()[: 16 * count], count)  # all of it takes a quarter of a second


def batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the runner gets from now on: rows of each step, tokens cached before it."""
    seen: list[tuple[int, int]] = []
    start = local(llm.engine.executor).runner.start

    def spy(inputs: StepInput) -> None:
        seen.append((len(inputs.rows.parents), int(inputs.rows.cached[0])))
        start(inputs)

    monkeypatch.setattr(local(llm.engine.executor).runner, "start", spy)
    return seen


def test_steps_have_the_rows_that_were_asked_for_and_one_more_token_each(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = [1, 5, 2, 16, 1, 3]
    with VerifySteps(llm, ids_of(llm), order) as steps:
        list(steps.round(order))  # leaves the prompt in the prefix cache
        seen = batches(llm, monkeypatch)
        timings = list(steps.round(order))
    assert [timing.rows for timing in timings] == order
    prefill, *verify = seen
    assert prefill[0] == CONTEXT % 16
    assert verify == [(rows, CONTEXT + i) for i, rows in enumerate(order)]
    assert all(timing.seconds["total"] > timing.seconds["forward"] > 0 for timing in timings)


def test_a_round_does_not_need_the_prefix_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = small(folder, prefix_caching=False, max_num_batched_tokens=16)
    with llm, VerifySteps(llm, ids_of(llm), [4]) as steps:
        seen = batches(llm, monkeypatch)
        assert [timing.rows for timing in steps.round([4, 4])] == [4, 4]
    assert [rows for rows, _ in seen] == [16, 16, CONTEXT - 32, 4, 4]


@pytest.mark.parametrize("draft", [lambda n: Draft.empty(), lambda n: Draft.chain([0] * (n - 1))])
def test_a_draft_that_leaves_rows_out_is_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch, draft: Any) -> None:
    with VerifySteps(llm, ids_of(llm), [4]) as steps:
        monkeypatch.setattr(
            module._WrongDrafter, "propose", lambda self, requests: [draft(most) for _, most in requests]
        )
        with pytest.raises(AssertionError, match="fills its budget"):
            list(steps.round([4]))


def test_a_draft_that_is_right_is_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    said = llm.generate([ids_of(llm)], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    right = Draft.chain(said.outputs[0].token_ids[1:3])
    with VerifySteps(llm, ids_of(llm), [3]) as steps:
        monkeypatch.setattr(module._WrongDrafter, "propose", lambda self, requests: [right])
        with pytest.raises(AssertionError, match="no token of the draft is right"):
            list(steps.round([3]))


def test_afterwards_the_engine_is_as_before(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    before = llm.generate("The assert statement", greedy)[0].outputs[0].token_ids
    runner, ops = local(llm.engine.executor).runner, local(llm.engine.executor).runner.ops
    verify_cost(llm, ids_of(llm), [1, 3], repeats=1)
    with VerifySteps(llm, ids_of(llm), [2, 2]) as steps:
        unfinished = steps.round([2, 2])
        next(unfinished)
    assert not llm.engine.has_work
    assert local(llm.engine.executor).runner is runner
    assert runner.model.ops is ops  # type: ignore[attr-defined]
    assert not llm.engine.policy.own.active
    assert llm.engine.policy.num_tokens == llm.config.num_speculative_tokens
    assert llm.generate("The assert statement", greedy)[0].outputs[0].token_ids == before


def test_figures_are_whole_and_agree_with_each_other(llm: LLM) -> None:
    found = verify_cost(llm, ids_of(llm), [1, 2, 6], repeats=1)
    assert set(found) == KEYS
    assert found["rows"] == [1, 2, 6]
    assert (found["context"], found["repeats"], found["dtype"]) == (CONTEXT, 1, "float32")
    assert found["kernels"] == local(llm.engine.executor).runner.ops.name
    assert found["cost"] == pytest.approx([value / found["step_ms"][0] for value in found["step_ms"]])
    for step, forward, host in zip(found["step_ms"], found["forward_ms"], found["host_ms"], strict=True):
        assert step == pytest.approx(forward + host)
    assert found["read_bandwidth_gbs"] == 4.0
    used = found["bytes_per_step"] / (found["step_ms"][0] / 1e3) / 4e9
    assert found["bandwidth_utilisation"] == pytest.approx(used)
    json.dumps(found)


def test_everybody_goes_first_equally_often_and_warm_up_is_not_counted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[list[int]] = []
    play = VerifySteps.round

    def spy(self: VerifySteps, order: list[int]) -> Any:
        orders.append(list(order))
        for timing in play(self, order):
            number = len(orders) - 2 - WARM_UP_ROUNDS  # the first round is the one whose bytes are counted
            total = 9.0 if number < 0 else [0.5, 0.001, 0.002][number % 3] * timing.rows
            yield module.Timing(timing.rows, {**timing.seconds, "total": total, "forward": total / 4})

    monkeypatch.setattr(VerifySteps, "round", spy)
    rounds: list[int] = []
    found = verify_cost(llm, ids_of(llm), [1, 2, 6], 3, lambda: rounds.append(len(rounds)))
    assert orders[0] == [1]
    assert all(sorted(order) == [1, 2, 6] for order in orders[1:])
    assert Counter(order[0] for order in orders[1 + WARM_UP_ROUNDS :]) == {1: 1, 2: 1, 6: 1}
    assert len(rounds) == WARM_UP_ROUNDS + 3
    assert found["step_ms"] == pytest.approx([2.0, 4.0, 12.0])  # the median of 0.5 s, 1 ms and 2 ms a row
    assert found["forward_ms"] == pytest.approx([0.5, 1.0, 3.0])
    assert found["host_ms"] == pytest.approx([1.5, 3.0, 9.0])
    assert found["cost"] == pytest.approx([1, 2, 6])


def test_ratios_are_taken_within_a_round(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is ten times slower in one round, steps and memory alike, changes no ratio."""
    slow = [1.0] * WARM_UP_ROUNDS + [1.0, 10.0, 10.0, 1.0, 10.0]
    number = iter(range(100))
    play = VerifySteps.round

    def spy(self: VerifySteps, order: list[int]) -> Any:
        pace = slow[next(number)] if len(order) > 1 else 1.0
        for timing in play(self, order):
            yield module.Timing(timing.rows, {**timing.seconds, "total": pace * (1 + timing.rows), "forward": pace})

    measured = iter(1e9 / pace for pace in slow)
    monkeypatch.setattr(VerifySteps, "round", spy)
    monkeypatch.setattr(module, "read_bandwidth", lambda ops: next(measured))
    found = verify_cost(llm, ids_of(llm), [1, 3], 5)
    assert found["cost"] == [1.0, 2.0]
    assert found["bandwidth_utilisation"] == pytest.approx(found["bytes_per_step"] / (2.0 * 1e9))
    assert found["read_bandwidth_gbs"] == pytest.approx(0.1)
    assert found["step_ms"] == [20e3, 40e3]


def tiles(outputs: int) -> int:
    """Outputs as native kernels pack them."""
    return -(-outputs // 32) * 32


@pytest.mark.parametrize(("quantization", "bits"), [("none", 32), ("int8", 8 + 16 / 32), ("int4", 4 + 2 * 16 / 32)])
def test_bytes_are_those_of_the_packed_weights_and_the_kv(folder: Path, quantization: str, bits: float) -> None:
    """Counted by hand from config.json and the formats of kernels/cpu/pack.h: one scale a group of 32, two for int4,
    whose head is int8."""
    pytest.importorskip("specserve.kernels._native", reason="Built without native kernels.")
    hidden, intermediate, heads, kv_heads, d, layers = 64, 128, 4, 2, 16, 3
    with small(folder, quantization=quantization) as llm:
        found = verify_cost(llm, ids_of(llm), [1], 1)["bytes_per_step"]
        vocabulary = llm.engine.limits.vocab_size
    linear = tiles((heads + 2 * kv_heads) * d) * hidden + tiles(hidden) * heads * d
    linear += 2 * tiles(intermediate) * hidden + tiles(hidden) * intermediate
    weights = (layers * linear * bits + tiles(vocabulary) * hidden * max(bits, 8 + 16 / 32)) / 8
    norms, row = (2 * layers + 1) * hidden * 4, hidden * 4
    kv = layers * 2 * (CONTEXT + 1) * kv_heads * d * 4
    assert found == weights + norms + row + kv


def test_bytes_of_the_reference_are_those_of_its_tensors(reference: LLM) -> None:
    found = verify_cost(reference, ids_of(reference), [1], 1)["bytes_per_step"]
    model: Any = local(reference.engine.executor).runner.model
    shapes = model.spec.shapes()
    read = sum(math.prod(shape) for name, shape in shapes.items() if "embed_tokens" not in name) * 4
    assert found == read + 64 * 4 + 3 * 2 * (CONTEXT + 1) * 2 * 16 * 4


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(1, 60)),
)
def test_a_step_reads_every_visible_token_once(seqs: list[tuple[int, int]], window: int | None) -> None:
    starts = [0, *itertools.accumulate(count for _, count in seqs)]
    rows = AttentionRows.pack(starts, [cached for cached, _ in seqs], [[]] * len(seqs), range(starts[-1]), 1)
    expected = 0
    for cached, count in seqs:
        positions = range(cached, cached + count)
        expected += len({i for at in positions for i in range(at + 1) if window is None or i > at - window})
    assert Call("attention", token=10, window=window).reads(rows) == 10 * expected
    assert Call("embed", row=3).reads(rows) == 3 * starts[-1]
    assert Call("linear", weights=7).reads(rows) == 7


def test_sliding_windows_bound_what_is_read(tmp_path: Path) -> None:
    gemma = write_tiny_model(tmp_path / "gemma", "gemma3")
    with small(gemma) as llm:
        short, long = (verify_cost(llm, ids_of(llm, n), [1], 1)["bytes_per_step"] for n in (60, 160))
    per_token = 2 * 2 * 16 * 4  # one layer of three sees everything, the other two 24 tokens back
    assert long - short == 100 * per_token


def test_num_bytes_sees_tensors_wherever_they_are() -> None:
    @dataclass
    class Packed:
        memory: torch.Tensor
        bias: torch.Tensor | None
        pair: tuple[torch.Tensor, ...]
        width: int

    packed = Packed(torch.zeros(3, 5, dtype=torch.uint8), None, (torch.zeros(2), torch.zeros(4).bfloat16()), 9)
    assert num_bytes(packed) == 15 + 8 + 8
    assert num_bytes(torch.zeros(6)[::2]) == 12
    assert num_bytes(None) == num_bytes(3) == 0


def test_a_weight_without_tensors_is_noticed() -> None:
    with pytest.raises(AssertionError, match="shows its tensors"):
        traffic._describe("linear", {"weight": object()})


def test_watching_changes_no_logits(llm: LLM) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
    plain = llm.generate([ids_of(llm)], asked)[0].outputs[0]
    with watched(llm.engine, llm.config.max_num_batched_tokens) as runner:
        seen = llm.generate([ids_of(llm)], asked)[0].outputs[0]
        assert runner.parts()
    assert (seen.token_ids, seen.logprobs) == (plain.token_ids, plain.logprobs)


def test_bandwidth_is_measured_with_or_without_a_loop_of_the_kernels(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "BANDWIDTH_BYTES", 2**22)
    monkeypatch.setattr(traffic, "BANDWIDTH_PASSES", 2)
    own = sys.modules[type(local(llm.engine.executor).runner.ops).__module__]
    monkeypatch.setattr(own, "_BANDWIDTH_BYTES", 2**22, raising=False)  # where the kernels have a loop
    assert 1e6 < read_bandwidth(local(llm.engine.executor).runner.ops) < 1e14


@pytest.mark.parametrize(
    ("rows", "context", "message"),
    [
        ([2, 4], CONTEXT, "must begin with 1"),
        ([], CONTEXT, "must begin with 1"),
        ([1, 4, 4], CONTEXT, "name no number twice"),
        ([1, 0], CONTEXT, "at least 1"),
        ([1, 513], CONTEXT, "max_num_batched_tokens = 512"),
        ([1, 16], 500, "at most 493"),
    ],
)
def test_what_cannot_be_measured(usual: LLM, rows: list[int], context: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify_cost(usual, ids_of(usual, context), rows, 1)


def test_the_longest_context_that_is_named_works(usual: LLM) -> None:
    assert verify_cost(usual, ids_of(usual, 493), [1, 16], 1)["context"] == 493


def test_a_model_that_fails_is_no_figure(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with VerifySteps(llm, ids_of(llm), [2]) as steps:
        finish = local(llm.engine.executor).runner.finish

        def broken() -> Any:
            out = finish()
            out.logits = torch.full_like(out.logits, math.nan)
            out.best = torch.full_like(out.best, -1)
            return out

        monkeypatch.setattr(local(llm.engine.executor).runner, "finish", broken)
        with pytest.raises(EngineError, match="NaN"):
            list(steps.round([2]))
    assert not llm.engine.has_work


def test_the_command_prints_a_table_and_writes_the_figures(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = ("--model", str(folder), "--dtype", "float32", "--kv-cache-gib", "0.02", "--threads", "1")
    flags = ("--rows", "1,2,3", "--context", "20", "--repeats", "1", "--json", "out.json")
    assert run(("bench", "verify-cost", *engine, *flags)) == 0
    found = json.loads(Path("out.json").read_text())
    assert set(found) == KEYS
    assert found["rows"] == [1, 2, 3]
    out = capsys.readouterr().out
    assert f"{found['step_ms'][2]:.2f}" in out
    assert "4.0 GB/s" in out
    assert "…" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rows", "1,two"), '"two" is not a whole number'),
        (("--rows", "1,-2"), "-2"),
        (("--repeats", "0"), "--repeats"),
        (("--context", "0"), "--context"),
        (("--drafter", "ngram"), "--drafter"),
        (("--text", "absent.txt"), "absent.txt"),
    ],
)
def test_the_command_refuses(
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(("bench", "verify-cost", *flags)) == 2
    assert message in capsys.readouterr().err
