"""What speculation gives at a model's size: real steps of random weights, whose drafts are accepted by a coin.

The target's greedy text is recorded by plain decoding. A draft has that text's tokens as far as the coins say so, and
then wrong ones; the engine verifies it as any other draft, and what comes out must be the recorded text again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from specserve.bench.random_target import num_parameters, spec_of
from specserve.bench.recorder import DirectHost
from specserve.bench.report import table_of
from specserve.bench.verify_cost import verify_cost
from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError
from specserve.llm import LLM
from specserve.machine.ownership import interrupted_after
from specserve.models.loader import num_packed_bytes, num_weight_bytes
from specserve.registry import NONE
from specserve.runtime.executor import local
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.types import Draft, Event, SamplingParams

ROUNDS = 2  # of all draft lengths, the second in the opposite order: a machine's drift falls on all alike
REQUEST_ID = "synthetic"
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class DrafterCost:
    """What drafting takes, in steps of one row: `share` for each draft, as of a head that takes one pass, or with
    `per_token` for each of its tokens, as of EAGLE heads and draft models."""

    share: float
    per_token: bool = False

    @classmethod
    def parse(cls, text: str) -> DrafterCost:
        """Of "0.08" or "0.05/token". Raises ValueError."""
        number, slash, unit = text.partition("/")
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1e3 or (slash and unit != "token"):
            raise ValueError(f'"{text}" is no cost of a drafter; write 0.08 for each draft, or 0.05/token.')
        return cls(share, bool(slash))

    def __str__(self) -> str:
        return f"{self.share:g}/token" if self.per_token else f"{self.share:g}"

    def steps(self, num_tokens: int) -> float:
        """Of a draft of so many tokens."""
        return self.share * (num_tokens if self.per_token else 1)


class Coins:
    """Whether a draft's token at each depth is right, if all before it are: in `rates[depth]` of all cases, the last
    rate for all deeper ones. Cases are spread evenly, from a drawn beginning on, so that a short run has its rates."""

    def __init__(self, rates: Many[float], seed: int = 0) -> None:
        self._rates, self._draw = rates, random.Random(seed)
        self._sums: list[float] = []

    def depth(self, most: int) -> int:
        """How many tokens of a draft of `most` are right."""
        while len(self._sums) < most:
            self._sums.append(self._draw.random())
        for depth in range(most):
            self._sums[depth] += self._rates[min(depth, len(self._rates) - 1)]
            if self._sums[depth] < 1:
                return depth
            self._sums[depth] -= 1
        return most


def expected_tokens(rates: Many[float], num_tokens: int) -> float:
    """Tokens that a step with a draft of so many emits on average, the target's own included."""
    total = share = 1.0
    for depth in range(num_tokens):
        share *= rates[min(depth, len(rates) - 1)]
        total += share
    return total


