"""The comparison on an engine whose clock and answers are scripted, so that every figure can be worked out by hand."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rich.console import Console

from specserve.bench import compare as module
from specserve.bench.compare import Mismatch, Plan, Question, Run, compare, explain, first_difference, turns
from specserve.bench.report import (
    acceptance_by_position,
    by_adapter,
    by_category,
    by_phase,
    by_source,
    describe,
    overview,
    report,
)
from specserve.config import EngineConfig
from specserve.engine.counters import Counters
from specserve.errors import ConfigError, EngineError
from specserve.outputs import CompletionOutput, RequestOutput
from specserve.types import SamplingParams, SequenceStats, TokenLogprobs

SECONDS_PER_STEP = 0.01
PREFILL_SECONDS = 0.05
QUESTIONS = [Question([1, 2], "a"), Question([3], "a"), Question([4], "b")]
KEYS = {
    *("drafter", "output_tokens", "tokens_per_second", "time_per_output_token_ms", "time_to_first_token_ms", "speedup"),
    *("mean_acceptance_length", "acceptance_by_position", "draft_tokens", "accepted_tokens", "mismatched_requests"),
    *("kv_waste", "step_ms", "categories", "decode_speedup", "sources", "adapters"),
}


@dataclass
class FakeLLM:
    """The SDK's surface. A drafter named after a number accepts that many tokens a step; each request takes a prefill
    and its steps, one after the other, on a clock of its own."""

    wrong: dict[str, int] = field(default_factory=dict)  # drafter -> output position at which it errs
    fail: bool = False
    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=2))
    device: str = "cpu"
    dtype: str = "float32"
    quantization: str = "none"
    threads: int = 1
    now: float = 0.0
    drafter: str = "none"
    totals: Counters = field(default_factory=Counters)
    log: list[tuple[Any, ...]] = field(default_factory=list)

    def use_drafter(self, name: str, num_speculative_tokens: int | None = None, **options: Any) -> None:
        self.drafter = name
        self.log.append(("use", name, num_speculative_tokens, options))

    def reset_prefix_cache(self) -> None:
        self.log.append(("reset",))

    def counters(self) -> Counters:
        return self.totals.snapshot()

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams], *, adapter: list[str | None]
    ) -> list[RequestOutput]:
        self.log.append(("generate", self.drafter, [tuple(ids) for ids in prompts], [p.seed for p in params], adapter))
        return [self._one(ids, chosen) for ids, chosen in zip(prompts, params, strict=True)]

    def _one(self, ids: list[int], params: SamplingParams) -> RequestOutput:
        accepted = int(self.drafter) if self.drafter.isdigit() else 0
        count = params.max_tokens or 1
        tokens = [sum(ids) * 100 + i for i in range(count)]
        if self.drafter in self.wrong and count > self.wrong[self.drafter]:
            tokens[self.wrong[self.drafter]] = 7
        steps = count // (accepted + 1)
        stats = SequenceStats(arrived=self.now, num_steps=steps, num_drafts=steps if accepted else 0)
        stats.first_token = self.now + PREFILL_SECONDS
        self.now = stats.finished = stats.first_token + steps * SECONDS_PER_STEP
        stats.num_draft_tokens, stats.num_accepted_tokens = steps * 3 if accepted else 0, steps * accepted
        stats.by_source = {self.drafter: [steps * 2, steps * accepted], "jump_forward": [steps, 0]} if accepted else {}
        stats.drafted_by_position = [steps] * 3 if accepted else []
        stats.accepted_by_position = [steps] * accepted
        self._count(steps)
        completion = CompletionOutput(
            0, "text", tokens, None, "error" if self.fail else "length", None, "bad", stats=stats
        )
        if params.logprobs:
            completion.logprobs = [TokenLogprobs(tokens[0], -0.5, 1, {tokens[0]: -0.5, 9: -0.75})]
        return RequestOutput("id", None, ids, [completion])

    def _count(self, steps: int) -> None:
        self.totals.num_steps += steps
        self.totals.live_tokens += 9 * steps
        self.totals.allocated_tokens += 10 * steps
        for phase, share in (("draft", 0.1), ("forward", 0.7), ("sample", 0.1), ("host", 0.1), ("total", 1.0)):
            self.totals.seconds[phase] += share * steps * SECONDS_PER_STEP
        if self.drafter != "none":
            spent = self.totals.draft_seconds.get(self.drafter, 0.0)
            self.totals.draft_seconds[self.drafter] = spent + 0.05 * steps * SECONDS_PER_STEP


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    monkeypatch.setattr(module, "perf_counter", lambda: fake.now)
    return fake


def plan(*drafters: str, **changes: Any) -> Plan:
    return Plan(drafters=drafters, params=SamplingParams(temperature=0.0, max_tokens=12, seed=5), **changes)


def run(llm: FakeLLM, chosen: Plan) -> list[Run]:
    return compare(llm, QUESTIONS, chosen)  # type: ignore[arg-type]


def figures(llm: FakeLLM, chosen: Plan) -> dict[str, Any]:
    return report(llm, QUESTIONS, chosen.concurrency, run(llm, chosen))  # type: ignore[arg-type]


def test_every_contender_runs_every_prompt_in_every_repeat_and_goes_first_equally_often() -> None:
    chosen = plan("1", "2", concurrency=2, repeats=6)
    taken = list(turns(chosen, 3))
    for repeat in range(6):
        for drafter in ("none", "1", "2"):
            groups = [turn.group for turn in taken if turn.repeat == repeat and turn.drafter == drafter]
            assert groups == [[0, 1], [2]]
    firsts = Counter(turn.drafter for turn in taken[::3])
    assert set(firsts.values()) == {4}
    assert all(len({t.drafter for t in taken[i : i + 3]}) == 3 for i in range(0, len(taken), 3))
    assert all(len({tuple(t.group) for t in taken[i : i + 3]}) == 1 for i in range(0, len(taken), 3))


def test_the_prefix_cache_is_emptied_and_the_drafter_set_before_every_run(llm: FakeLLM) -> None:
    run(llm, plan("1", num_speculative_tokens=3, drafter_options={"n": 4}))
    calls = [entry[0] for entry in llm.log]
    assert calls == ["use", "reset", "generate"] * (len(calls) // 3)
    used = [entry[1:] for entry in llm.log if entry[0] == "use"]
    assert set(map(str, used)) == {"('none', 3, {})", "('1', 3, {'n': 4})"}


def test_warm_up_comes_first_and_is_short_and_not_counted(llm: FakeLLM) -> None:
    runs = run(llm, plan("1"))
    generated = [entry for entry in llm.log if entry[0] == "generate"]
    assert [entry[1] for entry in generated[:2]] == ["none", "1"]
    assert len(generated) == 2 + 2 * len(QUESTIONS)
    assert [len(each.replies) for each in runs] == [3, 3]
    assert runs[0].num_steps == 3 * 12


def test_seeds_belong_to_prompts(llm: FakeLLM) -> None:
    run(llm, plan("1", concurrency=2, repeats=2))
    seeds = {(entry[1], tuple(entry[2])): entry[3] for entry in llm.log[6:] if entry[0] == "generate"}
    assert seeds[("none", ((1, 2), (3,)))] == seeds[("1", ((1, 2), (3,)))] == [5, 6]
    assert seeds[("none", ((4,),))] == seeds[("1", ((4,),))] == [7]


def test_figures(llm: FakeLLM) -> None:
    found = figures(llm, plan("1", "2", repeats=3))
    plain, one, two = found["runs"]
    settings = dict(model="smollm2-135m", device="cpu", dtype="float32", quantization="none", threads=1)  # noqa: C408
    assert {key: value for key, value in found.items() if key != "runs"} == {
        **settings,
        "concurrency": 1,
        "prompts": 3,
        "adapters": [],
        "interrupted": False,
    }
    assert all(set(each) == KEYS for each in found["runs"])
    assert [each["drafter"] for each in found["runs"]] == ["none", "1", "2"]
    assert [each["output_tokens"] for each in found["runs"]] == [108, 108, 108]
    assert plain["tokens_per_second"] == pytest.approx(12 / 0.17)
    assert one["tokens_per_second"] == pytest.approx(12 / 0.11)
    assert two["speedup"] == pytest.approx(0.17 / 0.09)
    assert plain["speedup"] == 1.0
    assert one["time_per_output_token_ms"] == pytest.approx(60 / 11)
    assert one["decode_speedup"] == pytest.approx(plain["time_per_output_token_ms"] / (60 / 11))
    assert plain["decode_speedup"] == 1.0
    assert one["time_to_first_token_ms"] == pytest.approx(50)
    assert [each["mean_acceptance_length"] for each in found["runs"]] == [1, 2, 3]
    assert two["acceptance_by_position"] == [1, 1, 0]
    assert (two["draft_tokens"], two["accepted_tokens"]) == (3 * 3 * 4 * 3, 3 * 3 * 4 * 2)
    assert plain["sources"] == {}
    assert two["sources"] == {
        "2": {"draft_tokens": 3 * 3 * 4 * 2, "accepted_tokens": 3 * 3 * 4 * 2, "step_ms": pytest.approx(0.5)},
        "jump_forward": {"draft_tokens": 3 * 3 * 4, "accepted_tokens": 0, "step_ms": 0},
    }
    assert one["kv_waste"] == pytest.approx(0.1)
    phases = {"draft": 1, "mask": 0, "forward": 7, "sample": 1, "host": 1, "total": 10}
    assert one["step_ms"] == pytest.approx(phases)
    assert set(one["categories"]) == {"a", "b"}
    assert one["categories"]["b"] == pytest.approx(
        {"tokens_per_second": 12 / 0.11, "speedup": 0.17 / 0.11, "mean_acceptance_length": 2}
    )


def test_adapters_answer_their_prompts_and_have_figures_of_their_own(llm: FakeLLM) -> None:
    llm.wrong = {"1": 4}
    questions = [replace(each, adapter=adapter) for each, adapter in zip(QUESTIONS, ("fr", None, "fr"), strict=True)]
    runs = compare(llm, questions, plan("1", concurrency=2))  # type: ignore[arg-type]
    found = report(llm, questions, 2, runs)  # type: ignore[arg-type]
    assert found["adapters"] == ["fr", "none"]
    assert [run["mismatched_requests"] for run in found["runs"]] == [0, 3]
    assert found["runs"][1]["adapters"]["fr"] == pytest.approx(
        {"tokens_per_second": 12 / 0.11, "speedup": 0.17 / 0.11, "mean_acceptance_length": 2}
    )
    assert len(explain(llm, questions, runs)) == 3  # type: ignore[arg-type]
    calls = [entry for entry in llm.log if entry[0] == "generate"]
    asked = [(ids[:1], adapter) for call in calls for ids, adapter in zip(call[2], call[4], strict=True)]
    assert set(asked) == {((1,), "fr"), ((3,), None), ((4,), "fr")}, "in the warm-up and in explanations, too"
    assert "adapter" in text_of(by_adapter(found)) and "1.55x (2.00)" in text_of(by_adapter(found))


def test_rates_are_medians_over_repeats(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = iter([0.0] * 2 + [0.0, 0.0, 0.0] * 2 + [9.0] + [0.0] * 100)  # one turn of the second repeat hangs
    plain_one = FakeLLM._one

    def sometimes(self: FakeLLM, ids: list[int], params: SamplingParams) -> RequestOutput:
        self.now += next(slow)
        return plain_one(self, ids, params)

    monkeypatch.setattr(FakeLLM, "_one", sometimes)
    found = figures(llm, plan("1", repeats=3))
    assert [each["tokens_per_second"] for each in found["runs"]] == pytest.approx([12 / 0.17, 12 / 0.11])


def test_mismatches_are_counted_and_explained(llm: FakeLLM) -> None:
    llm.wrong = {"1": 4}
    runs = run(llm, plan("1", "2", repeats=2))
    found = report(llm, QUESTIONS, 1, runs)  # type: ignore[arg-type]
    assert [each["mismatched_requests"] for each in found["runs"]] == [0, 6, 0]
    llm.log.clear()
    reasons = explain(llm, QUESTIONS, runs)  # type: ignore[arg-type]
    assert [(each.drafter, each.question, each.repeat, each.position) for each in reasons[:2]] == [
        ("1", 0, 0, 4),
        ("1", 1, 0, 4),
    ]
    assert {each.gap for each in reasons} == {0.25}
    assert ("use", "none", None, {}) in llm.log
    asked = next(entry for entry in llm.log if entry[0] == "generate")
    assert asked[2] == [(1, 2, 300, 301, 302, 303)]  # the prompt and what both said before they parted
    assert "prompt 1 (repeat 1)" in describe(reasons[0])
    assert "output token 5" in describe(reasons[0])


def test_a_plain_run_that_changes_its_mind_is_a_mismatch_too(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_one = FakeLLM._one

    def drifting(self: FakeLLM, ids: list[int], params: SamplingParams) -> RequestOutput:
        output = plain_one(self, ids, params)
        if self.now > 0.9:
            output.outputs[0].token_ids[-1] = 7
        return output

    monkeypatch.setattr(FakeLLM, "_one", drifting)
    assert figures(llm, plan(repeats=3))["runs"][0]["mismatched_requests"] > 0


def test_nothing_to_explain_costs_nothing(llm: FakeLLM) -> None:
    runs = run(llm, plan("1"))
    llm.log.clear()
    assert explain(llm, QUESTIONS, runs) == []  # type: ignore[arg-type]
    assert llm.log == []


@pytest.mark.parametrize(
    ("left", "right", "position"), [([1, 2, 3], [1, 5, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [1], 0)]
)
def test_first_difference(left: list[int], right: list[int], position: int) -> None:
    assert first_difference(left, right) == position


def test_a_failed_request_is_no_figure(llm: FakeLLM) -> None:
    llm.fail = True
    with pytest.raises(EngineError, match="Prompt 1 failed: bad"):
        run(llm, plan("1"))


def test_concurrency_above_the_engine_is_refused(llm: FakeLLM) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs 3"):
        run(llm, plan("1", concurrency=3))


@pytest.mark.parametrize("changes", [{"concurrency": 0}, {"repeats": 0}])
def test_plans_that_cannot_be(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        plan("1", **changes)


def test_a_drafter_named_twice_is_refused_and_plain_needs_no_name() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        plan("1", "1")
    assert plan("1", "none").contenders == ["none", "1"]


@pytest.mark.parametrize(
    ("drafters", "own"),
    [
        ((), "none"),
        (("ngram", "suffix"), "suffix"),
        (("eagle", "auto"), "eagle"),
        (("block", "draft_model"), "draft_model"),
        (("medusa", "eagle"), "eagle"),
    ],
)
def test_the_engine_is_made_for_the_drafter_with_a_model(drafters: tuple[str, ...], own: str) -> None:
    assert plan(*drafters).own == own


def test_single_tokens_have_no_time_between_them(llm: FakeLLM) -> None:
    short = Plan(drafters=(), params=SamplingParams(temperature=0.0, max_tokens=1))
    found = figures(llm, short)
    assert found["runs"][0]["time_per_output_token_ms"] is None
    assert "-" in text_of(overview(found))


def test_acceptance_by_position_weighs_drafts_not_requests(llm: FakeLLM) -> None:
    replies = [run(llm, plan("1"))[1].replies[0], run(llm, plan("1"))[1].replies[0]]
    replies[0].stats.drafted_by_position, replies[0].stats.accepted_by_position = [8, 4], [4]
    replies[1].stats.drafted_by_position, replies[1].stats.accepted_by_position = [2], [2]
    assert acceptance_by_position(replies) == [0.6, 0.0]


def text_of(*tables: Any) -> str:
    console = Console(width=80, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_tables_fit_a_terminal_whole(llm: FakeLLM) -> None:
    found = figures(llm, plan("1", "2"))
    text = text_of(overview(found), by_category(found), by_phase(found), by_source(found))
    assert "…" not in text
    assert [line.split() for line in text.splitlines()[-4:]] == [
        ["1", "1", "36", "18", "50%", "0.500"],
        ["1", "jump_forward", "18", "0", "0%", "-"],
        ["2", "2", "24", "24", "100%", "0.500"],
        ["2", "jump_forward", "12", "0", "0%", "-"],
    ]
    for word in ("speed-up", "1.89x", "3.00", "forward", "7.00", "1.55x (2.00)"):
        assert word in text


def test_describe_says_how_close_it_was() -> None:
    assert "0.0001 apart" in describe(Mismatch("ngram", 2, 0, 9, 0.0001))
