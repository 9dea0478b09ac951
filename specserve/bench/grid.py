"""Runs drafters against plain decoding in every combination of category, concurrency and temperature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any, TypeAlias

from specserve.bench.compare import PLAIN, Plan, Question, Reply, Turn, first_difference, take, use, warm_up
from specserve.bench.prompts import evenly
from specserve.bench.report import acceptance_length
from specserve.errors import ConfigError, EngineError, unknown

if TYPE_CHECKING:
    from specserve.llm import LLM

ALL = "all"
CONCURRENCY = (1, 4, 16, 32)
Taken: TypeAlias = dict[str, tuple[list[Reply], float]]  # what each contender said in a repeat, and its seconds


@dataclass(slots=True)
class Group:
    """The cells of one category, concurrency and temperature, a cell for each drafter. `prompts` are indexes of
    questions; `repeats` are those that were taken to their end."""

    category: str
    plan: Plan
    prompts: list[int]
    repeats: list[Taken] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.category}, {self.plan.concurrency} at once, temperature {self.plan.params.temperature:g}"

    def ratios(self, drafter: str) -> list[float]:
        """Plain seconds over those of the drafter, repeat by repeat."""
        return [taken[PLAIN][1] / taken[drafter][1] for taken in self.repeats]


def default_concurrency(categories: Sequence[str], chosen: Sequence[str], most: int) -> list[int]:
    """CONCURRENCY, but no more at once than the smallest category has prompts, and than `most`; as for `groups`."""
    counts = Counter(category for category in categories if ALL in chosen or category in chosen)
    room = min(most, *counts.values()) if counts else 1
    return list(dict.fromkeys(min(streams, room) for streams in CONCURRENCY))


def groups(
    categories: Sequence[str],
    chosen: Sequence[str],
    plan: Plan,
    concurrency: Sequence[int],
    temperature: Sequence[float],
    limit: int,
) -> list[Group]:
    """Every combination of the `chosen` categories (or "all"), concurrencies and temperatures; `categories` are those
    of the questions. A group has `limit` prompts if its category has as many, and never fewer than run at once.

    Raises ConfigError for an unknown category and for one that has too few prompts, InputError for a temperature.
    """
    places: dict[str, list[int]] = {}
    for index, category in enumerate(categories):
        places.setdefault(category, []).append(index)
    made = []
    for category in dict.fromkeys(places if ALL in chosen else chosen):
        if category not in places:
            raise ConfigError(unknown("category", category, [ALL, *places]))
        found = places[category]
        for streams in dict.fromkeys(concurrency):
            if streams > len(found):
                raise ConfigError(
                    f"Category {category!r} has {len(found)} prompts, too few to run {streams} at once. Give a lower "
                    "--concurrency, or --categories without it."
                )
            prompts = evenly(found, min(len(found), max(limit, streams)))
            for degree in dict.fromkeys(temperature):
                params = replace(plan.params, temperature=degree)
                made.append(Group(category, replace(plan, concurrency=streams, params=params), prompts))
    if not made or not plan.contenders[1:]:
        raise ConfigError("A grid has at least one drafter besides none, category, concurrency and temperature.")
    return made


def measure(
    llm: LLM,
    questions: Sequence[Question],
    grid: Sequence[Group],
    on_turn: Callable[[Group, str], object] = lambda group, contender: None,
    on_repeat: Callable[[Group], object] = lambda group: None,
) -> None:
    """Run every group once, then again until all have the repeats of their plan: so all cells have figures early, and
    drift of the machine falls on all alike. In each repeat of a group plain decoding and the drafters take turns in an
    order drawn anew. The engine starts the next prompt when one has ended, so that `concurrency` of them run until none
    waits. `on_turn` is called before a turn, `on_repeat` when a group has one repeat more.

    Raises EngineError for a failed request, and for an output that is not plain decoding's, token for token: that of
    the first time that the prompt was answered at this temperature, whatever ran at once.
    """
    scheduler = llm.engine.scheduler
    most, order = scheduler.max_num_seqs, Random(0)
    expected: dict[tuple[float, int], list[int]] = {}
    try:
        for group in grid:
            if group.category == grid[0].category:  # all others run the same steps
                for name in group.plan.contenders:
                    warm_up(llm, [questions[i] for i in group.prompts[: group.plan.concurrency]], group.plan, name)
        for repeat in range(grid[0].plan.repeats):
            for group in grid:
                scheduler.max_num_seqs = group.plan.concurrency
                taken: Taken = {}
                for name in order.sample(group.plan.contenders, len(group.plan.contenders)):
                    on_turn(group, name)
                    use(llm, group.plan, name)
                    taken[name] = take(llm, questions, group.plan, Turn(repeat, name, group.prompts))
                _compare(group, taken, expected)
                group.repeats.append(taken)
                on_repeat(group)
    finally:
        scheduler.max_num_seqs = most


def _compare(group: Group, taken: Taken, expected: dict[tuple[float, int], list[int]]) -> None:
    for name in group.plan.contenders:  # plain decoding first
        for reply in taken[name][0]:
            said = expected.setdefault((group.plan.params.temperature, reply.question), reply.token_ids)
            if reply.token_ids != said:
                position = first_difference(said, reply.token_ids)
                raise EngineError(
                    f"Drafter {name!r} changed an output ({group}): that of prompt {reply.question + 1} differs from "
                    f"plain decoding's from token {position + 1} on. The cells before it have figures; it has none."
                )


def cells(grid: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """The figures of each cell that has a repeat: medians over the repeats, and the ratio's least and greatest."""
    for group in grid:
        for name in group.plan.contenders[1:] if group.repeats else ():
            ratios = group.ratios(name)
            yield {
                "category": group.category,
                "concurrency": group.plan.concurrency,
                "temperature": group.plan.params.temperature,
                "drafter": name,
                "ratio": median(ratios),
                "tokens_per_step": acceptance_length([reply for taken in group.repeats for reply in taken[name][0]]),
                "spread": [min(ratios), max(ratios)],
                "seconds": median(taken[name][1] for taken in group.repeats),
                "plain_seconds": median(taken[PLAIN][1] for taken in group.repeats),
                "prompts": len(group.prompts),
                "repeats": len(ratios),
            }


def figures(grid: Sequence[Group], settings: dict[str, Any]) -> dict[str, Any]:
    """The grid as JSON has it. `ratio` is plain seconds over the drafter's, so above 1 is faster; `overall` is its
    geometric mean over a drafter's cells, `worst` the cell where it is lowest. At least one group has a repeat."""
    found = list(cells(grid))
    overall: dict[str, list[float]] = {}
    for cell in found:
        overall.setdefault(cell["drafter"], []).append(cell["ratio"])
    return {
        "cells": found,
        "worst": min(found, key=lambda cell: cell["ratio"]),
        "overall": {name: geometric_mean(ratios) for name, ratios in overall.items()},
        "settings": {**settings, "complete": all(len(group.repeats) == group.plan.repeats for group in grid)},
    }
