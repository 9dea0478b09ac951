"""Runs drafters against plain decoding on the same prompts, taking turns, and keeps what each run said and took."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specserve.config import DRAFT_MODEL
from specserve.errors import ConfigError, EngineError
from specserve.histogram import Histogram
from specserve.machine.ownership import interrupted_after
from specserve.registry import DRAFTERS, RUNS_MODEL
from specserve.types import SamplingParams, SequenceStats

if TYPE_CHECKING:
    from specserve.engine.counters import Counters
    from specserve.llm import LLM, RequestOutput

PLAIN = "none"
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. `concurrency` prompts run at once; everything is repeated `repeats` times."""

    drafters: Sequence[str]
    params: SamplingParams
    num_speculative_tokens: int | None = None
    drafter_options: Mapping[str, Any] = field(default_factory=dict)  # of all drafters
    draft_model: str | None = None
    concurrency: int = 1
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("concurrency", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if len(set(self.drafters)) < len(self.drafters):
            raise ConfigError(f"A drafter is named twice: {', '.join(self.drafters)}. Name each once.")

    @property
    def contenders(self) -> list[str]:
        """Plain decoding and the drafters, in the order of the report."""
        return [PLAIN, *(name for name in self.drafters if name != PLAIN)]

    @property
    def own(self) -> str:
        """Who the engine is made for: the KV of a drafter's model is planned at the start."""
        running = DRAFTERS.stating(RUNS_MODEL)
        with_model = sorted(
            (name for name in self.drafters if name in running),
            key=lambda name: (name != DRAFT_MODEL, running[name] is not True),
        )
        return (with_model or self.contenders[-1:])[0]

    def options_of(self, name: str) -> dict[str, Any]:
        """A contender's options."""
        if name == PLAIN:
            return {}
        is_model = name == DRAFT_MODEL and self.draft_model is not None
        return {**self.drafter_options, **({"model": self.draft_model} if is_model else {})}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as token ids, the category it counts for, and the LoRA adapter that answers it, None for the model."""

    ids: list[int]
    category: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request said and what happened to it."""

    question: int
    repeat: int
    token_ids: list[int]
    text: str
    stats: SequenceStats
    finish_reason: str | None = None


@dataclass(slots=True)
class Run:
    """Everything one contender did. `wall` is seconds of generation, prefill included, one entry a repeat; `num_steps`,
    `seconds`, `draft_seconds` and the KV tokens are the engine's own counts."""

    drafter: str
    replies: list[Reply] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    num_steps: int = 0
    live_tokens: int = 0
    allocated_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    draft_seconds: dict[str, float] = field(default_factory=dict)
    mask_per_step: Histogram = field(default_factory=Histogram)
    mask_per_row: Histogram = field(default_factory=Histogram)

    def add(self, replies: list[Reply], wall: float, before: Counters, after: Counters) -> None:
        """One group of prompts: its replies, and the engine's counters around it."""
        repeat = replies[0].repeat
        self.wall += [0.0] * (repeat + 1 - len(self.wall))
        self.wall[repeat] += wall
        self.replies += replies
        self.num_steps += after.num_steps - before.num_steps
        self.live_tokens += after.live_tokens - before.live_tokens
        self.allocated_tokens += after.allocated_tokens - before.allocated_tokens
        for phase, total in after.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + total - before.seconds[phase]
        for source, total in after.draft_seconds.items():
            spent = total - before.draft_seconds.get(source, 0.0)
            self.draft_seconds[source] = self.draft_seconds.get(source, 0.0) + spent
        self.mask_per_step += after.mask_per_step - before.mask_per_step
        self.mask_per_row += after.mask_per_row - before.mask_per_row


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender runs one group of prompts, given by their indexes."""

    repeat: int
    drafter: str
    group: list[int]


def turns(plan: Plan, num_prompts: int) -> Iterator[Turn]:
    """Every contender runs each group of `concurrency` prompts before the next group begins; who goes first rotates, so
    that drift of the machine and the warmth of its caches fall on all alike."""
    contenders = plan.contenders
    shift = 0
    for repeat in range(plan.repeats):
        for start in range(0, num_prompts, plan.concurrency):
            group = list(range(start, min(start + plan.concurrency, num_prompts)))
            for place in range(len(contenders)):
                yield Turn(repeat, contenders[(place + shift) % len(contenders)], group)
            shift += 1


def compare(
    llm: LLM,
    questions: Sequence[Question],
    plan: Plan,
    on_turn: Callable[[Turn], None] = lambda turn: None,
    kept: list[Run] | None = None,
) -> list[Run]:
    """Run `plan` and return one Run per contender, plain decoding first. `on_turn` is called before each turn. `kept`
    has the runs before they end, for whoever interrupts them: they have the groups that all contenders have run.

    The prefix cache is emptied before each turn, and every contender warms up on the first group, uncounted. Prompt i
    is sampled with seed params.seed + i by all. Raises ConfigError for an unknown drafter, EngineError for a failed
    request.
    """
    check_concurrency(plan.concurrency, llm.config.max_num_seqs)
    runs = [] if kept is None else kept
    runs += [Run(name) for name in plan.contenders]
    by_name = {run.drafter: run for run in runs}
    for name in plan.contenders:
        warm_up(llm, questions[: plan.concurrency], plan, name)
    taken: dict[str, tuple[list[Reply], float, Counters, Counters]] = {}
    for turn in turns(plan, len(questions)):
        on_turn(turn)
        use(llm, plan, turn.drafter)
        before = llm.counters()
        replies, wall = take(llm, questions, plan, turn)
        taken[turn.drafter] = replies, wall, before, llm.counters()
        if len(taken) == len(runs):
            with interrupted_after():
                for name, group in taken.items():
                    by_name[name].add(*group)
            taken.clear()
    return runs


def check_concurrency(concurrency: int, max_num_seqs: int) -> None:
    """Raises ConfigError where an engine runs fewer sequences at once."""
    if concurrency > max_num_seqs:
        raise ConfigError(
            f"concurrency is {concurrency}, but only max_num_seqs = {max_num_seqs} sequences run at once. Pass "
            f"--max-num-seqs {concurrency}."
        )


def take(llm: LLM, questions: Sequence[Question], plan: Plan, turn: Turn) -> tuple[list[Reply], float]:
    """What the drafter in use makes of a turn, and the seconds that takes. Raises EngineError for a failed request."""
    begun = perf_counter()
    params = [_params(plan.params, i) for i in turn.group]
    outputs = _generate(llm, [questions[i] for i in turn.group], params)
    wall = perf_counter() - begun
    return [_reply(i, turn.repeat, output) for i, output in zip(turn.group, outputs, strict=True)], wall


def use(llm: LLM, plan: Plan, name: str) -> None:
    """Draft with a drafter that is made anew, and forget all prefixes: no turn profits from what ran before it."""
    llm.use_drafter(name, plan.num_speculative_tokens, **plan.options_of(name))
    llm.reset_prefix_cache()


def warm_up(llm: LLM, questions: Sequence[Question], plan: Plan, name: str) -> None:
    """Run some tokens of each of the questions, uncounted."""
    use(llm, plan, name)
    short = replace(plan.params, max_tokens=min(WARM_UP_TOKENS, plan.params.max_tokens or WARM_UP_TOKENS))
    _generate(llm, questions, [short] * len(questions))


def _generate(llm: LLM, questions: Sequence[Question], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([each.ids for each in questions], params, adapter=[each.adapter for each in questions])


def _params(params: SamplingParams, index: int) -> SamplingParams:
    return replace(params, seed=(params.seed or 0) + index)


def _reply(question: int, repeat: int, output: RequestOutput) -> Reply:
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise EngineError(f"Prompt {question + 1} failed: {completion.error}")
    return Reply(question, repeat, completion.token_ids, completion.text, completion.stats, completion.finish_reason)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A reply that differs from plain decoding's, first at output token `position` (0 is the first). `gap` is the
    difference of the model's two best log-probabilities there: a gap near 0 is a tie that arithmetic broke."""

    drafter: str
    question: int
    repeat: int
    position: int
    gap: float


def references(runs: Sequence[Run]) -> dict[int, list[int]]:
    """What each question is compared with: plain decoding's output ids in the first repeat."""
    plain = next(run for run in runs if run.drafter == PLAIN)
    return {reply.question: reply.token_ids for reply in plain.replies if reply.repeat == 0}


def mismatches(runs: Sequence[Run]) -> Iterator[tuple[Run, Reply]]:
    """Replies whose ids differ from the reference, plain decoding's own later repeats included."""
    expected = references(runs)
    for run in runs:
        yield from ((run, reply) for reply in run.replies if reply.token_ids != expected[reply.question])


def explain(llm: LLM, questions: Sequence[Question], runs: Sequence[Run]) -> list[Mismatch]:
    """Where each differing reply first differs, and how close the model's choice was there."""
    expected = references(runs)
    found: list[Mismatch] = []
    for run, reply in mismatches(runs):
        position = first_difference(expected[reply.question], reply.token_ids)
        question = questions[reply.question]
        prefix = replace(question, ids=question.ids + expected[reply.question][:position])
        found.append(Mismatch(run.drafter, reply.question, reply.repeat, position, _gap(llm, prefix)))
    return found


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The first index at which two different lists of ids differ; the shorter's length if it begins the other."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def write_recording(path: Path, llm: LLM, questions: Sequence[Question], run: Run, top_k: int) -> None:
    """What a run said first, as bench.replay reads it, with the model's `top_k` best tokens where it said each one."""
    lines: list[dict[str, Any]] = []
    for reply in (reply for reply in run.replies if reply.repeat == 0):
        question = questions[reply.question]
        line = {"prompt_ids": question.ids, "output_ids": reply.token_ids, "category": question.category}
        lines.append(line | ({"top": _best_tokens(llm, question, reply.token_ids, top_k)} if top_k else {}))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _best_tokens(llm: LLM, question: Question, answer: list[int], k: int) -> list[list[int]]:
    llm.use_drafter(PLAIN)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=k, prompt_logprobs=k)
    output = _generate(llm, [replace(question, ids=question.ids + answer[:-1])], [params])[0]
    assert output.prompt_logprobs and output.outputs[0].logprobs, "log-probabilities were asked for"
    judged = [*output.prompt_logprobs[len(question.ids) :], *output.outputs[0].logprobs]
    return [list(each.top) for each in judged if each is not None]


def _gap(llm: LLM, question: Question) -> float:
    llm.use_drafter(PLAIN)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    output = _generate(llm, [question], [params])[0].outputs[0]
    assert output.logprobs, "log-probabilities were asked for"
    first, second = sorted(output.logprobs[0].top.values(), reverse=True)[:2]
    return first - second
