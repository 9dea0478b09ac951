"""Replays a head's drafter along recorded answers, one token after the other: from every place in an answer it drafts
as it would there, whatever was accepted before, so that variants of its inputs are compared place by place."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.bench.heads.recording import HeadBench, Recording
from specserve.speculation.base import Drafter, DraftRequest, SequenceReport, SequenceView, StepReport
from specserve.types import BlockTable, Draft, SamplingParams, Sequence, Verdict

MOST_NODES = 64  # of all drafts that are asked for at once
_CHUNK = 128  # rows of prompts that a drafter is shown at once


@dataclass(frozen=True, slots=True)
class Shown:
    """What a drafter is shown in place of what it should be: at place i the token i + `tokens`, in row i the hidden
    states of row i + `rows`, and for layer l the states behind `layers[l]`."""

    tokens: int = 0
    rows: int = 0
    layers: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Replay:
    """What came of the drafts, place by place, each place a place in an answer after its first token. `reach` is how
    deep a draft went, at most to the end of the answer, `accepted` how many of its tokens the answer has. Of chains
    `drafted` has the tokens, int [places, depth], and `truth` the answer's, int [places, depth + 1], -1 beyond the
    end; `before` is the token before the first of them."""

    depth: int
    accepted: list[int] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    truth: list[list[int]] = field(default_factory=list)
    before: list[int] = field(default_factory=list)

    def by_depth(self, allowed: NDArray[np.bool_] | None = None) -> list[float]:
        """The share of drafts that are accepted up to each depth, of those that reach it; with `allowed` bool [places,
        depth] of those alone whose places are allowed up to there."""
        accepted, reach = np.array(self.accepted), np.array(self.reach)
        found = []
        for depth in range(self.depth):
            judged = reach > depth
            if allowed is not None:
                judged &= allowed[:, : depth + 1].all(1)
            if not judged.any():
                break
            found.append(float((accepted[judged] > depth).mean()))
        return found

    @property
    def mean_accepted(self) -> float:
        """Tokens that are accepted of a draft."""
        return sum(self.by_depth())

    @property
    def error(self) -> float:
        """The standard error of that."""
        return _error(np.array(self.accepted, float))

    def gain_over(self, other: Replay) -> tuple[float, float]:
        """Accepted tokens more than `other` has in the same places, and the standard error of that."""
        differences = np.array(self.accepted, float) - np.array(other.accepted, float)
        return self.mean_accepted - other.mean_accepted, _error(differences)


def _error(values: NDArray[np.float64]) -> float:
    return float(values.std() / max(1, len(values)) ** 0.5)


class _Walk:
    """One recorded answer, as a drafter is told of it."""

    def __init__(self, recording: Recording, shown: Shown, first_block: int, block_size: int, depth: int) -> None:
        self.recording, self._shown = recording, shown
        last = len(recording.tokens) - 1
        self._tokens = [recording.tokens[min(max(i + shown.tokens, 0), last)] for i in range(last + 1)]
        num_blocks = -(-(last + 2 + depth) // block_size)
        self.next_block = first_block + num_blocks
        self.seq = Sequence(
            request_id="replay",
            index=0,
            tokens=self._tokens[: recording.num_prompt],
            num_prompt=recording.num_prompt,
            params=SamplingParams(temperature=0),
            seed=0,
            max_tokens=last,
            blocks=BlockTable(array("i", range(first_block, self.next_block))),
        )
        self.view = SequenceView(self.seq, 0)

    @property
    def place(self) -> int:
        """How many tokens there are."""
        return len(self.seq.tokens)

    @property
    def rest(self) -> list[int]:
        return self.recording.tokens[self.place :]

    def step(self, start: int, stop: int, layers: Many[int]) -> tuple[SequenceReport, list[Tensor]]:
        """What is told of the rows from `start` to `stop`, and the states behind `layers`. After the last row that
        there is another token comes."""
        verdict = None
        if stop == self.place:
            self.seq.tokens.append(self._tokens[stop])
            verdict = Verdict([self._tokens[stop]], [])
        self.seq.cached = stop
        report = SequenceReport(self.view._update(), start, stop - start, Draft.empty(), verdict, 0)
        return report, [self._rows(layer, start, stop) for layer in layers]

    def _rows(self, layer: int, start: int, stop: int) -> Tensor:
        hidden = self.recording.hidden[self._shown.layers.get(layer, layer)]
        if not self._shown.rows:
            return hidden[start:stop]
        rows = torch.arange(start, stop, device=hidden.device) + self._shown.rows
        return hidden[rows.clamp(0, len(hidden) - 1)]


def _walks(bench: HeadBench, recordings: Many[Recording], shown: Shown, depth: int) -> list[_Walk]:
    walks: list[_Walk] = []
    for recording in recordings:
        first = walks[-1].next_block if walks else 1  # block 0 is where padding is written
        walks.append(_Walk(recording, shown, first, bench.llm.engine.executor.block_size, depth))
    assert not walks or walks[-1].next_block <= bench.llm.engine.executor.num_blocks, "the cache holds all texts"
    return walks


def _tell(drafter: Drafter, told: Many[tuple[SequenceReport, list[Tensor]]]) -> None:
    """Of one step with these rows."""
    reports: list[SequenceReport] = []
    row = 0
    for report, _ in told:
        reports.append(report._replace(first_row=row, logits_start=len(reports)))
        row += report.num_new
    states = [torch.cat(parts) for parts in zip(*(hidden for _, hidden in told), strict=True)]
    drafter.observe(StepReport(reports, dict(zip(drafter.needs.hidden_layers, states, strict=True))))


def _begin(drafter: Drafter, walks: Many[_Walk]) -> None:
    layers = drafter.needs.hidden_layers
    for walk in walks:
        drafter.begin(walk.view)
        prompt = walk.place
        for start in range(0, prompt, _CHUNK):
            _tell(drafter, [walk.step(start, min(start + _CHUNK, prompt), layers)])


@torch.no_grad()
def replay(
    bench: HeadBench,
    recordings: Many[Recording],
    depth: int,
    *,
    budget: int | None = None,
    shown: Shown = Shown(),
    **options: Any,
) -> Replay:
    """Draft from every place of the answers, at most `depth` deep and `budget` nodes (None: a chain), by the bench's
    head with more `options` of its drafter."""
    nodes = budget or depth
    with bench.llm.exclusive():
        drafter = bench.drafter(**options)
        layers = drafter.needs.hidden_layers
        walks = _walks(bench, recordings, shown, nodes)
        _begin(drafter, walks)
        found = [Replay(depth) for _ in walks]
        alive = list(range(len(walks)))
        while alive := [i for i in alive if walks[i].rest]:
            size = max(1, MOST_NODES // nodes)
            for group in (alive[at : at + size] for at in range(0, len(alive), size)):
                drafts = drafter.propose([DraftRequest(walks[i].view, nodes) for i in group])
                for i, draft in zip(group, drafts, strict=True):
                    _judge(found[i], draft, walks[i].recording.tokens[walks[i].place - 1 :], budget is not None)
            alive = [i for i in alive if len(walks[i].rest) > 1]
            if alive:
                _tell(drafter, [walks[i].step(walks[i].place - 1, walks[i].place, layers) for i in alive])
        for walk in walks:
            drafter.end(walk.view)
    return _joined(found, depth)


def _judge(found: Replay, draft: Draft, text: list[int], is_tree: bool) -> None:
    """Of a draft after text[0]. A tree that is wide where it might be deep is wrong there."""
    rest, depth = text[1:], found.depth
    children = dict(
        zip(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True), range(len(draft)), strict=True)
    )
    node, accepted = -1, 0
    while accepted < min(depth, len(rest)) and (node := children.get((node, rest[accepted]), -2)) != -2:
        accepted += 1
    deepest = depth if is_tree else len(draft)
    found.accepted.append(accepted)
    found.reach.append(min(deepest, depth, len(rest)))
    found.before.append(text[0])
    found.truth.append((rest + [-1] * (depth + 1))[: depth + 1])
    if draft.is_chain:
        found.drafted.append((draft.tokens.tolist() + [-1] * depth)[:depth])


def _joined(parts: Many[Replay], depth: int) -> Replay:
    found = Replay(depth)
    for part in parts:
        for name in ("accepted", "reach", "drafted", "truth", "before"):
            getattr(found, name).extend(getattr(part, name))
    return found


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Medians: `propose[k - 1]` of a draft of k tokens for one sequence, `observe` of a step of one row."""

    propose: list[float]
    observe: float


@torch.no_grad()
def drafting_seconds(
    bench: HeadBench, recording: Recording, depth: int, most_places: int = 24, **options: Any
) -> PhaseSeconds:
    """What the head's drafter takes for one sequence, along an answer, drafts of each length in turn."""
    propose: list[list[float]] = [[] for _ in range(depth)]
    observe: list[float] = []
    with bench.llm.exclusive():
        drafter = bench.drafter(**options)
        (walk,) = _walks(bench, [recording], Shown(), depth)
        _begin(drafter, [walk])
        for place in range(min(most_places, len(recording.outputs) - 2)):
            for length in range(1, depth + 1) if place % 2 else range(depth, 0, -1):
                begun = time.perf_counter()
                drafter.propose([DraftRequest(walk.view, length)])
                propose[length - 1].append(time.perf_counter() - begun)
            told = [walk.step(walk.place - 1, walk.place, drafter.needs.hidden_layers)]
            begun = time.perf_counter()
            _tell(drafter, told)
            observe.append(time.perf_counter() - begun)
        drafter.end(walk.view)
    return PhaseSeconds([median(each) if each else 0.0 for each in propose], median(observe) if observe else 0.0)
