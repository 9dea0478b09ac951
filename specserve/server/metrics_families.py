"""The exposition: names, types, texts and labels of every metric.

What vLLM has as well has both names, for its dashboards and benchmarks read theirs:
https://docs.vllm.ai/en/latest/usage/metrics.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from specserve.server.engine.messages import Gauges
from specserve.server.metrics_totals import (
    STEP_PHASES,
    Acceptance,
    AdapterUse,
    ApiProcessStatus,
    Flow,
    Histogram,
    Prefill,
    ReplicaStatus,
    together,
)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
OWN, SHARED = "specserve:", ("specserve:", "vllm:")
Values = Mapping[str, float]  # by the value of the one label besides model_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Everything that is exposed, as it is now. `times` holds the histograms by name."""

    model: str
    engine: Gauges
    num_restarts: int
    ready: bool
    flow: Flow
    ended: Mapping[str, int]
    refusals: Mapping[str, int]
    prefill: Prefill
    acceptance: Mapping[str, Acceptance]
    adapters: Mapping[str, AdapterUse]
    times: Mapping[str, Any]
    replicas: Sequence[ReplicaStatus] = ()
    processes: Sequence[ApiProcessStatus] = ()


def exposition(service: Service) -> bytes:
    """The whole text."""
    registry = CollectorRegistry()
    registry.register(_Collected(_families(service)))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> list[Metric]:
        return self._families


def _families(service: Service) -> Iterator[Metric]:
    make = _Maker(service.model)
    for prefix in SHARED:
        yield from _shared(service, prefix, make)
    yield from _own(service, make)


def _shared(service: Service, prefix: str, make: _Maker) -> Iterator[Metric]:
    """What vLLM has under the same name, type and labels."""
    engine, flow, whole = service.engine, service.flow, together(service.acceptance.values())
    by_position = {str(i): count for i, count in enumerate(whole.accepted_by_position)}
    for name, text, value in (
        ("num_requests_running", "Completions in the running batch.", engine.num_running),
        ("num_requests_waiting", "Completions that wait for a place in it.", engine.num_waiting),
        ("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.", usage(engine)),
    ):
        yield make.gauge(prefix + name, text, value)
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", engine.num_prefix_query_tokens),
        ("prefix_cache_hits", "Prompt tokens found there.", engine.num_prefix_hit_tokens),
        ("num_preemptions", "Sequences that had to give up their KV blocks.", engine.num_preemptions),
        ("prompt_tokens", "Prompt tokens of requests that came to their first token.", flow.num_prompt_tokens),
        ("generation_tokens", "Output tokens.", flow.num_generated_tokens),
        ("spec_decode_num_drafts", "Drafts that were verified, of ended completions.", whole.num_drafts),
        ("spec_decode_num_draft_tokens", "Their tokens.", whole.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Those of them that were accepted.", whole.num_accepted_tokens),
    ):
        yield make.counter(prefix + name, text, value)
    name = "spec_decode_num_accepted_tokens_per_pos"
    yield make.counters(prefix + name, "Accepted tokens by place in the draft, from 0.", "position", by_position)
    yield make.counters(prefix + "request_success", "Ended completions.", "finished_reason", service.ended)
    for name, text in _TIMES.items():
        yield make.histogram(f"{prefix}{name}_seconds", text, service.times[name])


_TIMES = {
    "time_to_first_token": "From a completion's arrival in the engine to its first token.",
    "inter_token_latency": "Between two outputs of a completion; an output may be several tokens.",
    "e2e_request_latency": "From a completion's arrival in the engine to its end.",
    "request_queue_time": "From a completion's arrival in the engine to its first step.",
    "request_prefill_time": "From a completion's first step to its first token.",
    "request_decode_time": "From a completion's first token to its end.",
}


def _own(service: Service, make: _Maker) -> Iterator[Metric]:
    engine, whole = service.engine, together(service.acceptance.values())
    yield make.gauge(OWN + "up", "1 while this process answers.", 1)
    yield make.gauge(OWN + "ready", "1 while requests are taken.", service.ready)
    for name, text, value in (
        ("engine_restarts", "Engines started after one had died.", service.num_restarts),
        ("engine_steps", "Steps of the engine.", engine.num_steps),
        ("engine_empty_steps", "Steps without rows, for those of other replicas.", engine.num_empty_steps),
        ("engine_step_rows", "Rows of these steps: prompt tokens, last tokens and draft tokens.", engine.num_rows),
        ("drafts_dropped", "Drafts that broke the contract and were not verified.", engine.num_drafts_dropped),
        ("jump_forward_tokens", "Tokens drafted because a grammar forced them.", whole.num_jump_forward_tokens),
        ("accepted_jump_forward_tokens", "Those of them that were accepted.", whole.num_accepted_jump_forward_tokens),
        ("adapter_slot_loads", "LoRA adapters that got a slot.", engine.num_adapter_loads),
        ("adapter_slot_evictions", "LoRA adapters that lost theirs to another.", engine.num_adapter_evictions),
        ("kv_transfer_seconds", "Time that requests awaited KV which came.", engine.transfer_s),
        ("kv_transfer_failures", "Prompts computed here after all: KV did not come.", engine.num_transfer_failures),
    ):
        yield make.counter(OWN + name, text, value)
    prompts, tokens = service.prefill.num_prompts, service.prefill.num_tokens
    yield make.counters(OWN + "prompts", "Prompts of ended requests by where they were computed.", "place", prompts)
    yield make.counters(OWN + "prompt_tokens_by_place", "Their tokens; cached: for an earlier one.", "place", tokens)
    seconds = {phase: engine.seconds[phase] for phase in STEP_PHASES}
    yield make.counters(OWN + "step_time_seconds", "Time of the engine's steps by phase.", "phase", seconds)
    yield make.counters(OWN + "refused", "Error responses by HTTP status.", "status", service.refusals)
    for name, text in _BY_DRAFTER.items():
        values = {drafter: getattr(each, name) for drafter, each in service.acceptance.items()}
        yield make.counters(f"{OWN}drafter_{name}", text, "drafter", values)
    for name, text in _BY_ADAPTER.items():
        values = {adapter: getattr(use, name) for adapter, use in service.adapters.items()}
        yield make.counters(f"{OWN}adapter_{name}", text, "adapter", values)
    for place, (name, text) in enumerate(_BY_SOURCE.items()):
        counts = {source: counts[place] for source, counts in whole.by_source.items()}
        yield make.counters(f"{OWN}source_{name}", text, "source", counts)
    text = "Time for asking each drafter and for telling it what came."
    yield make.counters(OWN + "source_draft_seconds", text, "source", engine.draft_seconds)
    if service.replicas:
        yield from _by_replica(service.replicas, make)
    if service.processes:
        yield from _by_process(service.processes, make)


