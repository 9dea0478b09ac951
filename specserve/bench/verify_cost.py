"""What a verify step costs by its number of rows, on the engine's own path. `VerifySteps` makes the steps, for other
measurements too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from specserve.bench.recorder import DirectHost
from specserve.bench.report import described, table_of
from specserve.bench.traffic import read_bandwidth, watched
from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError
from specserve.machine.ownership import interrupted_after
from specserve.registry import NONE
from specserve.runtime.executor import local
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.types import Draft, Event, SamplingParams

if TYPE_CHECKING:
    from specserve.llm import LLM

WARM_UP_ROUNDS = 2
REQUEST_ID = "verify-steps"


@dataclass(frozen=True, slots=True)
class Timing:
    """One step: its rows, and the seconds of the engine's phases ("total" and "host" among them) in it."""

    rows: int
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return self.seconds["total"]

    @property
    def forward(self) -> float:
        """Planning attention, and the kernels."""
        return self.seconds["forward"]


class _WrongDrafter:
    """Fills every budget with a token that the target never says, so that drafts cost rows and change nothing."""

    needs = Needs()

    def __init__(self, token: int) -> None:
        self.token = token

    def begin(self, seq: SequenceView) -> None: ...
    def observe(self, step: StepReport) -> None: ...
    def end(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [Draft.chain([self.token] * request.num_tokens) for request in requests]


class VerifySteps:
    """Steps of one greedy sequence with exactly as many rows as asked: the last token and a draft that is wrong from
    its first token on. `ids` are cached before the first step of a round, and each step adds one token.

    A context manager; nothing else may run on the engine meanwhile. Raises ConfigError for rows or a context that the
    engine's limits do not allow.
    """

    def __init__(self, llm: LLM, ids: list[int], rows: Many[int]) -> None:
        _check(llm, len(ids), rows)
        self._llm = llm
        self._engine = llm.engine
        self._own = ExitStack()
        self._ids = ids
        self._params = SamplingParams(temperature=0.0, max_tokens=_num_tokens(rows), ignore_eos=True)

    def __enter__(self) -> VerifySteps:
        said = self._llm.generate([self._ids], self._params)[0].outputs[0]
        if said.finish_reason == "error":
            raise EngineError(f"Plain decoding failed: {said.error}")
        vocabulary = self._engine.limits.vocab_size
        never = next(token for token in range(vocabulary) if token not in said.token_ids)
        host = DirectHost(_WrongDrafter(never), vocabulary, self._llm.config.drafter_timeout_s)
        self._engine.use(host, 0)
        self._own.enter_context(self._llm.exclusive())
        self._own.callback(setattr, self._engine, "begins_ahead", self._engine.begins_ahead)
        self._engine.begins_ahead = False  # each step by itself
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.abort(REQUEST_ID)  # of a round that was not taken to its end
        self._llm.use_drafter(NONE, self._llm.config.num_speculative_tokens)
        self._own.close()

    def round(self, order: Many[int]) -> Iterator[Timing]:
        """Compute the prompt's KV, as far as no round before left it in the prefix cache, then run one step for each
        number of rows in `order`."""
        self._engine.add(Request(id=REQUEST_ID, prompt_ids=self._ids, params=self._params))
        try:
            while not _tokens(self._one_step()):
                pass
            for rows in order:
                yield self._step(rows)
        finally:
            self._engine.abort(REQUEST_ID)

    def _step(self, rows: int) -> Timing:
        engine = self._engine
        for seq in engine.requests[REQUEST_ID]:
            seq.draft_limit = rows - 1
        before = engine.counters.snapshot()
        tokens = _tokens(self._one_step())
        after = engine.counters
        assert after.num_rows - before.num_rows == rows, "the draft fills its budget, and the budget is what was asked"
        assert len(tokens) == 1, "no token of the draft is right"
        return Timing(rows, {phase: after.seconds[phase] - before.seconds[phase] for phase in after.seconds})

    def _one_step(self) -> list[Event]:
        with interrupted_after():
            return self._engine.step()


def _tokens(events: list[Event]) -> list[int]:
    """What a step of one sequence said; nothing while its prompt is being computed."""
    for event in events:
        if event.error is not None:
            raise EngineError(f"A step failed: {event.error}")
    return [token for event in events for token in event.tokens]


def _num_tokens(rows: Many[int]) -> int:
    """Output tokens of a round: so many that the last step's draft is not cut short by the end."""
    return len(rows) + max(rows) + 1


def _check(llm: LLM, context: int, rows: Many[int]) -> None:
    if not rows or min(rows) < 1:
        raise ConfigError(f"rows are {', '.join(map(str, rows)) or 'none'}; each step has at least 1.")
    if max(rows) > llm.config.max_num_batched_tokens:
        raise ConfigError(
            f"{max(rows)} rows are more than one step may have, max_num_batched_tokens = "
            f"{llm.config.max_num_batched_tokens}. Raise it, or ask for fewer rows."
        )
    needed, limit = context + _num_tokens(rows), llm.engine.limits.max_model_len
    if needed > limit:
        raise ConfigError(
            f"A context of {context} and the steps after it need {needed} tokens, and max_model_len is {limit}. "
            f"Take a context of at most {limit - _num_tokens(rows)}."
        )


def verify_cost(
    llm: LLM, ids: list[int], rows: Many[int], repeats: int, on_round: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Time steps of rows[0] (which is 1), rows[1] and so on, one of each in every round, whose order rotates.

    Figures, medians over `repeats` rounds: step_ms, forward_ms (planning attention, and the kernels), host_ms (the
    rest), cost (a step's time over that of 1 row in the same round), read_bandwidth_gbs (measured after each round),
    bandwidth_utilisation (bytes_per_step over what memory gives at that bandwidth in the time of the round's 1-row
    step). Ratios are taken within a round because a shared machine's memory may be twice as fast a second later.
    bytes_per_step is what the ops of a 1-row step must read, weights as they are packed and the KV of the context.
    `on_round` is called before each round. Ctrl-C ends it: the figures are of the rounds that were whole, `repeats` of
    them, and `interrupted`. Raises ConfigError, and KeyboardInterrupt where no round was whole.
    """
    if not rows or rows[0] != 1 or len(set(rows)) < len(rows):
        raise ConfigError(
            f"rows are {', '.join(map(str, rows))}; they must begin with 1, which the others are compared with, and "
            "name no number twice."
        )
    ops = local(llm.engine.executor).runner.ops
    with VerifySteps(llm, ids, rows) as steps:
        bytes_per_step = _bytes_per_step(llm, steps)
        measured: list[_Round] = []
        try:
            for number in range(WARM_UP_ROUNDS + repeats):
                on_round()
                shift = number % len(rows)
                timings = {timing.rows: timing for timing in steps.round([*rows[shift:], *rows[:shift]])}
                measured.append(_Round(timings, read_bandwidth(ops)))
        except KeyboardInterrupt:
            if len(measured) <= WARM_UP_ROUNDS:
                raise
    rounds = measured[WARM_UP_ROUNDS:]
    return {**settings(llm, len(ids), len(rounds), repeats), **_figures(rows, rounds, bytes_per_step)}


def _bytes_per_step(llm: LLM, steps: VerifySteps) -> int:
    """Bytes that a step of one row must read when the context is cached."""
    with watched(llm.engine, llm.config.max_num_batched_tokens) as runner:
        (parts,) = [runner.parts() for _ in steps.round([1])]
    return sum(part.num_bytes for part in parts)


def settings(llm: LLM, context: int, repeats: int, asked: int) -> dict[str, Any]:
    """What was measured, for the JSON: `repeats` of those that were `asked` for."""
    return {
        **described(llm),
        "kernels": local(llm.engine.executor).runner.ops.name,
        "context": context,
        "repeats": repeats,
        "interrupted": repeats < asked,
    }


@dataclass(frozen=True, slots=True)
class _Round:
    timings: dict[int, Timing]  # by rows
    bandwidth: float  # bytes a second


def _figures(rows: Many[int], rounds: list[_Round], bytes_per_step: int) -> dict[str, Any]:
    def each(value: Callable[[Timing, _Round], float]) -> list[float]:
        return [median(value(one.timings[count], one) for one in rounds) for count in rows]

    return {
        "rows": list(rows),
        "step_ms": each(lambda step, _: step.total * 1e3),
        "cost": each(lambda step, one: step.total / one.timings[1].total),
        "forward_ms": each(lambda step, _: step.forward * 1e3),
        "host_ms": each(lambda step, _: (step.total - step.forward) * 1e3),
        "bytes_per_step": bytes_per_step,
        "read_bandwidth_gbs": median(one.bandwidth for one in rounds) / 1e9,
        "bandwidth_utilisation": median(bytes_per_step / (one.timings[1].total * one.bandwidth) for one in rounds),
    }


def verify_cost_table(figures: dict[str, Any]) -> Table:
    """One row for each number of rows."""
    table = table_of("Verify steps", "rows", "step ms", "cost", "forward ms", "host ms")
    columns = (figures[name] for name in ("rows", "step_ms", "cost", "forward_ms", "host_ms"))
    for rows, step, cost, forward, host in zip(*columns, strict=True):
        table.add_row(str(rows), f"{step:.2f}", f"{cost:.2f}", f"{forward:.2f}", f"{host:.2f}")
    return table


def headline(figures: dict[str, Any]) -> str:
    """What was measured, in a line."""
    weights = figures["dtype"] if figures["quantization"] == "none" else figures["quantization"]
    return (
        f"{figures['model']}, {weights} on {figures['device']} ({figures['kernels']} kernels), {figures['threads']} "
        f"threads, context {figures['context']}"
    )


def limit_line(figures: dict[str, Any]) -> str:
    """How close a step comes to what memory allows, in words."""
    read, bandwidth = figures["bytes_per_step"] / 1e6, figures["read_bandwidth_gbs"]
    used = figures["bandwidth_utilisation"]
    return f"A step must read {read:.1f} MB, and memory gives {bandwidth:.1f} GB/s: {used:.0%} of that is used."
