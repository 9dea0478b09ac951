"""What people read of the server's state: the parts of GET /stats, and the line in the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specserve.server.engine.messages import Gauges
from specserve.server.metrics_families import usage
from specserve.server.metrics_totals import (
    STEP_PHASES,
    Acceptance,
    ApiProcessStatus,
    Flow,
    Prefill,
    ReplicaStatus,
    Window,
    together,
)


def engine(gauges: Gauges) -> dict[str, Any]:
    """What runs and waits, memory, the prefix cache and where steps spend their time."""
    queried, hit = gauges.num_prefix_query_tokens, gauges.num_prefix_hit_tokens
    return {
        "num_running": gauges.num_running,
        "num_waiting": gauges.num_waiting,
        "kv_cache": {
            "usage": usage(gauges),
            "num_blocks": gauges.num_blocks,
            "num_free_blocks": gauges.num_free_blocks,
            "num_preemptions": gauges.num_preemptions,
        },
        "prefix_cache": {
            "num_query_tokens": queried,
            "num_hit_tokens": hit,
            "hit_rate": hit / queried if queried else None,
        },
        "steps": {
            "num_steps": gauges.num_steps,
            "num_empty_steps": gauges.num_empty_steps,
            "num_rows": gauges.num_rows,
            "num_drafts_dropped": gauges.num_drafts_dropped,
            "seconds": {phase: gauges.seconds[phase] for phase in STEP_PHASES},
        },
    }


def replicas(all_: Sequence[ReplicaStatus]) -> dict[str, Any]:
    """Of several engines each; nothing where one serves alone."""
    found = [
        {
            "state": each.state,
            "role": each.role,
            **({"address": each.address} if each.address else {}),
            "num_restarts": each.num_restarts,
            "num_requests": each.num_requests,
            "num_running": each.gauges.num_running,
            "num_waiting": each.gauges.num_waiting,
            "kv_cache_usage": usage(each.gauges),
            "num_steps": each.gauges.num_steps,
            "num_empty_steps": each.gauges.num_empty_steps,
            "num_prompts_received": each.gauges.num_prompts_received,
            "prefix_hit_rate": each.gauges.num_prefix_hit_tokens / each.gauges.num_prefix_query_tokens
            if each.gauges.num_prefix_query_tokens
            else None,
        }
        for each in all_
    ]
    return {"replicas": found} if found else {}


def api_processes(all_: Sequence[ApiProcessStatus]) -> dict[str, Any]:
    """Of each process that answers HTTP; nothing where the one does that has the engines."""
    return {"api_processes": [asdict(each) for each in all_]} if all_ else {}


def prefill(found: Prefill, gauges: Gauges) -> dict[str, Any]:
    """Where prompts were computed, how long KV from elsewhere was awaited, and how often it did not come."""
    return {
        "num_prompts": dict(found.num_prompts),
        "num_prompt_tokens": dict(found.num_tokens),
        "transfer_s": gauges.transfer_s,
        "num_transfer_failures": gauges.num_transfer_failures,
    }


def tokens(total: Flow, recent: Flow, seconds: float) -> dict[str, Any]:
    return {
        "num_prompt": total.num_prompt_tokens,
        "num_generated": total.num_generated_tokens,
        "prompt_per_s": recent.num_prompt_tokens / seconds,
        "generated_per_s": recent.num_generated_tokens / seconds,
    }


def latency(windows: Mapping[str, Window]) -> dict[str, dict[str, float | None]]:
    return {
        name: {key: None if value is None else 1e3 * value for key, value in window.percentiles().items()}
        for name, window in windows.items()
    }


def speculation(drafters: Mapping[str, Acceptance], recent: Flow, gauges: Gauges) -> dict[str, Any]:
    """Of all ended completions and of those of each drafter, and by the source of draft tokens.
    `recent_tokens_per_step` is of the last seconds, and of running completions too; so are draft_seconds."""
    whole = together(drafters.values())
    return {
        **_acceptance(whole),
        "recent_tokens_per_step": recent.tokens_per_step,
        "drafters": {name: _acceptance(each) for name, each in drafters.items()},
        "sources": {
            name: {
                "num_draft_tokens": whole.by_source.get(name, (0, 0))[0],
                "num_accepted_tokens": whole.by_source.get(name, (0, 0))[1],
                "draft_seconds": gauges.draft_seconds.get(name, 0.0),
            }
            for name in whole.by_source | gauges.draft_seconds
        },
    }


def _acceptance(of: Acceptance) -> dict[str, Any]:
    return {
        "mean_acceptance_length": of.mean_acceptance_length,
        "draft_acceptance_rate": of.draft_acceptance_rate,
        "num_steps": of.num_steps,
        "num_drafts": of.num_drafts,
        "num_draft_tokens": of.num_draft_tokens,
        "num_accepted_tokens": of.num_accepted_tokens,
    }


Happened = tuple[Flow, int, int]  # tokens and steps, ended completions, error responses: totals


class Line:
    """The line in the log, about what lies between two of them."""

    def __init__(self, now: float) -> None:
        self._time = now
        self._happened: Happened = (Flow(), 0, 0)

    def make(self, now: float, engine: Gauges, happened: Happened, is_busy: bool) -> str | None:
        if happened == self._happened and not is_busy:
            self._time = now
            return None
        flow = happened[0].minus(self._happened[0])
        seconds = max(1e-3, now - self._time)
        self._time, self._happened = now, happened
        length = "" if flow.tokens_per_step is None else f", {flow.tokens_per_step:.2f} tokens a step"
        return (
            f"running {engine.num_running}, waiting {engine.num_waiting}, KV {usage(engine):.0%}, "
            f"{flow.num_generated_tokens / seconds:.1f} tokens/s out, {flow.num_prompt_tokens / seconds:.1f} in{length}"
        )
