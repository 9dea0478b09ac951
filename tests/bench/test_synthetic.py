"""`specserve bench synthetic`: coins that keep their rates, real verification of what they say, and the figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.bench import random_target, synthetic as module, verify_cost
from specserve.bench.random_target import RandomWeights, num_drawn_bytes, num_parameters, random_llm, spec_of
from specserve.bench.synthetic import (
    Coins,
    DrafterCost,
    Question,
    Run,
    best_lines,
    expected_tokens,
    figures,
    llama_bench_lines,
    synthetic,
)
from specserve.cli.main import run
from specserve.errors import CapacityError, ConfigError, EngineError
from specserve.llm import LLM

SMALL = {
    **random_target.SHAPES["1.5b"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QUESTION = Question(
    shape="1.5b", acceptance=(0.75, 0.5), costs=(DrafterCost(0.0), DrafterCost(0.5, True), DrafterCost(9.0)),
    rows=(1, 3, 5), context=20, repeats=2, max_tokens=40,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape of a moment, and no time for bandwidth."""
    monkeypatch.setitem(random_target.SHAPES, "1.5b", SMALL)
    monkeypatch.setattr(verify_cost, "read_bandwidth", lambda ops: 4e9)


@pytest.fixture
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"drafter": "none", "adaptive": False, "max_num_seqs": 1, "threads": 1}
    with random_llm("1.5b", quantization="int4", max_model_len=QUESTION.max_model_len, **options) as made:
        yield made


# --- coins ------------------------------------------------------------------------------------------------------------


def test_coins_keep_their_rates_at_each_depth() -> None:
    for seed in range(3):
        coins, tosses = Coins((0.7, 0.5), seed), 1000
        depths = [coins.depth(4) for _ in range(tosses)]
        share = 1.0
        for depth, rate in enumerate((0.7, 0.5, 0.5, 0.5)):
            share *= rate
            assert sum(each > depth for each in depths) / tosses == pytest.approx(share, abs=0.005)
    assert [Coins((1.0,)).depth(3) for _ in range(2)] == [3, 3]
    assert {Coins((0.0,)).depth(3) for _ in range(9)} == {0}
    assert Coins((0.5,)).depth(0) == 0


def test_tokens_that_are_expected() -> None:
    assert expected_tokens((0.7,), 0) == 1
    assert expected_tokens((0.5, 0.2), 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02)


@pytest.mark.parametrize(("text", "steps"), [("0", 0), ("0.08", 0.08), ("0.05/token", 0.2)])
def test_costs_of_drafters(text: str, steps: float) -> None:
    cost = DrafterCost.parse(text)
    assert (str(cost), cost.steps(4)) == (text, pytest.approx(steps))
    run = Run(4, steps=10, tokens=20, seconds=5.0)
    assert run.seconds_per_token(cost, 0.4) == pytest.approx((0.5 + steps * 0.4) / 2)
    assert Run(0, 1, 1, 0.4).seconds_per_token(cost, 0.4) == 0.4


