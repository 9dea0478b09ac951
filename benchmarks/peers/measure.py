"""Engines in turns on the same prompts, and what each run took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from runners import Runner

T = TypeVar("T")
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine with one kind of weights, drafting or not."""

    peer: str
    weights: str
    speculation: bool

    @property
    def engine(self) -> str:
        return f"{self.peer} {self.weights}"

    def __str__(self) -> str:
        return self.engine + (" with speculation" if self.speculation else "")


@dataclass(frozen=True, slots=True)
class Work:
    """What every contender does in every repeat, as token ids. Each group of prompts runs at once."""

    groups: list[list[list[int]]]
    prefill: list[list[int]]  # one new token each
    warm_up: list[list[int]]
    max_tokens: int
    ignore_eos: bool
    repeats: int


@dataclass(slots=True)
class Figures:
    """What one contender took, one entry a repeat. Tokens are new ones, except those of prefill."""

    contender: Contender
    runner: Runner
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # prompts included
    prefill_tokens: list[int] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)  # to the first token: of every prompt that ran alone
    after_first_s: list[float] = field(default_factory=list)  # of every token after it: a mean for each such prompt
    ids: list[list[int]] = field(default_factory=list)  # what the first repeat said

    def begin(self, work: Work) -> None:
        """A repeat begins: everything learnt is forgotten, and the engine runs once uncounted."""
        self.runner.reset()
        self.runner.generate(work.warm_up, min(WARM_UP_TOKENS, work.max_tokens), work.ignore_eos)
        for totals in (self.tokens, self.prefill_tokens):
            totals.append(0)
        for times in (self.seconds, self.prefill_seconds):
            times.append(0.0)

    def run(self, group: list[list[int]], work: Work) -> None:
        answer = self.runner.generate(group, work.max_tokens, work.ignore_eos)
        self.tokens[-1] += sum(map(len, answer.ids))
        self.seconds[-1] += answer.total_s
        if len(self.tokens) == 1:
            self.ids += answer.ids
        if answer.ttft_s is not None:
            self.first_s.append(answer.ttft_s)
            if len(answer.ids[0]) > 1:
                self.after_first_s.append((answer.total_s - answer.ttft_s) / (len(answer.ids[0]) - 1))

    def run_prefill(self, prompt: list[int]) -> None:
        answer = self.runner.generate([prompt], 1, True)
        self.prefill_tokens[-1] += len(prompt)
        self.prefill_seconds[-1] += answer.total_s


def measure(contenders: Sequence[Figures], work: Work, on_turn: Callable[[str], None]) -> None:
    """Run `work` in every repeat. All contenders run a group before the next one begins; who goes first rotates, so
    that drift of the machine falls on all alike. Prefill is for those that do not draft. `on_turn` is told before each
    turn. Raises RunnerError."""
    plain = [figures for figures in contenders if not figures.contender.speculation]
    for repeat in range(work.repeats):
        where = f"repeat {repeat + 1} of {work.repeats}"
        for figures in contenders:
            on_turn(f"{where}, warm-up: {figures.contender}")
            figures.begin(work)
        for index, group in enumerate(work.groups):
            for figures in rotated(contenders, repeat + index):
                on_turn(f"{where}, prompts {index + 1} of {len(work.groups)}: {figures.contender}")
                figures.run(group, work)
        for index, prompt in enumerate(work.prefill):
            for figures in rotated(plain, repeat + index):
                on_turn(f"{where}, prefill {index + 1} of {len(work.prefill)}: {figures.contender}")
                figures.run_prefill(prompt)


def rotated(items: Sequence[T], shift: int) -> Iterator[T]:
    """All of them, beginning with another one each time; every second round backwards, so that neighbours change."""
    order = [items[(place + shift) % len(items)] for place in range(len(items))]
    return iter(order if shift // len(items) % 2 == 0 else order[::-1])
