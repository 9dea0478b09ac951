"""What /metrics, /stats and the log say after what the engine said: exact values, both names, bounds of memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from specserve.server import metrics as metrics_module
from specserve.server.engine.messages import Gauges
from specserve.server.metrics import CONTENT_TYPE, Metrics
from specserve.server.metrics_totals import (
    FIRST_TOKEN_BOUNDS,
    GAP_BOUNDS,
    MOST_ADAPTERS,
    REQUEST_BOUNDS,
    ApiProcessStatus,
    Engines,
    Flow,
    Histogram,
    ReplicaStatus,
    Traffic,
    Window,
    summed,
)
from specserve.types import Event, SequenceStats

MODEL = "smollm2-135m"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

# Names and types as vLLM 0.32 has them (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py).
VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
}
OWN = {
    "up": "gauge",
    "ready": "gauge",
    "engine_restarts": "counter",
    "engine_steps": "counter",
    "engine_empty_steps": "counter",
    "engine_step_rows": "counter",
    "drafts_dropped": "counter",
    "jump_forward_tokens": "counter",
    "accepted_jump_forward_tokens": "counter",
    "adapter_slot_loads": "counter",
    "adapter_slot_evictions": "counter",
    "kv_transfer_seconds": "counter",
    "kv_transfer_failures": "counter",
    "prompts": "counter",
    "prompt_tokens_by_place": "counter",
    "adapter_num_completions": "counter",
    "adapter_num_prompt_tokens": "counter",
    "adapter_num_generated_tokens": "counter",
    "adapter_num_steps": "counter",
    "adapter_num_draft_tokens": "counter",
    "adapter_num_accepted_tokens": "counter",
    "step_time_seconds": "counter",
    "refused": "counter",
    "drafter_num_steps": "counter",
    "drafter_num_drafts": "counter",
    "drafter_num_draft_tokens": "counter",
    "drafter_num_accepted_tokens": "counter",
    "source_num_draft_tokens": "counter",
    "source_num_accepted_tokens": "counter",
    "source_draft_seconds": "counter",
}

# of the first request of `play`
FRENCH = {
    "num_completions": 2,
    "num_prompt_tokens": 11,
    "num_generated_tokens": 8,
    "num_steps": 4,
    "num_draft_tokens": 13,
    "num_accepted_tokens": 4,
}


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(MODEL, clock)


def gauges(**values: Any) -> Gauges:
    seconds = {"draft": 0.5, "mask": 0.0, "forward": 3.0, "sample": 0.25, "host": 0.25, "total": 4.0}
    base: dict[str, Any] = {
        "num_running": 2, "num_waiting": 1, "num_free_blocks": 75, "num_blocks": 100, "num_steps": 40, "num_rows": 90,
        "num_advanced": 80, "num_preemptions": 3, "num_prefix_query_tokens": 64, "num_prefix_hit_tokens": 16,
        "num_drafts_dropped": 5, "seconds": seconds, "draft_seconds": {"ngram": 0.25, "suffix": 0.125},
        "num_adapter_loads": 4, "num_adapter_evictions": 1, "num_empty_steps": 7,
    }  # fmt: skip
    return Gauges(**base | values)


def families(metrics: Metrics, of: Gauges | None = None, restarts: int = 0, ready: bool = True) -> dict[str, Metric]:
    text = metrics.exposition(of, restarts, ready).decode()
    found = list(text_string_to_metric_families(text))
    assert len(found) == len({family.name for family in found}), "a name twice"
    return {family.name: family for family in found}


def samples(metrics: Metrics, of: Gauges | None = None, restarts: int = 0, ready: bool = True) -> Samples:
    """Every sample by name and labels; model_name, which all have, is left out."""
    found: Samples = {}
    for family in families(metrics, of, restarts, ready).values():
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def value(metrics: Metrics, name: str, of: Gauges | None = None, **labels: str) -> float:
    return samples(metrics, of)[name, tuple(sorted(labels.items()))]


def play(metrics: Metrics, clock: Clock) -> None:
    """Two requests. The first has two completions, one drafted to its length and one aborted; the second is plain."""
    metrics.begin("7", num_completions=2, num_prompt_tokens=11, adapter="fr")
    metrics.begin("8", num_completions=1, num_prompt_tokens=5)
    clock.now = 1000.5
    metrics.notify(Event("7", 0, [1, 2, 3]))
    metrics.notify(Event("7", 1, [1]))
    clock.now = 1000.625
    metrics.notify(Event("7", 0, [4, 5]))
    clock.now = 1000.75
    drafted = SequenceStats(
        arrived=1000.0, first_scheduled=1000.125, first_token=1000.5, finished=1000.75, num_steps=3, num_drafts=3,
        num_draft_tokens=9, num_accepted_tokens=4, num_jump_forward_tokens=5, num_accepted_jump_forward_tokens=3,
        accepted_by_position=[2, 2, 0], drafted_by_position=[3, 3, 3], drafter="ngram",
        by_source={"ngram": [4, 1], "jump_forward": [5, 3]},
    )  # fmt: skip
    metrics.notify(Event("7", 0, [6, 7], finish_reason="length", stats=drafted))
    aborted = SequenceStats(
        arrived=1000.0, first_scheduled=1000.125, first_token=1000.5, finished=1000.75, num_steps=1, num_drafts=1,
        num_draft_tokens=4, accepted_by_position=[0] * 4, drafted_by_position=[1] * 4, drafter="ngram",
        by_source={"ngram": [4, 0]},
    )  # fmt: skip
    metrics.notify(Event("7", 1, [], finish_reason="abort", stats=aborted))
    plain = SequenceStats(arrived=1000.0, first_scheduled=1000.0, first_token=1000.75, finished=1000.75, num_steps=1)
    metrics.notify(Event("8", 0, [9], finish_reason="stop", stats=plain))


def test_names_types_and_labels_are_those_that_tools_read(metrics: Metrics, clock: Clock) -> None:
    play(metrics, clock)
    found = families(metrics, gauges())
    expected = {f"{prefix}:{name}": kind for prefix in ("vllm", "specserve") for name, kind in VLLM.items()}
    expected |= {f"specserve:{name}": kind for name, kind in OWN.items()}
    assert {name: family.type for name, family in found.items()} == expected
    labels = {name: {key for s in family.samples for key in s.labels} - {"le"} for name, family in found.items()}
    assert labels.pop("vllm:request_success") == {"model_name", "finished_reason"}
    assert labels.pop("vllm:spec_decode_num_accepted_tokens_per_pos") == {"model_name", "position"}
    assert all(keys == {"model_name"} for name, keys in labels.items() if name.startswith("vllm:"))


def test_both_names_have_equal_samples(metrics: Metrics, clock: Clock) -> None:
    play(metrics, clock)
    found = families(metrics, gauges())
    for name in VLLM:
        theirs, ours = found[f"vllm:{name}"], found[f"specserve:{name}"]
        assert theirs.samples, name
        cut = len("vllm:"), len("specserve:")
        assert [(s.name[cut[0] :], s.labels, s.value) for s in theirs.samples] == [
            (s.name[cut[1] :], s.labels, s.value) for s in ours.samples
        ]
        assert (theirs.documentation, theirs.type) == (ours.documentation, ours.type)


def test_content_type_is_that_of_the_text() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


def test_counters_after_a_script(metrics: Metrics, clock: Clock) -> None:
    play(metrics, clock)
    found = samples(metrics, gauges(), restarts=2, ready=False)
    plain = {name.removeprefix("specserve:"): v for (name, labels), v in found.items() if not labels}
    assert {name: plain[name] for name in plain if "_seconds" not in name and not name.startswith("vllm:")} == {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_queries_total": 64,
        "prefix_cache_hits_total": 16,
        "num_preemptions_total": 3,
        "prompt_tokens_total": 16,
        "generation_tokens_total": 9,
        "spec_decode_num_drafts_total": 4,
        "spec_decode_num_draft_tokens_total": 13,
        "spec_decode_num_accepted_tokens_total": 4,
        "up": 1,
        "ready": 0,
        "engine_restarts_total": 2,
        "engine_steps_total": 40,
        "engine_empty_steps_total": 7,
        "engine_step_rows_total": 90,
        "drafts_dropped_total": 5,
        "jump_forward_tokens_total": 5,
        "accepted_jump_forward_tokens_total": 3,
        "adapter_slot_loads_total": 4,
        "adapter_slot_evictions_total": 1,
        "kv_transfer_failures_total": 0,
    }


def labelled(found: Samples, name: str) -> dict[str, float]:
    return {labels[0][1]: v for (key, labels), v in found.items() if key == f"specserve:{name}"}


def test_labelled_counters_after_a_script(metrics: Metrics, clock: Clock) -> None:
    play(metrics, clock)
    found = samples(metrics, gauges())
    assert labelled(found, "request_success_total") == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    assert labelled(found, "spec_decode_num_accepted_tokens_per_pos_total") == {"0": 2, "1": 2, "2": 0, "3": 0}
    phases = {"draft": 0.5, "mask": 0.0, "forward": 3.0, "sample": 0.25, "host": 0.25}
    assert labelled(found, "step_time_seconds_total") == phases
    assert labelled(found, "drafter_num_steps_total") == {"ngram": 4, "none": 1}
    assert labelled(found, "drafter_num_drafts_total") == {"ngram": 4, "none": 0}
    assert labelled(found, "drafter_num_draft_tokens_total") == {"ngram": 13, "none": 0}
    assert labelled(found, "drafter_num_accepted_tokens_total") == {"ngram": 4, "none": 0}
    assert labelled(found, "source_num_draft_tokens_total") == {"ngram": 8, "jump_forward": 5}
    assert labelled(found, "source_num_accepted_tokens_total") == {"ngram": 1, "jump_forward": 3}
    assert labelled(found, "source_draft_seconds_total") == {"ngram": 0.25, "suffix": 0.125}
    of_adapters = {name: labelled(found, f"adapter_{name}_total") for name in FRENCH}
    assert of_adapters == {name: {"fr": count} for name, count in FRENCH.items()}


def test_adapters_beyond_a_number_share_a_label(metrics: Metrics) -> None:
    names = [f"a{number}" for number in range(MOST_ADAPTERS + 9)]
    for turn in range(2):
        for name in names:
            metrics.begin(f"{name} {turn}", 1, 4, name)
            metrics.notify(Event(f"{name} {turn}", 0, [5], finish_reason="stop", stats=SequenceStats(num_steps=1)))
    found = samples(metrics)
    expected = {**dict.fromkeys(names[:MOST_ADAPTERS], 2), "other": 18}
    assert labelled(found, "adapter_num_completions_total") == expected
    assert labelled(found, "adapter_num_prompt_tokens_total") == {name: 4 * n for name, n in expected.items()}


# count and sum of seconds; the aborted completion has no decode and no end-to-end time
TIMES = {
    "time_to_first_token": (3, 0.5 + 0.5 + 0.75),
    "inter_token_latency": (2, 0.125 + 0.125),
    "e2e_request_latency": (2, 0.75 + 0.75),
    "request_queue_time": (3, 0.125 + 0.125 + 0.0),
    "request_prefill_time": (3, 0.375 + 0.375 + 0.75),
    "request_decode_time": (2, 0.25 + 0.0),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_after_a_script(metrics: Metrics, clock: Clock, name: str) -> None:
    play(metrics, clock)
    count, total = TIMES[name]
    assert value(metrics, f"vllm:{name}_seconds_count") == count
    assert value(metrics, f"vllm:{name}_seconds_sum") == total
    assert value(metrics, f"vllm:{name}_seconds_bucket", le="+Inf") == count


def test_buckets_are_cumulative_and_include_their_bound(metrics: Metrics, clock: Clock) -> None:
    play(metrics, clock)
    name = "vllm:time_to_first_token_seconds_bucket"
    assert [value(metrics, name, le=le) for le in ("0.25", "0.5", "0.75", "1.0")] == [0, 2, 3, 3]


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("time_to_first_token", FIRST_TOKEN_BOUNDS),
        ("inter_token_latency", GAP_BOUNDS),
        ("e2e_request_latency", REQUEST_BOUNDS),
        ("request_queue_time", REQUEST_BOUNDS),
    ],
)
def test_bounds_are_exposed(metrics: Metrics, name: str, bounds: tuple[float, ...]) -> None:
    family = families(metrics)[f"vllm:{name}_seconds"]
    found = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    assert found == [*bounds, float("inf")]


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 100), min_size=1, unique=True).map(sorted))
def test_a_histogram_counts_what_is_at_most_each_bound(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(bounds)
    for each in values:
        histogram.observe(each)
    cumulative = [sum(histogram.counts[: i + 1]) for i in range(len(bounds) + 1)]
    assert cumulative == [*(sum(v <= bound for v in values) for bound in bounds), len(values)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_percentiles_are_values_that_were_seen(values: list[int]) -> None:
    window = Window(16)
    for each in values:
        window.add(each)
    kept = values[-16:]
    for name, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
        found = window.percentiles()[name]
        assert found in kept
        assert sum(v <= found for v in kept) * 100 >= percent * len(kept)
        assert sum(v < found for v in kept) * 100 < percent * len(kept)


def test_a_stop_string_is_a_stop(metrics: Metrics) -> None:
    stats = SequenceStats(arrived=1000.0, first_scheduled=1000.0, first_token=1000.25, finished=1001.0)
    for number in (1, 2):
        metrics.begin(str(number), 1, 4)
    metrics.stopped("1", 0)
    metrics.stopped("99", 0)
    for number in (1, 2):
        metrics.notify(Event(str(number), 0, [], finish_reason="abort", stats=stats))
    found = samples(metrics)
    assert labelled(found, "request_success_total") == {"stop": 1, "length": 0, "abort": 1, "error": 0}
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1


def test_what_is_unknown_or_over_is_ignored(metrics: Metrics, clock: Clock) -> None:
    play(metrics, clock)
    before = metrics.exposition(None, 0, True)
    for number in (7, 8, 99):
        metrics.notify(Event(str(number), 0, [1, 2], finish_reason="stop", stats=SequenceStats(num_steps=1)))
    metrics.forget("99")
    assert metrics.exposition(None, 0, True) == before


def test_a_request_that_was_not_let_in_is_no_end(metrics: Metrics) -> None:
    metrics.begin("1", 3, 4)
    metrics.forget("1")
    metrics.lost()
    assert set(labelled(samples(metrics), "request_success_total").values()) == {0}


def test_an_abort_in_the_queue_has_no_times(metrics: Metrics) -> None:
    metrics.begin("1", 1, 4)
    metrics.notify(Event("1", 0, [], finish_reason="abort", stats=SequenceStats(arrived=1000.0, finished=1001.0)))
    found = samples(metrics)
    assert {found[f"vllm:{name}_seconds_count", ()] for name in TIMES} == {0}
    assert found["vllm:prompt_tokens_total", ()] == 0


def test_a_lost_engine_ends_all_that_is_open_as_errors(metrics: Metrics) -> None:
    metrics.begin("1", 3, 4)
    metrics.begin("2", 1, 4)
    metrics.notify(Event("1", 1, [5], finish_reason="stop", stats=SequenceStats()))
    metrics.lost()
    metrics.notify(Event("1", 0, [5], finish_reason="stop", stats=SequenceStats()))
    assert labelled(samples(metrics), "request_success_total") == {"stop": 1, "length": 0, "abort": 0, "error": 3}


def test_a_lost_replica_ends_what_was_sent_there(metrics: Metrics) -> None:
    first, second = metrics.of_replica(0), metrics.of_replica(1)
    first.begin("1", 3, 4, None)
    second.begin("2", 2, 4, "fr")
    second.notify(Event("2", 1, [5], finish_reason="stop", stats=SequenceStats()))
    second.lost()
    second.notify(Event("2", 0, [5], finish_reason="stop", stats=SequenceStats()))
    assert labelled(samples(metrics), "request_success_total") == {"stop": 1, "length": 0, "abort": 0, "error": 1}
    for index in range(3):
        first.notify(Event("1", index, [5], finish_reason="stop", stats=SequenceStats()))
    assert labelled(samples(metrics), "request_success_total")["stop"] == 4


def test_engines_are_summed() -> None:
    whole = summed([gauges(), gauges(num_running=5, draft_seconds={"ngram": 1.0, "eagle": 2.0})])
    assert (whole.num_running, whole.num_blocks, whole.num_steps) == (7, 200, 80)
    assert (whole.seconds["forward"], whole.seconds["total"]) == (6.0, 8.0)
    assert whole.draft_seconds == {"ngram": 1.25, "suffix": 0.125, "eagle": 2.0}
    assert summed([gauges()]) == gauges()


def test_replicas_have_metrics_of_their_own(metrics: Metrics) -> None:
    """Beside the others, whose names and labels are the same with and without them."""
    alone = families(metrics, gauges())
    idle = Engines().look(None)
    replicas = [ReplicaStatus("ready", 1, 6, gauges()), ReplicaStatus("restarting", 2, 5, idle)]
    text = metrics.exposition(gauges(), 3, True, replicas).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    own = {name.removeprefix("specserve:replica_") for name in found.keys() - alone.keys()}
    assert own == {
        *("ready", "requests", "requests_running", "requests_waiting", "kv_cache_usage_perc"),
        *("restarts", "prefix_cache_queries", "prefix_cache_hits", "prompts_received"),
    }
    values = {name: [sample.value for sample in found[f"specserve:replica_{name}"].samples] for name in own}
    assert (values["ready"], values["restarts"], values["requests"]) == ([1, 0], [1, 2], [6, 5])
    assert (values["requests_running"], values["requests_waiting"]) == ([2, 0], [1, 0])
    assert (values["kv_cache_usage_perc"], values["prefix_cache_hits"]) == ([0.25, 0], [16, 0])
    told = metrics.stats(gauges(), 3, "ready", replicas)["replicas"]
    assert [(each["state"], each["num_running"], each["prefix_hit_rate"]) for each in told] == [
        ("ready", 2, 0.25),
        ("restarting", 0, None),
    ]


def test_processes_that_answer_have_metrics_of_their_own(metrics: Metrics) -> None:
    alone = families(metrics, gauges())
    processes = [ApiProcessStatus("ready", 0, 3), ApiProcessStatus("restarting", 2, 0)]
    text = metrics.exposition(gauges(), 0, True, (), processes).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    own = {name.removeprefix("specserve:api_process_") for name in found.keys() - alone.keys()}
    assert own == {"ready", "requests", "restarts"}
    assert {sample.labels["api_process"] for sample in found["specserve:api_process_ready"].samples} == {"1", "2"}
    values = {name: [sample.value for sample in found[f"specserve:api_process_{name}"].samples] for name in own}
    assert values == {"ready": [1, 0], "requests": [3, 0], "restarts": [0, 2]}
    stats = metrics.stats(gauges(), 0, "ready", (), processes)
    assert stats["api_processes"][1] == {"state": "restarting", "num_restarts": 2, "num_requests": 0}
    assert "api_processes" not in metrics.stats(gauges(), 0, "ready")


def test_totals_of_engines_add_up(metrics: Metrics) -> None:
    assert value(metrics, "specserve:engine_steps_total", gauges(num_steps=40)) == 40
    metrics.lost()
    assert value(metrics, "specserve:engine_steps_total") == 40
    between = samples(metrics)
    assert [between[f"vllm:{n}", ()] for n in ("num_requests_running", "kv_cache_usage_perc")] == [0, 0]
    again = samples(metrics, gauges(num_steps=3, num_prefix_query_tokens=1, draft_seconds={"ngram": 0.5, "auto": 1.0}))
    assert again["specserve:engine_steps_total", ()] == 43
    assert again["vllm:prefix_cache_queries_total", ()] == 65
    assert labelled(again, "step_time_seconds_total")["forward"] == 6.0
    assert labelled(again, "source_draft_seconds_total") == {"ngram": 0.75, "suffix": 0.125, "auto": 1.0}
    metrics.lost()
    metrics.lost()
    assert value(metrics, "specserve:engine_steps_total", gauges(num_steps=1)) == 44


@given(st.lists(st.one_of(st.none(), st.integers(1, 9)), max_size=30))
def test_totals_never_fall(steps: list[int | None]) -> None:
    """None: the engine dies. Numbers: steps of the one that runs."""
    engines, total, current = Engines(), 0, 0
    for more in steps:
        if more is None:
            engines.lost()
            current = 0
        else:
            current, total = current + more, total + more
            assert engines.look(gauges(num_steps=current)).num_steps == total
        assert engines.look(None).num_steps == total


def test_refusals_have_a_fixed_set_of_labels(metrics: Metrics) -> None:
    before = labelled(samples(metrics), "refused_total")
    for status in (400, 429, 429, *range(450, 500), 599, 10**9):
        metrics.refused(status)
    after = labelled(samples(metrics), "refused_total")
    assert set(after) == set(before)
    assert {status: count for status, count in after.items() if count} == {"400": 1, "429": 2, "other": 52}


def test_memory_is_bounded(metrics: Metrics, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that never end and requests that do: neither leaves more than a fixed number of things behind."""
    monkeypatch.setattr(metrics_module, "_MOST_OPEN", 100)
    stats = SequenceStats(1.0, 1.0, 1.0, 2.0, accepted_by_position=[1, 1])

    def use(first: int) -> int:
        for number in range(first, first + 3000):
            clock.now += 0.3
            metrics.begin(str(number), 2, 3)
            metrics.notify(Event(str(number), 0, [1], finish_reason="stop", stats=stats))
            metrics.refused(number)
        return size_of(metrics)

    assert use(0) == use(3000)
    metrics.lost()
    assert labelled(samples(metrics), "request_success_total")["error"] == 100


