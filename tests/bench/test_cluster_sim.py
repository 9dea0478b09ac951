"""benchmarks/cluster_sim.py: every call ends once, the clock is exact, a seed repeats, and the comparison tells."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.llm import LLM
from specserve.testing import check_integrity, write_tiny_model

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = ("costs", "forecast", "measure", "policies", "replica", "run", "traffic")
TABLE = {
    "rows": [1, 2, 6],
    "step_ms": [10.0, 12.0, 12.0],
    "context_token_ms": 0.0,
    "prompt_ms": 5.0,
    "prompt_token_ms": 1.0,
    "prompt_context_token_ms": 0.0,
}


@pytest.fixture(scope="module")
def sim() -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(FOLDER))
    found = {name: importlib.import_module(f"simulation.{name}") for name in NAMES}
    yield SimpleNamespace(**found, program=importlib.import_module("cluster_sim"))
    sys.path.remove(str(FOLDER))
    for name in [name for name in sys.modules if name.split(".")[0] in ("simulation", "cluster_sim")]:
        del sys.modules[name]


def cluster(sim: SimpleNamespace, policy: str, num_replicas: int, seed: int = 0, **shape: Any) -> Any:
    shape.setdefault("costs", sim.costs.StepCosts.read(sim.program.COSTS))
    made = sim.policies.make_policy(policy, num_replicas, 16, limits(sim))
    return sim.run.Cluster(sim.replica.Shape(**shape), num_replicas, made, seed)


def limits(sim: SimpleNamespace) -> Any:
    return sim.forecast.Limits(2.0, 0.1)


def calls(sim: SimpleNamespace, shape: str, num_calls: int, rate: float, seed: int = 0, **more: Any) -> list[Any]:
    sizes = {"num_prompt": 48, "num_output": 24, "num_system": 256, "num_tenants": 8} | more
    found: list[Any] = sim.traffic.Traffic(shape=shape, num_calls=num_calls, rate=rate, **sizes).calls(seed)
    return found


@pytest.mark.parametrize("shape", ["poisson", "bursty", "conversations"])
@pytest.mark.parametrize(
    "policy", ["router", "round-robin", "least-loaded", "prefix-sticky", "power-of-two", "oracle", "all-to-one"]
)
def test_every_call_ends_once(sim: SimpleNamespace, policy: str, shape: str) -> None:
    """Though a replica dies among them, and a small cache lets sequences be preempted. Nothing is left behind."""
    asked = calls(sim, shape, 60, 12.0)
    replicas = cluster(sim, policy, 3, num_blocks=90, max_model_len=1400)
    ended = replicas.run(asked, [sim.run.Death(1, 1.5, 1.0)])
    assert Counter(each.call.number for each in ended) == Counter(range(60))
    for each in ended:
        if each.first_s is not None:
            assert each.call.arrives < each.first_s <= each.last_s
            assert (each.first_s == each.last_s) == (each.call.num_output == 1)
    for replica in replicas.replicas:
        assert not replica.answers
        assert not replica.scheduler.has_work
        check_integrity(replica.scheduler.cache, [])
        assert replica.scheduler.cache.num_free == 89
    assert policy != "all-to-one" or {each.replica for each in ended} == {0}


def test_the_clock_is_exact(sim: SimpleNamespace) -> None:
    """The first call's prompt takes 5 + 32 ms, then it has tokens every 10 ms. The second comes within a step; beside
    the first one's last token it may have 6 ms and gets the least chunk, 8 tokens, the other 24 take 5 + 24 ms."""
    prompts = [list(range(32)), list(range(100, 132))]
    asked = [sim.traffic.Call(0, 1.0, prompts[0], 3), sim.traffic.Call(1, 1.040, prompts[1], 1)]
    one = cluster(sim, "router", 1, costs=sim.costs.StepCosts.of(TABLE))
    first, second = one.run(asked)
    assert (first.call, second.call) == tuple(asked)
    assert (first.first_s, first.last_s) == pytest.approx((1.037, 1.037 + 0.010 + 0.018))
    assert (second.first_s, second.last_s) == pytest.approx((1.065 + 0.029,) * 2)
    assert one.replicas[0].busy_s == pytest.approx(0.094)
    assert first.is_good(sim.forecast.Limits(0.0371, 0.0141))
    assert not first.is_good(sim.forecast.Limits(0.0369, 0.0141))
    assert not first.is_good(sim.forecast.Limits(0.0371, 0.0139))


