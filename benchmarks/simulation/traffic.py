"""Requests with the times at which they come: at random, in bursts, or as conversations of tenants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

SHAPES = ("poisson", "bursty", "conversations")
_VOCABULARY = 49_152
_SPREAD = 0.8  # of the logarithm of a length, around its median
_LONGEST = 4.0  # times the median
_BURSTINESS = 4.0  # variance of gaps between requests over that of a Poisson process
_POPULARITY = 1.0  # exponent of Zipf's law: which tenant a conversation is of
_TOKEN_S = 0.02  # that a reader is taken to need for a token of an answer, before a turn follows


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request: its prompt, and how many tokens its answer has, which only an oracle knows before."""

    number: int
    arrives: float  # seconds
    prompt_ids: list[int]
    num_output: int
    tenant: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`num_calls` requests at `rate` a second on average. Lengths are medians of log-normal distributions, cut at four
    times the median. Conversations share what `num_tenants` tenants begin them with, of `num_system` tokens; each has
    one to `most_turns` turns, which begin with all that was said, and `think_s` on average after the last answer."""

    shape: str
    num_calls: int
    rate: float
    num_prompt: int = 200
    num_output: int = 96
    num_tenants: int = 32
    num_system: int = 512
    most_turns: int = 6
    think_s: float = 5.0
    most_tokens: int = 4096

    def calls(self, seed: int) -> list[Call]:
        """In the order of arrival. The same seed gives the same calls."""
        random = np.random.default_rng(seed)
        if self.shape == "conversations":
            made = sorted(self._conversations(random), key=lambda call: call.arrives)
            return [replace(call, number=number) for number, call in enumerate(made[: self.num_calls])]
        variance = _BURSTINESS if self.shape == "bursty" else 1.0
        gaps = random.gamma(1 / variance, variance / self.rate, self.num_calls)
        prompts, outputs = (self._lengths(random, median) for median in (self.num_prompt, self.num_output))
        return [
            Call(number, float(at), random.integers(_VOCABULARY, size=next(prompts)).tolist(), next(outputs))
            for number, at in enumerate(np.cumsum(gaps))
        ]

    def _conversations(self, random: np.random.Generator) -> Iterator[Call]:
        """More than are wanted. They are there in full number from the start: those that began before go on."""
        tenants = [random.integers(_VOCABULARY, size=self.num_system).tolist() for _ in range(self.num_tenants)]
        weights = 1 / np.arange(1, self.num_tenants + 1) ** _POPULARITY
        prompts, outputs = (self._lengths(random, median) for median in (self.num_prompt, self.num_output))
        mean_turns = (1 + self.most_turns) / 2
        before = (
            2 * self.most_turns * (self.think_s + self.num_output * _TOKEN_S)
        )  # nearly all that began earlier ended
        begins = -before
        for _ in range(self.num_calls + math.ceil(before * self.rate)):
            begins += random.exponential(mean_turns / self.rate)
            tenant = int(random.choice(self.num_tenants, p=weights / weights.sum()))
            said, at = list(tenants[tenant]), begins
            for _ in range(int(random.integers(1, self.most_turns + 1))):
                said = said + random.integers(_VOCABULARY, size=next(prompts)).tolist()
                num_output = next(outputs)
                if len(said) + num_output > self.most_tokens:
                    break
                if at >= 0:
                    yield Call(0, at, said, num_output, b"tenant %d" % tenant)
                said = said + answer(said, num_output)
                at += num_output * _TOKEN_S + random.exponential(self.think_s)

    def _lengths(self, random: np.random.Generator, median: int) -> Iterator[int]:
        while True:
            yield max(1, round(min(median * math.exp(_SPREAD * random.normal()), _LONGEST * median)))


def answer(prompt_ids: list[int], num_output: int) -> list[int]:
    """What the model says to a prompt: the next turn of the conversation begins with it."""
    first = prompt_ids[-1] + 7 * len(prompt_ids)
    return [(first + 31 * i) % _VOCABULARY for i in range(num_output)]
