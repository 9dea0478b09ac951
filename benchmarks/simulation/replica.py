"""An engine whose steps take as long as a table says: its scheduler and its cache, and nothing that computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from simulation.costs import StepCosts
from simulation.traffic import Call, answer

from specserve.cache.cache import KVCache
from specserve.cluster.router import Load
from specserve.engine.engine import step_load
from specserve.engine.request import Limits, Request, sequences
from specserve.engine.scheduler import Scheduler
from specserve.runtime.cost import ROWS
from specserve.runtime.pack import Step
from specserve.types import Draft, SamplingParams, ScheduledSeq, Sequence

_NOISE = 0.03  # of what a step is measured to take, standard deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An engine's options. Each sequence that decodes has a draft of `num_drafted` tokens in every step, each accepted
    with the probability `acceptance` if the one before it was."""

    costs: StepCosts
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    num_blocks: int = 4096
    block_size: int = 16
    num_drafted: int = 0
    acceptance: float = 0.6


@dataclass(frozen=True, slots=True)
class _Running:
    """A step, how many tokens will be accepted of each draft, and what it will be measured to have taken."""

    step: Step
    num_accepted: dict[Sequence, int]
    cost: tuple[int, int, int, float]
    seconds: float


class NoSlots:
    """Where no KV lies."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        pass


class Answer:
    """A call that a replica has: what it will say, and when it said it."""

    def __init__(self, call: Call, seq: Sequence) -> None:
        self.call = call
        self.seq = seq
        self.tokens = answer(call.prompt_ids, call.num_output)
        self.first_s: float | None = None
        self.last_s = 0.0


class Replica:
    """Steps begin and end when they are told to; whoever drives it moves the clock. `report` gets each answer that is
    complete. Its gauges are, as a server has them, those after its last step."""

    def __init__(self, shape: Shape, seed: int, report: Callable[[Answer], None]) -> None:
        self.shape = shape
        self.answers: dict[Sequence, Answer] = {}
        self._report = report
        self._random = random.Random(seed)
        self._limits = Limits(2**31 - 1, shape.max_model_len, frozenset())
        self._step: _Running | None = None
        self.busy_s = self.ends = 0.0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self._begin()

    def _begin(self) -> None:
        shape = self.shape
        cache = KVCache(NoSlots(shape.num_blocks, shape.block_size), prefix_caching=True)
        budget = shape.max_num_batched_tokens
        self.scheduler = Scheduler(cache, shape.max_num_seqs, budget, shape.max_model_len, budget)
        self.scheduler.cost.decoding.begin(np.array([shape.costs.decoding(rows) for rows in ROWS]))
        self._gauges = 0, 0.0, 0.0, 0.0, 0.0
        self._num_steps = 0
        self._sent: list[Sequence] = []  # while a step ran, which the engine reads after it

    @property
    def load(self) -> Load:
        num_waiting, *seconds = self._gauges
        return Load.after(
            self._num_steps,
            num_waiting,
            seconds,
            num_open=len(self.answers),
            num_places=self.shape.max_num_seqs,
            num_blocks=self.scheduler.cache.num_blocks,
        )

    @property
    def is_idle(self) -> bool:
        return self._step is None

    def add(self, call: Call) -> None:
        params = SamplingParams(max_tokens=call.num_output, temperature=0.0, ignore_eos=True)
        request = Request(id=str(call.number), prompt_ids=call.prompt_ids, params=params, salt=call.tenant)
        (seq,) = sequences(request, self._limits)
        seq.order = call.number
        self.answers[seq] = Answer(call, seq)
        self._sent.append(seq)

    def prompt_seconds(self, num_tokens: int, cached: int) -> float:
        """That so many tokens of a prompt take which has so many in the cache."""
        costs, read = self.shape.costs, cached + num_tokens / 2
        return num_tokens * (costs.prompt_token_ms + costs.prompt_context_token_ms * read) / 1e3

    def begin_step(self, now: float) -> float | None:
        """Pick a step, which ends at `ends`. Returns the seconds that it takes; None: there is nothing to do."""
        for seq in self._sent:
            self.scheduler.add(seq)
        self._sent.clear()
        if not self.scheduler.has_work:
            return None
        step = self.scheduler.pick()
        assert step.seqs, "a cache holds the longest sequence, so the first one always runs"
        accepted = {each.seq: self._draft(step, each) for each in step.decoding}
        cost = step_load(step)
        seconds = self.shape.costs.seconds(*cost)
        self._step = _Running(step, accepted, cost, seconds * max(0.5, self._random.gauss(1.0, _NOISE)))
        self.busy_s += seconds
        self.ends = now + seconds
        return seconds

    def end_step(self, now: float) -> None:
        """Commit what the step computed, and let go of what is complete."""
        assert self._step is not None, "a step began"
        running, self._step = self._step, None
        scheduler, num_tokens = self.scheduler, 0
        for each in running.step.seqs:
            seq, found = each.seq, self.answers[each.seq]
            num_accepted, at = running.num_accepted.get(seq, 0), seq.num_output
            said = found.tokens[at : at + num_accepted + 1] if each.sampled else []
            scheduler.cache.keep(seq, each.num_new, range(max(0, len(said) - 1)), said)
            seq.tokens += said
            if said:
                num_tokens += len(said) * (seq in running.num_accepted)
                found.first_s = now if found.first_s is None else found.first_s
            if seq.num_output >= seq.max_tokens:
                self._end(found, now)
        scheduler.observe(len(running.num_accepted), num_tokens)
        scheduler.cost.observe(*running.cost, running.seconds)
        self._gauges = len(scheduler.waiting), *scheduler.speeds, scheduler.backlog_s
        self._num_steps += 1

    def fail(self) -> list[Call]:
        """Lose everything, as a process that is killed. Returns the calls that have not ended."""
        lost = [each.call for each in self.answers.values()]
        self.answers.clear()
        self._step = None
        self._begin()
        return lost

    def _draft(self, step: Step, each: ScheduledSeq) -> int:
        """Give it a draft, and say how many tokens of that will be accepted."""
        seq = each.seq
        left = min(step.num_tokens_left, step.num_logits_left, seq.max_tokens - seq.num_output - 1)
        count = min(self.shape.num_drafted, left)
        if count <= 0 or not self.scheduler.cache.reserve(seq, 1 + count):
            return 0
        step.num_tokens_left -= count
        step.num_logits_left -= count
        each.draft = Draft.chain([0] * count)
        luck = random.Random(seq.order << 20 | seq.num_output)  # the same wherever it runs
        num_accepted = 0
        while num_accepted < count and luck.random() < self.shape.acceptance:
            num_accepted += 1
        return num_accepted

    def _end(self, found: Answer, now: float) -> None:
        found.last_s = now
        self.num_prompt_tokens += len(found.call.prompt_ids)
        self.num_cached_tokens += found.seq.stats.num_prefix_cached_tokens
        del self.answers[found.seq]
        self.scheduler.remove(found.seq)
        self._report(found)