def test_what_is_accepted_of_drafts_saves_steps(sim: SimpleNamespace) -> None:
    """Ten tokens after the first one: two steps of 5 rows, of 12 ms, or ten of one."""
    asked = [sim.traffic.Call(0, 0.0, list(range(32)), 11)]
    costs = sim.costs.StepCosts.of(TABLE)
    for acceptance, seconds in ((1.0, 0.024), (0.0, 0.118)):  # the last of ten steps has no room for a draft
        (found,) = cluster(sim, "router", 1, costs=costs, num_drafted=4, acceptance=acceptance).run(asked)
        assert found.last_s - found.first_s == pytest.approx(seconds)
    (plain,) = cluster(sim, "router", 1, costs=costs).run(asked)
    assert plain.last_s - plain.first_s == pytest.approx(0.100)


def test_what_is_said_is_cached_for_the_next_turn(sim: SimpleNamespace) -> None:
    prompt = list(range(100))
    later = [*prompt, *sim.traffic.answer(prompt, 29), 1, 2, 3]
    one = cluster(sim, "router", 1)
    one.run([sim.traffic.Call(0, 0.0, prompt, 29, b"a"), sim.traffic.Call(1, 9.0, later, 2, b"a")])
    assert one.replicas[0].num_cached_tokens == 128


def test_a_seed_repeats(sim: SimpleNamespace) -> None:
    def told(seed: int) -> list[tuple[Any, ...]]:
        asked = calls(sim, "conversations", 40, 8.0, seed)
        ended = cluster(sim, "power-of-two", 3, seed).run(asked)
        return [(each.call.number, each.replica, each.first_s, each.last_s) for each in ended]

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_the_comparison_tells(sim: SimpleNamespace) -> None:
    """Four replicas near what they can do: the oracle keeps as many requests good as any policy, but for noise, the
    router nearly as many, and one that sends all to one replica loses."""
    names = [*sim.policies.POLICIES, "all-to-one"]
    good = dict.fromkeys(names, 0.0)
    asked = calls(sim, "conversations", 240, 4 * 2.3, num_output=64, num_tenants=32)
    for name in names:
        ended = cluster(sim, name, 4).run(asked)
        good[name] = sum(each.is_good(limits(sim)) for each in ended) / len(ended)
    assert good["oracle"] > 0.9
    assert all(good["oracle"] >= share - 0.03 for share in good.values()), good
    assert good["router"] >= 0.95 * good["oracle"], good
    assert good["round-robin"] < good["router"] - 0.02, "or the load is too small to tell"
    assert good["all-to-one"] < 0.3, good


def test_a_replica_that_dies_loses_its_own_and_comes_back(sim: SimpleNamespace) -> None:
    asked = calls(sim, "poisson", 150, 15.0)
    costs = sim.costs.StepCosts.of(TABLE)
    ended = cluster(sim, "router", 2, costs=costs).run(asked, [sim.run.Death(0, 3.0, 2.0)])
    failed = [each for each in ended if each.first_s is None]
    assert failed
    assert {each.replica for each in failed} == {0}
    assert all(each.call.arrives < 3.0 for each in failed)
    away = {each.replica for each in ended if 3.0 < each.call.arrives < 5.0}
    assert away == {1}
    assert 0 in {each.replica for each in ended if each.call.arrives > 5.0 and each.first_s is not None}


def test_without_replicas_calls_fail_at_once(sim: SimpleNamespace) -> None:
    asked = [sim.traffic.Call(number, 1.0 + number, [1, 2, 3], 2) for number in range(3)]
    ended = cluster(sim, "least-loaded", 1).run(asked, [sim.run.Death(0, 1.5, 1.0)])
    assert [(each.call.number, each.replica) for each in ended] == [(0, 0), (1, -1), (2, 0)]
    assert [each.first_s is None for each in ended] == [False, True, False]