class _CoinDrafter:
    """Knows what comes after a prompt, and says it as far as the coins allow."""

    needs = Needs(observes=False)

    def __init__(self, outputs: list[int], coins: Coins, vocab_size: int) -> None:
        self._outputs, self._coins, self._vocab_size = outputs, coins, vocab_size

    def begin(self, seq: SequenceView) -> None: ...
    def observe(self, step: StepReport) -> None: ...
    def end(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [self._draft(*each) for each in requests]

    def _draft(self, seq: SequenceView, most: int) -> Draft:
        start = len(seq.tokens) - seq.num_prompt
        right = self._outputs[start : start + most]
        depth = self._coins.depth(len(right))
        return Draft.chain([*right[:depth], *((token + 1) % self._vocab_size for token in right[depth:])])


@dataclass(slots=True)
class Run:
    """Steps of one sequence with drafts of `num_tokens`, after its first token."""

    num_tokens: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    def seconds_per_token(self, cost: DrafterCost, plain_s: float) -> float:
        """With drafting at that cost, of steps that take `plain_s`, which is added: the coins take none."""
        drafting = cost.steps(self.num_tokens) * plain_s if self.num_tokens else 0.0
        return (self.step_s + drafting) / self.tokens_per_step


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is measured: steps of `rows`, the first of which is 1, `repeats` of each, and runs of `max_tokens` with
    drafts of one token less than there are rows, of `acceptance` by depth, for drafters of these `costs`."""

    shape: str
    acceptance: tuple[float, ...] = (0.7,)
    costs: tuple[DrafterCost, ...] = (DrafterCost(0.0),)
    rows: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)
    context: int = 200
    repeats: int = 10
    max_tokens: int = 64

    def __post_init__(self) -> None:
        if wrong := [rate for rate in self.acceptance if not 0 <= rate <= 1]:
            raise ConfigError(f"--acceptance has {wrong[0]:g}; shares of accepted tokens are numbers from 0 to 1.")
        if not self.acceptance or not self.costs:
            raise ConfigError("--acceptance and --drafter-cost name at least one number each.")
        if not self.rows or self.rows[0] != 1 or len(set(self.rows)) < len(self.rows):
            raise ConfigError("--rows begin with 1, which the others are compared with, and name no number twice.")

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have in all of it."""
        return self.context + self.max_tokens + len(self.rows) + 2 * max(self.rows) + 2


@dataclass(slots=True)
class Answer:
    """What was measured so far: `steps` are verify_cost's figures."""

    question: Question
    steps: dict[str, Any]
    runs: dict[int, Run] = field(default_factory=dict)  # by tokens of a draft, whole rounds alone
    interrupted: bool = False


def synthetic(
    llm: LLM,
    question: Question,
    on_round: Callable[[], object] = lambda: None,
    on_run: Callable[[int], object] = lambda num_tokens: None,
) -> Answer:
    """Measure steps, then runs. `on_round` is called before each round of steps, `on_run` before each run with the
    tokens of its drafts. Ctrl-C ends it: what was whole is there, and `interrupted`. Raises ConfigError, EngineError
    for a text that drafts changed, and KeyboardInterrupt where nothing was whole."""
    vocab_size = llm.engine.limits.vocab_size
    draw = random.Random(0)
    ids = [draw.randrange(vocab_size) for _ in range(question.context)]
    steps = verify_cost(llm, ids, question.rows, question.repeats, on_round)
    found = Answer(question, steps, interrupted=steps["interrupted"])
    if found.interrupted:
        return found
    lengths = [rows - 1 for rows in question.rows]
    try:
        outputs = _recorded(llm, ids, question.max_tokens + 2 * max(question.rows))
        for number in range(ROUNDS):
            runs = []
            for k in lengths if number % 2 == 0 else reversed(lengths):
                on_run(k)
                runs.append(_run(llm, ids, outputs, k, question))
            for run in runs:
                _add(found.runs.setdefault(run.num_tokens, Run(run.num_tokens)), run)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def _add(total: Run, run: Run) -> None:
    total.steps += run.steps
    total.tokens += run.tokens
    total.seconds += run.seconds


def _recorded(llm: LLM, ids: list[int], num_tokens: int) -> list[int]:
    """What the target says by itself."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    said = llm.generate([ids], params, drafter=NONE)[0].outputs[0]
    if said.finish_reason == "error":
        raise EngineError(f"Plain decoding failed: {said.error}")
    return said.token_ids


def _run(llm: LLM, ids: list[int], outputs: list[int], k: int, question: Question) -> Run:
    """Steps until there are max_tokens, after the first token, which the prompt's step says."""
    engine, vocab_size = llm.engine, llm.engine.limits.vocab_size
    drafter = _CoinDrafter(outputs, Coins(question.acceptance), vocab_size)
    run, said = Run(k), list[int]()
    with llm.exclusive():
        engine.use(DirectHost(drafter, vocab_size, llm.config.drafter_timeout_s), k)
        params = SamplingParams(temperature=0, max_tokens=len(outputs), ignore_eos=True)
        engine.add(Request(id=REQUEST_ID, prompt_ids=ids, params=params))
        try:
            for tokens, seconds in _steps(llm):
                said += tokens
                if len(said) > len(tokens):  # not the prompt's
                    run.steps, run.tokens, run.seconds = run.steps + 1, run.tokens + len(tokens), run.seconds + seconds
                if run.tokens >= question.max_tokens:
                    break
        finally:
            engine.abort(REQUEST_ID)
    if said != outputs[: len(said)]:
        raise EngineError(f"Drafts of {k} tokens changed the text of random weights, which is a fault of specserve.")
    return run


def _steps(llm: LLM) -> Iterator[tuple[list[int], float]]:
    """The tokens of each step that says any, and its seconds."""
    while True:
        begun = time.perf_counter()
        with interrupted_after():
            events = llm.engine.step()
        seconds = time.perf_counter() - begun
        if tokens := _tokens(events):
            yield tokens, seconds


def _tokens(events: list[Event]) -> list[int]:
    for event in events:
        if event.error is not None:
            raise EngineError(f"A step failed: {event.error}")
    return [token for event in events for token in event.tokens]


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(llm: LLM, found: Answer) -> dict[str, Any]:
    """As JSON has it: `step_ms` and `cost` by rows; `runs` by tokens of a draft; `drafters`, for each cost that was
    asked for: tokens a second and the gain over plain decoding by tokens of a draft, and the best of these."""
    question, ops, spec = found.question, local(llm.engine.executor).runner.ops, spec_of(found.question.shape)
    runs = [found.runs[k] for k in sorted(found.runs)]
    plain_s = runs[0].step_s if runs else 0.0
    return {
        **found.steps,
        "model": f"random weights of the shape {question.shape}",
        "shape": question.shape,
        "parameters": num_parameters(spec),
        "weights_bytes": num_weight_bytes(spec, ops.weight_dtype)
        if ops.layout is None
        else num_packed_bytes(spec, ops),
        "acceptance": list(question.acceptance),
        "interrupted": found.interrupted,
        "rounds": ROUNDS,
        "max_tokens": question.max_tokens,
        "runs": [
            {
                "num_speculative_tokens": run.num_tokens,
                "steps": run.steps,
                "tokens": run.tokens,
                "tokens_per_step": run.tokens_per_step,
                "expected_tokens_per_step": expected_tokens(question.acceptance, run.num_tokens),
                "step_ms": run.step_s * 1e3,
            }
            for run in runs
        ],
        "drafters": [_drafter(cost, runs, plain_s) for cost in question.costs] if runs else [],
    }


def _drafter(cost: DrafterCost, runs: list[Run], plain_s: float) -> dict[str, Any]:
    rates = [1 / run.seconds_per_token(cost, plain_s) for run in runs]
    best = max(range(len(runs)), key=rates.__getitem__)
    return {
        "cost": str(cost),
        "tokens_per_second": rates,
        "speedup": [rate / rates[0] for rate in rates],
        "best": runs[best].num_tokens,
        "best_speedup": rates[best] / rates[0],
    }


def speculation_table(found: dict[str, Any]) -> Table:
    """A row for each length of drafts."""
    costs = [f"drafter {each['cost']}" for each in found["drafters"]]
    rates = ", ".join(f"{rate:g}" for rate in found["acceptance"])
    table = table_of(f"Tokens a second, acceptance {rates} by depth", "draft", "tokens/step", "step ms", *costs)
    for i, run in enumerate(found["runs"]):
        k = run["num_speculative_tokens"]
        cells = [
            f"{each['tokens_per_second'][i]:.1f}" + (f" ({each['speedup'][i]:.2f}x)" if k else "")
            for each in found["drafters"]
        ]
        table.add_row(str(k) if k else "none", f"{run['tokens_per_step']:.2f}", f"{run['step_ms']:.2f}", *cells)
    return table


def best_lines(found: dict[str, Any]) -> list[str]:
    """Which length pays best for a drafter of each cost."""
    lines = []
    for each in found["drafters"]:
        what = f"A drafter that takes {each['cost']} of a step of one row"
        if each["best"] == 0:
            lines.append(f"{what} does not pay: plain decoding is fastest.")
        else:
            lines.append(f"{what} pays best with drafts of {each['best']}: {each['best_speedup']:.2f}x.")
    return lines


def llama_bench_lines(found: dict[str, Any]) -> list[str]:
    """The steps as `llama-bench -p 1,2,4,6,8 -n 0` of llama.cpp prints them: a step of n rows is its test ppn."""
    weights = found["dtype"] if found["quantization"] == "none" else found["quantization"]
    size, count = f"{found['weights_bytes'] / _GIB:.2f} GiB", f"{found['parameters'] / 1e9:.2f} B"
    own = f"| {found['shape']} {weights} | {size} | {count} | {found['device']} | {found['threads']} |"
    lines = [
        "| model | size | params | backend | threads | test | t/s |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for rows, step_ms in zip(found["rows"], found["step_ms"], strict=True):
        lines.append(f"{own} pp{rows} | {rows / step_ms * 1e3:.2f} |")
    return lines
