"""What a request used and how its drafts fared, as `usage` and `metrics` of a response."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.outputs import CompletionOutput, RequestOutput
from specserve.server.wire.openai.bodies import Metrics, SpeculativeDecoding, Usage
from specserve.types import SequenceStats


def usage(outputs: Sequence[RequestOutput]) -> Usage:
    """OpenAI's `usage` of all prompts of a call; a prompt counts once, whatever n is."""
    stats = [completion.stats for completion in _completions(outputs)]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for completion in _completions(outputs))
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(_num_cached(output) for output in outputs)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(completion.num_reasoning_tokens for completion in _completions(outputs)),
            "accepted_prediction_tokens": sum(s.accepted_prediction_tokens for s in stats),
            "rejected_prediction_tokens": sum(s.rejected_prediction_tokens for s in stats),
        },
    }


def metrics(outputs: Sequence[RequestOutput], now: float) -> Metrics:
    """`metrics` at a response's root; without `speculative_decoding` where there could be no drafts. `now` is
    time.perf_counter(), the end of what the engine has not ended yet: a stop string is found outside of it.

    Times span all completions, in ms: from arrival to the first token, from there to the last, from arrival to the
    first step. tokens_per_second counts the tokens after each completion's first; null where there are none.
    """
    stats = [completion.stats for completion in _completions(outputs)]
    arrived = min(s.arrived for s in stats)
    scheduled = min((s.first_scheduled for s in stats if s.first_scheduled is not None), default=now)
    first = min((s.first_token for s in stats if s.first_token is not None), default=now)
    finished = max(now if s.finished is None else s.finished for s in stats)
    num_later = sum(max(0, len(completion.token_ids) - 1) for completion in _completions(outputs))
    found: Metrics = {
        "time_to_first_token_ms": 1e3 * (first - arrived),
        "generation_time_ms": 1e3 * (finished - first),
        "queue_time_ms": 1e3 * (scheduled - arrived),
        "tokens_per_second": num_later / (finished - first) if num_later and finished > first else None,
    }
    if any(s.longest_draft for s in stats):
        found["speculative_decoding"] = speculative_decoding(stats)
    return found


def speculative_decoding(stats: Sequence[SequenceStats]) -> SpeculativeDecoding:
    """How the drafts of these sequences fared. A step is a verify step, one without a draft too, so the mean acceptance
    length is the tokens that a step emitted. histogram[j] counts the steps that accepted j tokens, j = 0 .. k, the
    longest draft that any of them may have."""
    num_spec_tokens = max(s.longest_draft for s in stats)
    num_steps = sum(s.num_steps for s in stats)
    num_drafted = sum(s.num_draft_tokens for s in stats)
    accepted = [
        sum(s.accepted_by_position[i] for s in stats if i < len(s.accepted_by_position)) for i in range(num_spec_tokens)
    ]
    at_least = [num_steps, *accepted, 0]  # steps that accepted at least j
    return {
        "mean_acceptance_length": 1.0 + sum(accepted) / num_steps if num_steps else 1.0,
        "draft_acceptance_rate": sum(accepted) / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [at_least[j] - at_least[j + 1] for j in range(num_spec_tokens + 1)],
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": num_spec_tokens,
        "by_source": {
            source: {"num_draft_tokens": _sum(stats, source, 0), "num_accepted_tokens": _sum(stats, source, 1)}
            for source in dict.fromkeys(source for s in stats for source in s.by_source)
        },
    }


def _sum(stats: Sequence[SequenceStats], source: str, place: int) -> int:
    return sum(s.by_source[source][place] for s in stats if source in s.by_source)


def _completions(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    return [completion for output in outputs for completion in output.outputs]


def _num_cached(output: RequestOutput) -> int:
    """Of the first completion: the others take the prompt's KV from it. Output computed again does not count."""
    return min(output.outputs[0].stats.num_prefix_cached_tokens, len(output.prompt_token_ids))