def size_of(thing: Any) -> int:
    """How many objects hang on it, containers' entries included."""
    seen: set[int] = set()

    def walk(each: Any) -> Iterator[Any]:
        if id(each) in seen or isinstance(each, type) or callable(each):
            return
        seen.add(id(each))
        yield each
        if isinstance(each, dict):
            parts = [*each.keys(), *each.values()]
        elif hasattr(each, "__iter__") and not isinstance(each, str):
            parts = list(each)
        else:
            parts = [getattr(each, name) for name in getattr(each, "__slots__", ())]
            parts += vars(each).values() if hasattr(each, "__dict__") else ()
        for part in parts:
            if not isinstance(part, int | float | str):
                yield from walk(part)

    return sum(len(each) if hasattr(each, "__len__") else 1 for each in walk(thing))


def test_a_step_costs_little(metrics: Metrics) -> None:
    """Counted in function calls and lines, which do not depend on the machine: one `notify` a sequence and step."""
    metrics.begin("1", 1, 3)
    metrics.notify(Event("1", 0, [1]))
    event = Event("1", 0, [1, 2])
    events: list[str] = []

    def trace(frame: Any, what: str, argument: Any) -> Any:
        events.append(what)
        return trace

    sys.settrace(trace)
    try:
        metrics.notify(event)
    finally:
        sys.settrace(None)
    assert events.count("call") <= 6
    assert events.count("line") <= 30


