"""Which answers each step reads, and what the target says of them. A step's batch follows from its number and the seed
alone, so that a run which was killed goes on with what it would have read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.train.target import Target

_POOL = 512  # answers that are sorted by length, so that those of a batch are about equally long


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target wrote behind it; answer `number` of its text."""

    tokens: NDArray[Any]  # of any whole numbers: as they are stored, which takes a quarter of int64
    num_prompt: int
    category: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers side by side, padded at their ends with token 0, and the drafts that they train: as many of each."""

    tokens: Tensor  # int64 [batch, tokens]
    hidden: Tensor  # float32 [batch, tokens, layers * hidden], the residual stream behind the layers that a head reads
    is_judged: Tensor  # bool [batch, tokens], where the token behind was written by the target
    starts: Tensor  # int64 [batch, drafts], the token behind which a draft begins, ascending; then -1 for none
    target: Tensor  # float32 [n, draft vocabulary], what the target gives the token behind, where drafts are judged
    target_rows: Tensor  # int64 [batch, tokens], the row of `target`; -1 where no draft is judged
    categories: list[str]

    def judged(self, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts that have a token at `depth`, from 0: their answers, their numbers in them and the place before that
        token, int64 [n] each."""
        at = self.starts + depth
        last = self.tokens.shape[1] - 1
        found = (self.starts >= 0) & (at <= last) & self.is_judged.gather(1, at.clamp(0, last))
        answers, drafts = found.nonzero(as_tuple=True)
        return answers, drafts, at[answers, drafts]


def plan_batches(lengths: Sequence[int], epochs: float, batch_tokens: int, seed: int) -> list[list[int]]:
    """The answers of every step, by index: each once an epoch, in an order of the epoch's own. A batch has at most
    `batch_tokens` tokens, padding included, or one answer."""
    plan: list[list[int]] = []
    for epoch in range(math.ceil(epochs)):
        draw = np.random.Generator(np.random.PCG64([seed, epoch]))
        order = draw.permutation(len(lengths)).tolist()
        batches: list[list[int]] = []
        for start in range(0, len(order), _POOL):
            batches += _packed(sorted(order[start : start + _POOL], key=lambda i: lengths[i]), lengths, batch_tokens)
        shuffled = [batches[i] for i in draw.permutation(len(batches))]
        share = min(1.0, epochs - epoch)
        plan += shuffled[: max(1, round(share * len(shuffled)))]
    return plan


def _packed(ascending: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for index in ascending:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return [batch for batch in batches if batch]


def draw_starts(lengths: Tensor, num_prompt: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Of answers of int64 [batch] tokens with their prompts, up to `count` tokens each that are not the last, as
    Batch.starts has them."""
    places = torch.arange(int(lengths.max()))
    allowed = (places >= num_prompt[:, None]) & (places < lengths[:, None] - 1)
    order = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, 2.0)
    drawn = order.argsort(1)[:, :count]
    drawn = drawn.masked_fill(~allowed.gather(1, drawn), len(places)).sort(1).values
    return drawn.masked_fill(drawn == len(places), -1)


def make_batch(
    target: Target,
    answers: Sequence[Answer],
    layers: Sequence[int],
    ids: Tensor,
    depth: int,
    drafts: int,
    generator: torch.Generator,
    states: list[Tensor] | None = None,
) -> Batch:
    """What a head that reads `layers` and proposes from `ids` learns from up to `drafts` drafts of `depth` tokens in
    each of these answers. `states` is what target.hidden(answers, [*layers, target.last_layer]) says, where that is
    known."""
    longest, device = max(len(answer.tokens) for answer in answers), target.device
    tokens = torch.zeros(len(answers), longest, dtype=torch.int64)
    is_judged = torch.zeros(len(answers), longest, dtype=torch.bool)
    if states is None:
        states = target.hidden([answer.tokens for answer in answers], [*layers, target.last_layer])
    hidden = torch.zeros(len(answers), longest, len(layers) * target.spec.hidden_size, device=device)
    for row, (answer, state) in enumerate(zip(answers, states, strict=True)):
        count = len(answer.tokens)
        tokens[row, :count] = torch.from_numpy(answer.tokens.astype(np.int64))
        is_judged[row, answer.num_prompt - 1 : count - 1] = True
        hidden[row, :count] = state[:, :-1].flatten(1)
    lengths = torch.tensor([len(answer.tokens) for answer in answers])
    num_prompt = torch.tensor([answer.num_prompt for answer in answers])
    starts = draw_starts(lengths, num_prompt, drafts, generator)
    wanted = _within(starts, depth, longest) & is_judged
    rows = torch.full(wanted.shape, -1)
    rows[wanted] = torch.arange(int(wanted.sum()))
    residual = torch.cat([state[of_it[: len(state)], -1] for state, of_it in zip(states, wanted, strict=True)])
    return Batch(
        tokens=tokens.to(device),
        hidden=hidden,
        is_judged=is_judged.to(device),
        starts=starts.to(device),
        target=target.distributions(residual, ids),
        target_rows=rows.to(device),
        categories=[answer.category for answer in answers],
    )


def _within(starts: Tensor, depth: int, length: int) -> Tensor:
    """Which places lie at a start or less than `depth` behind one, bool [batch, length]."""
    found = torch.zeros(len(starts), length + depth, dtype=torch.bool)
    answer, draft = (starts >= 0).nonzero(as_tuple=True)
    for place in range(depth):
        found[answer, starts[answer, draft] + place] = True
    return found[:, :length]