def _by_replica(replicas: Sequence[ReplicaStatus], make: _Maker) -> Iterator[Metric]:
    """Of several engines each; all other metrics are their sums. There are as many replicas as the start said."""

    def values(of: Callable[[ReplicaStatus], float]) -> Values:
        return {str(number): of(each) for number, each in enumerate(replicas)}

    for name, text, of in (
        ("ready", "1 while the replica takes requests.", lambda each: each.state == "ready"),
        ("requests_running", "Completions in its running batch.", lambda each: each.gauges.num_running),
        ("requests_waiting", "Completions that wait for a place in it.", lambda each: each.gauges.num_waiting),
        ("kv_cache_usage_perc", "Share of its KV blocks in use; 1 is all of them.", lambda each: usage(each.gauges)),
    ):
        yield make.gauges(f"{OWN}replica_{name}", text, "replica", values(of))
    for name, text, of in (
        ("requests", "Requests that were sent to it.", lambda each: each.num_requests),
        ("prompts_received", "Prompts that others computed for it.", lambda each: each.gauges.num_prompts_received),
        ("restarts", "Engines started in its place after one had died.", lambda each: each.num_restarts),
        ("prefix_cache_queries", "Prompt tokens looked up there.", lambda each: each.gauges.num_prefix_query_tokens),
        ("prefix_cache_hits", "Prompt tokens found there.", lambda each: each.gauges.num_prefix_hit_tokens),
    ):
        yield make.counters(f"{OWN}replica_{name}", text, "replica", values(of))


def _by_process(processes: Sequence[ApiProcessStatus], make: _Maker) -> Iterator[Metric]:
    """Of each process that answers HTTP, by its number from 1; all other metrics are of the whole server."""
    label, numbered = "api_process", {str(number): each for number, each in enumerate(processes, start=1)}
    ready = {number: each.state == "ready" for number, each in numbered.items()}
    yield make.gauges(OWN + "api_process_ready", "1 while the process takes connections.", label, ready)
    requests = {number: each.num_requests for number, each in numbered.items()}
    yield make.gauges(OWN + "api_process_requests", "Requests to engines that it is answering.", label, requests)
    restarts = {number: each.num_restarts for number, each in numbered.items()}
    text = "Processes started in its place after one had died."
    yield make.counters(OWN + "api_process_restarts", text, label, restarts)


_BY_DRAFTER = {
    "num_steps": "Verify steps of ended completions by drafter, without a draft too.",
    "num_drafts": "Drafts that were verified, by drafter.",
    "num_draft_tokens": "Tokens of these drafts by drafter.",
    "num_accepted_tokens": "Accepted tokens of these drafts by drafter.",
}
_BY_ADAPTER = {
    "num_completions": "Ended completions of requests with a LoRA adapter, by its name.",
    "num_prompt_tokens": "Their prompt tokens, once they came to their first token.",
    "num_generated_tokens": "Their output tokens.",
    "num_steps": "Their verify steps, without a draft too.",
    "num_draft_tokens": "Draft tokens that were verified in them.",
    "num_accepted_tokens": "Those of them that were accepted.",
}
_BY_SOURCE = {
    "num_draft_tokens": "Draft tokens of ended completions by who proposed them; one of two drafters counts for both.",
    "num_accepted_tokens": "Those of them that were accepted.",
}


def usage(engine: Gauges) -> float:
    """Share of the KV blocks in use, 0 to 1."""
    return 1 - engine.num_free_blocks / engine.num_blocks if engine.num_blocks else 0.0


class _Maker:
    """Metrics with the label model_name and at most one other."""

    def __init__(self, model: str) -> None:
        self._model = model

    def gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def gauges(self, name: str, text: str, label: str, values: Values) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def counters(self, name: str, text: str, label: str, values: Values) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", label))
        for key, value in values.items():
            family.add_metric((self._model, key), value)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), _buckets(histogram), histogram.total)
        return family


def _buckets(histogram: Histogram) -> Sequence[tuple[str, float]]:
    """Cumulative, under their upper bounds."""
    bounds = (*map(str, histogram.bounds), "+Inf")
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