# --- /stats -----------------------------------------------------------------------------------------------------------


def test_stats_before_anything_has_happened(metrics: Metrics, clock: Clock) -> None:
    clock.now += 2
    stats = metrics.stats(None, 0, "loading")
    assert (stats["model"], stats["state"], stats["uptime_s"], stats["num_running"]) == (MODEL, "loading", 2.0, 0)
    assert stats["latency_ms"]["time_to_first_token"] == {"p50": None, "p90": None, "p99": None}
    assert stats["tokens"] == {"num_prompt": 0, "num_generated": 0, "prompt_per_s": 0.0, "generated_per_s": 0.0}
    assert stats["speculation"]["mean_acceptance_length"] is None
    assert stats["prefix_cache"]["hit_rate"] is None
    assert stats["kv_cache"]["usage"] == 0.0


def test_stats_after_a_script(metrics: Metrics, clock: Clock) -> None:
    play(metrics, clock)
    metrics.refused(429)
    clock.now = 1004.0
    found = metrics.stats(gauges(), 2, "ready")
    drafted = {
        "mean_acceptance_length": 2.0, "draft_acceptance_rate": 4 / 13, "num_steps": 4, "num_drafts": 4,
        "num_draft_tokens": 13, "num_accepted_tokens": 4,
    }  # fmt: skip
    plain = {
        "mean_acceptance_length": 1.0, "draft_acceptance_rate": None, "num_steps": 1, "num_drafts": 0,
        "num_draft_tokens": 0, "num_accepted_tokens": 0,
    }  # fmt: skip
    assert found == {
        "model": MODEL,
        "state": "ready",
        "uptime_s": 4.0,
        "num_restarts": 2,
        "num_running": 2,
        "num_waiting": 1,
        "kv_cache": {"usage": 0.25, "num_blocks": 100, "num_free_blocks": 75, "num_preemptions": 3},
        "prefix_cache": {"num_query_tokens": 64, "num_hit_tokens": 16, "hit_rate": 0.25},
        "steps": {
            "num_steps": 40,
            "num_empty_steps": 7,
            "num_rows": 90,
            "num_drafts_dropped": 5,
            "seconds": {"draft": 0.5, "mask": 0.0, "forward": 3.0, "sample": 0.25, "host": 0.25},
        },
        "tokens": {"num_prompt": 16, "num_generated": 9, "prompt_per_s": 4.0, "generated_per_s": 2.25},
        "latency_ms": {
            "time_to_first_token": {"p50": 500.0, "p90": 750.0, "p99": 750.0},
            "per_token": {"p50": 250 / 6, "p90": 250 / 6, "p99": 250 / 6},
            "end_to_end": {"p50": 750.0, "p90": 750.0, "p99": 750.0},
        },
        "speculation": {
            **drafted,
            "mean_acceptance_length": 1.8,
            "num_steps": 5,
            "recent_tokens_per_step": 9 / 5,
            "drafters": {"ngram": drafted, "none": plain},
            "sources": {
                "ngram": {"num_draft_tokens": 8, "num_accepted_tokens": 1, "draft_seconds": 0.25},
                "jump_forward": {"num_draft_tokens": 5, "num_accepted_tokens": 3, "draft_seconds": 0.0},
                "suffix": {"num_draft_tokens": 0, "num_accepted_tokens": 0, "draft_seconds": 0.125},
            },
        },
        "prefill": {
            "num_prompts": {"here": 2, "elsewhere": 0},
            "num_prompt_tokens": {"here": 16, "elsewhere": 0, "cached": 0},
            "transfer_s": 0.0,
            "num_transfer_failures": 0,
        },
        "adapters": {"fr": FRENCH},
        "requests": {"stop": 1, "length": 1, "abort": 1, "error": 0},
        "refused": {"429": 1},
    }


