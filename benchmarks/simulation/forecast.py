"""What will become of the requests of a replica, as far as one can tell who knows how long answers will be."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from simulation.replica import Replica
from simulation.traffic import Call

_SLOWDOWN, _WAIT_S = 2.5, 0.006  # as the scheduler's: what chunks of prompts may add to steps in which others decode


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a request may wait for its first token, and for each further one on average."""

    first_s: float
    token_s: float

    def hold(self, arrives: float, first_s: float, last_s: float, num_output: int) -> bool:
        return first_s - arrives <= self.first_s and last_s - first_s <= self.token_s * (num_output - 1) + 1e-9


@dataclass(frozen=True, slots=True)
class Expected:
    arrives: float
    first_s: float
    last_s: float
    num_output: int


def num_missed(answers: Many[Expected], limits: Limits) -> int:
    return sum(not limits.hold(each.arrives, each.first_s, each.last_s, each.num_output) for each in answers)


@dataclass(slots=True)
class _Prompt:
    call: Call
    seconds: float  # that its tokens without KV take
    first_s: float | None
    num_left: int  # tokens to say


def forecast(replica: Replica, now: float, more: tuple[Call, int] | None = None) -> list[Expected]:
    """When each answer begins and ends, with one more call, of whose prompt so many tokens are cached, or without.
    Prompts are computed one after another, beside decoding as fast as the scheduler lets them."""
    shape, costs = replica.shape, replica.shape.costs
    pace = replica.scheduler.pace
    decoding: list[tuple[float, int, Call, float]] = []  # ends at this progress; tie; call; its first token
    prompts: deque[_Prompt] = deque()
    context = 0
    for seq in replica.answers:
        found = replica.answers[seq]
        left, missing = seq.max_tokens - seq.num_output, len(seq.tokens) - seq.cached
        context += len(seq.tokens)
        if missing == 1 and found.first_s is not None:
            decoding.append((left / pace, found.call.number, found.call, found.first_s))
        else:
            prompts.append(_Prompt(found.call, replica.prompt_seconds(missing, seq.cached), found.first_s, left))
    if more is not None:
        call, cached = more
        context += len(call.prompt_ids)
        prompts.append(
            _Prompt(call, replica.prompt_seconds(len(call.prompt_ids) - cached, cached), None, call.num_output)
        )
    each_context_s = context / max(1, len(decoding) + len(prompts)) * costs.context_token_ms / 1e3
    heapify(decoding)
    at, progress, ended = max(now, replica.ends), 0.0, []
    while decoding or prompts:
        num = len(decoding)
        alone = costs.decoding(num * (1 + shape.num_drafted)) + num * each_context_s
        takes_prompt = bool(prompts) and num < shape.max_num_seqs
        chunks = max(0.0, min((_SLOWDOWN * pace - 1) * alone, _WAIT_S * num)) if takes_prompt else 0.0
        step = alone + chunks
        until_ended = (decoding[0][0] - progress) * step if num else float("inf")
        share = chunks / step if num else 1.0
        until_begun = prompts[0].seconds / share if takes_prompt and share else float("inf")
        passed = min(until_ended, until_begun)
        at += passed
        progress += passed / step if num else 0.0
        if until_begun <= until_ended:
            prompt = prompts.popleft()
            heappush(
                decoding,
                (progress + (prompt.num_left - 1) / pace, prompt.call.number, prompt.call, prompt.first_s or at),
            )
        else:
            if takes_prompt:
                prompts[0].seconds -= passed * share
            _, _, call, first_s = heappop(decoding)
            ended.append(Expected(call.arrives, first_s, at, call.num_output))
    return ended