def test_requests_come_as_their_shape_says(sim: SimpleNamespace) -> None:
    found = {shape: calls(sim, shape, 4000, 50.0) for shape in sim.traffic.SHAPES}
    variation = {}
    for shape, asked in found.items():
        times = [call.arrives for call in asked]
        assert times == sorted(times)
        assert [call.number for call in asked] == list(range(4000))
        assert 4000 / (times[-1] - times[0]) == pytest.approx(50.0, rel=0.1), shape
        gaps = [after - before for before, after in pairwise(times)]
        variation[shape] = pvariance(gaps) / fmean(gaps) ** 2
    assert variation["poisson"] == pytest.approx(1.0, abs=0.15)
    assert variation["bursty"] == pytest.approx(4.0, abs=1.0)
    begins = Counter(tuple(call.prompt_ids[:256]) for call in found["conversations"])
    assert len(begins) == 8
    assert begins.most_common(1)[0][1] > 2 * 4000 / 8, "some tenants ask more than others"
    assert len({call.tenant for call in found["conversations"]}) == 8
    assert max(call.num_output for call in found["poisson"]) <= 4 * 24


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": [1, 2]}, "each have one of `step_ms`"),
        ({"rows": [2, 1, 6]}, "must rise"),
        ({"rows": [2, 3, 6]}, "begin with 1"),
        ({"prompt_token_ms": 0.0}, "above 0"),
    ],
)
def test_a_table_that_cannot_be_one_is_refused(sim: SimpleNamespace, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sim.costs.StepCosts.of(TABLE | change)
    with pytest.raises(ValueError, match="lacks rows, step_ms"):
        sim.costs.StepCosts.of({name: value for name, value in TABLE.items() if name not in ("rows", "step_ms")})


def test_steps_cost_what_the_table_says(sim: SimpleNamespace) -> None:
    costs = sim.costs.StepCosts.of(TABLE | {"step_ms": [10.0, 12.0, 20.0], "context_token_ms": 0.1})
    assert costs.seconds(1, 20, 0, 0.0) == pytest.approx(0.012)
    assert costs.seconds(4, 0, 0, 0.0) == pytest.approx(0.016)
    assert costs.seconds(8, 0, 0, 0.0) == pytest.approx(0.024), "as from 2 to 6"
    assert costs.seconds(0, 0, 10, 7.0) == pytest.approx(0.015)
    reads = replace(costs, prompt_context_token_ms=0.5)
    assert reads.seconds(1, 0, 10, 7.0) == pytest.approx(0.010 + 0.010 + 0.035)


def test_a_fit_finds_what_made_the_figures(sim: SimpleNamespace) -> None:
    module = sim.measure
    decoding = {(rows, module.SHORT): 0.01 + 0.001 * rows + 1e-6 * rows * module.SHORT for rows in module.ROWS}
    decoding |= {(rows, module.LONG): 0.01 + 0.001 * rows + 1e-6 * rows * module.LONG for rows in module.LONG_ROWS}
    chunks = {
        (tokens, at): 0.004 + tokens * (2e-4 + 3e-7 * (at + tokens / 2)) for tokens in (64, 512) for at in (0, 512)
    }
    found = module.fit(decoding, chunks)
    assert found["step_ms"] == pytest.approx([10 + rows for rows in module.ROWS])
    names = ("context_token_ms", "prompt_ms", "prompt_token_ms", "prompt_context_token_ms")
    assert [found[name] for name in names] == pytest.approx([1e-3, 4.0, 0.2, 3e-4], rel=1e-3)


def test_an_engine_is_measured(sim: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": (1, 2, 4), "LONG_ROWS": (1, 4), "LONG": 200, "CHUNKS": (16, 32), "CHUNK": 64}.items():
        monkeypatch.setattr(sim.measure, name, value)
    monkeypatch.setattr(sys, "argv", ["measure", str(write_tiny_model(tmp_path / "m", "llama")), "--rounds=1"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--threads=1", f"--json={tmp_path / 'costs.json'}"])
    monkeypatch.setattr(sim.measure, "LLM", lambda model, **more: LLM(model, **more | {"kv_cache_gib": 0.02}))
    sim.measure.main()
    found = json.loads((tmp_path / "costs.json").read_text("utf-8"))
    assert found["threads"] == 1
    # Of a tiny model, on a busy machine, more tokens may seem to take less time.
    assert sim.costs.StepCosts.of(found | {"prompt_token_ms": abs(found["prompt_token_ms"]) or 1.0}).decoding(4) > 0


def test_the_program_compares(
    sim: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told.json"
    options = ["--replicas=2", "--rates=1", "--calls=20", "--policies", "router", "oracle", f"--json={told}"]
    monkeypatch.setattr(sys, "argv", ["cluster_sim", *options, "--dead-at=5", "--dead-s=1"])
    sim.program.main()
    router, oracle = json.loads(told.read_text("utf-8"))["runs"]
    assert (router["policy"], oracle["policy"], router["requests"]) == ("router", "oracle", 40)
    assert oracle["of_oracle"] == 1.0
    assert router["goodput"] == pytest.approx(router["of_oracle"] * oracle["goodput"])
    assert 0 < router["good"] <= 1
    assert 0 < router["cached"] < 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| replicas | rate | policy | goodput |")
    assert len(lines) == 4