def test_rates_are_of_the_last_seconds(metrics: Metrics, clock: Clock) -> None:
    """5 tokens every quarter of a second, for a minute; then none."""
    metrics.begin("1", 1, 4)
    clock.now = 1000.125
    while clock.now < 1060:
        metrics.notify(Event("1", 0, [0] * 5))
        clock.now += 0.25
    clock.now = 1060.0
    assert metrics.stats(None, 0, "ready")["tokens"]["generated_per_s"] == pytest.approx(20.0)
    clock.now = 1064.5
    assert metrics.stats(None, 0, "ready")["tokens"]["generated_per_s"] == pytest.approx(20 * 5 / 9.5)
    clock.now = 1069.0
    tokens = metrics.stats(None, 0, "ready")["tokens"]
    assert (tokens["generated_per_s"], tokens["num_generated"]) == (0.0, 1200)


@given(st.lists(st.floats(0.0, 4.0), max_size=60), st.floats(0.0, 30.0))
def test_recent_flow_is_what_came_in_the_window(gaps: list[float], wait: float) -> None:
    traffic, now, times = Traffic(0.0), 0.0, []
    for gap in gaps:
        now += gap
        traffic.at(now).num_generated_tokens += 1
        times.append(now)
    flow, seconds = traffic.recent(now + wait)
    first = int(now + wait) - 9
    assert flow.num_generated_tokens == sum(time >= first for time in times)
    assert traffic.total.num_generated_tokens == len(times)
    assert 1.0 <= seconds < 10.0