@pytest.mark.parametrize("text", ["x", "-1", "0.1/step", "nan", "inf"])
def test_what_is_no_cost(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 0.08 for each draft, or 0.05/token"):
        DrafterCost.parse(text)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_are_drawn_and_no_two_layers_are_alike() -> None:
    spec, drawn = spec_of("1.5b"), list[int]()
    weights = RandomWeights(spec.shapes(), drawn.append)
    one, other = (weights[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert not torch.equal(one, other)
    assert torch.equal(one, weights["model.layers.0.mlp.up_proj.weight"])
    assert one.float().std().item() * 8 == pytest.approx(0.7, rel=0.05)
    assert abs(one.float().mean().item()) < 0.01
    assert weights["model.norm.weight"].unique().tolist() == [1]
    assert weights["model.layers.0.self_attn.q_proj.bias"].unique().tolist() == [0]
    assert {name: tuple(weights[name].shape) for name in weights} == spec.shapes()
    assert num_drawn_bytes("1.5b") == 2 * (num_parameters(spec) + 300 * 64)


def test_shapes_are_those_of_the_models_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = {name: round(num_parameters(spec_of(name)) / 1e9, 2) for name in random_target.SHAPES}
    assert sizes == {"0.5b": 0.49, "1.5b": 1.54, "8b": 8.03}


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_target, "free_memory", lambda device: 1000)
    with pytest.raises(CapacityError, match="The weights need"), random_llm("1.5b", quantization="int8"):
        pass


# --- measuring --------------------------------------------------------------------------------------------------------


def test_runs_accept_what_the_coins_say(llm: LLM) -> None:
    lengths: list[int] = []
    found = figures(llm, synthetic(llm, QUESTION, on_run=lengths.append))
    assert lengths == [0, 2, 4, 4, 2, 0]
    for each in found["runs"]:
        assert each["tokens"] >= 2 * QUESTION.max_tokens
        assert each["tokens_per_step"] == pytest.approx(each["expected_tokens_per_step"], rel=0.1)
    assert [each["num_speculative_tokens"] for each in found["runs"]] == [0, 2, 4]
    assert found["runs"][0]["tokens_per_step"] == 1
    free, by_token, dear = found["drafters"]
    assert (free["cost"], by_token["cost"], dear["cost"]) == ("0", "0.5/token", "9")
    assert free["speedup"][0] == 1 and dear["best"] == 0
    for one, other in zip(free["tokens_per_second"][1:], by_token["tokens_per_second"][1:], strict=True):
        assert one > other
    assert "A drafter that takes 9 of a step of one row does not pay: plain decoding is fastest." in best_lines(found)
    assert found["model"] == "random weights of the shape 1.5b"
    json.dumps(found)


def test_rows_as_llama_bench_prints_them() -> None:
    found = {
        "dtype": "bfloat16", "quantization": "int4", "weights_bytes": 2**30, "parameters": 1.5e9, "shape": "1.5b",
        "device": "cpu", "threads": 2, "rows": [1, 4], "step_ms": [10.0, 16.0],
    }  # fmt: skip
    head, rule, one, four = llama_bench_lines(found)
    assert {line.count("|") for line in (head, rule, one, four)} == {8}
    assert one == "| 1.5b int4 | 1.00 GiB | 1.50 B | cpu | 2 | pp1 | 100.00 |"
    assert four.endswith("| pp4 | 250.00 |")


def test_a_text_that_drafts_would_change_ends_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module._recorded

    def wrong(*arguments: Any) -> list[int]:
        outputs = plain(*arguments)
        return [*outputs[:9], (outputs[9] + 1) % 300, *outputs[10:]]

    monkeypatch.setattr(module, "_recorded", wrong)
    with pytest.raises(EngineError, match="changed the text"):
        synthetic(llm, QUESTION)


@pytest.mark.parametrize(
    ("own", "complaint"),
    [
        ({"acceptance": (0.5, 1.2)}, "--acceptance has 1.2"),
        ({"acceptance": ()}, "at least one number each"),
        ({"rows": (2, 4)}, "--rows begin with 1"),
        ({"rows": (1, 4, 4)}, "no number twice"),
    ],
)
def test_what_cannot_be_measured_is_refused(own: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Question(shape="1.5b", **own)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--quantization=int8", "--rows=1,3", "--context=8", "--repeats=1", "--max-tokens=6", "--threads=1")
    own = ("--acceptance=0.9,0.5", "--drafter-cost=0,0.1/token", f"--json={tmp_path / 'o.json'}")
    assert run(("bench", "synthetic", *flags, *own)) == 0
    told, found = capsys.readouterr().out, json.loads((tmp_path / "o.json").read_text())
    assert (found["quantization"], found["acceptance"], found["shape"]) == ("int8", [0.9, 0.5], "1.5b")
    for words in ("| pp3 |", "Tokens a second, acceptance 0.9, 0.5 by depth", "A drafter that takes 0.1/token"):
        assert words in told


def test_ctrl_c_keeps_whole_rounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain, count = module._run, 0

    def interrupted(*arguments: Any) -> Run:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(module, "_run", interrupted)
    flags = ("--rows=1,3", "--context=8", "--repeats=1", "--max-tokens=6", f"--json={tmp_path / 'o.json'}")
    assert run(("bench", "synthetic", *flags)) == 130
    assert capsys.readouterr().out.endswith("Interrupted: the figures are of 2 of 2 lengths of drafts.\n")
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["interrupted"] and [each["num_speculative_tokens"] for each in found["runs"]] == [0, 2]