# --- the log's line ---------------------------------------------------------------------------------------------------


def test_the_line_tells_of_the_time_since_the_last_one(metrics: Metrics, clock: Clock) -> None:
    assert metrics.status_line(None) is None
    play(metrics, clock)
    clock.now = 1002.0
    expected = "running 2, waiting 1, KV 25%, 4.5 tokens/s out, 8.0 in, 1.80 tokens a step"
    assert metrics.status_line(gauges()) == expected
    assert metrics.status_line(gauges()) is None
    clock.now = 1010.0
    metrics.refused(429)
    expected = "running 0, waiting 0, KV 0%, 0.0 tokens/s out, 0.0 in"
    assert metrics.status_line(None) == expected
    assert metrics.status_line(None) is None


def test_the_line_comes_while_a_request_is_open(metrics: Metrics, clock: Clock) -> None:
    """One that makes no progress is what an operator has to see."""
    metrics.begin("1", 1, 4)
    for _ in range(2):
        clock.now += 10
        assert metrics.status_line(gauges()) == "running 2, waiting 1, KV 25%, 0.0 tokens/s out, 0.0 in"
    metrics.notify(Event("1", 0, [], finish_reason="abort"))
    assert metrics.status_line(None) is not None
    assert metrics.status_line(None) is None


def test_flow_is_compared_by_value() -> None:
    assert Flow(1, 2, 3).minus(Flow(1, 1, 1)) == Flow(0, 1, 2)
