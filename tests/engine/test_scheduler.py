"""What a step costs while requests wait, counted and not timed."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from specserve.cache import prefix
from specserve.cache.cache import KVCache
from specserve.cache.storage import KVShape, KVStorage
from specserve.engine.scheduler import Scheduler
from specserve.testing import check_integrity
from specserve.types import SamplingParams, Sequence

BLOCK = 16
STEPS = 100


def make_seq(name: int, tokens: list[int], parent: Sequence | None = None) -> Sequence:
    return Sequence(
        request_id=str(name), index=0, tokens=list(tokens), num_prompt=len(tokens), params=SamplingParams(),
        seed=0, max_tokens=10**6, order=name, parent=parent,
    )  # fmt: skip


def make(num_blocks: int, budget: int = 512, max_num_seqs: int = 64) -> Scheduler:
    cache = KVCache(KVStorage([KVShape(1, 2)] * 1, 1 + num_blocks, BLOCK, torch.float32, "cpu"), prefix_caching=True)
    scheduler = Scheduler(cache, max_num_seqs, budget, 10**6, budget)
    scheduler.cost.observe(0, 0, 1, 0.0, 1e-9)  # no chunk ends by the clock
    scheduler.cost.observe(1, 0, 0, 0.0, 1.0)
    return scheduler


def step(scheduler: Scheduler) -> None:
    """Compute what was picked; who has reached its end says one more token."""
    for each in scheduler.pick().seqs:
        scheduler.cache.keep(each.seq, each.num_new)
        if each.sampled:
            each.seq.tokens.append(7)


def full(num_waiting: int) -> Scheduler:
    """Two sequences run and decode, and for want of blocks none of the others can, whose prompts begin as one does."""
    shared = [i % 251 for i in range(2048)]
    scheduler = make(num_blocks=128 + 42)
    scheduler.add(make_seq(0, [*shared, 1]))
    scheduler.add(make_seq(1, [9] * 16 * 20))
    for _ in range(6):
        step(scheduler)
    for i in range(num_waiting):
        scheduler.add(make_seq(2 + i, [*shared, *[i % 200] * 500]))
    return scheduler


@pytest.mark.parametrize("num_waiting", [1, 512])
def test_a_prompt_that_waits_is_looked_up_once(num_waiting: int) -> None:
    """Over many steps in which another decodes and publishes blocks: its prompt is hashed once as far as it is found,
    and who waits behind it costs nothing."""
    scheduler = full(num_waiting)
    cache = scheduler.cache
    before = dataclasses.replace(cache.stats)
    with (
        mock.patch.object(prefix, "link", side_effect=prefix.link) as hashed,
        mock.patch.object(cache, "match_prefix", side_effect=cache.match_prefix) as matched,
        mock.patch.object(cache.pool, "find", side_effect=cache.pool.find) as found,
    ):
        for _ in range(STEPS):
            step(scheduler)
    check_integrity(cache, scheduler.running)
    assert len(scheduler.waiting) == num_waiting, "or nothing waited"
    own = 2 * (STEPS // BLOCK + 1)  # blocks that the running ones filled
    assert hashed.call_count <= 129 + own
    assert matched.call_count <= 12, "once, and when it may ask for fewer blocks"
    assert found.call_count <= matched.call_count * 130 + STEPS + own + 1000
    assert cache.stats == before, "nobody was admitted"


def test_what_waits_starts_as_soon_as_it_can() -> None:
    """When blocks come free, and when more of its prefix is found."""
    scheduler = full(1)
    step(scheduler)
    (late,) = scheduler.waiting
    other = scheduler.running[1]
    scheduler.remove(other)
    step(scheduler)
    assert scheduler.running[1:] == [late]
    assert scheduler.cache.stats.num_prefix_hit_tokens == 2048
    assert late.stats.num_prefix_cached_tokens == 2048

    prompt = [i % 251 for i in range(640)]
    scheduler = make(num_blocks=50, budget=160)
    scheduler.add(make_seq(0, [*prompt, 1]))
    scheduler.add(make_seq(1, [*prompt, 2]))
    for _ in range(6):
        step(scheduler)
    assert not scheduler.waiting, "its prefix was published block by block while it waited"
    assert scheduler.cache.stats.num_prefix_hit_tokens >= 480


def test_a_look_up_counts_once_for_each_admission() -> None:
    scheduler = full(1)
    for _ in range(STEPS):
        step(scheduler)
    scheduler.remove(scheduler.running[1])
    step(scheduler)
    stats = scheduler.cache.stats
    assert (stats.num_prefix_queries, stats.num_prefix_query_tokens) == (3, 2049 + 320 + 2548)
    assert stats.num_prefix_hit_tokens == 2048


def test_prompts_that_are_not_computed_are_told_in_seconds() -> None:
    """A millisecond a token: of a prompt that runs what is left, of those that wait as much as was not found of others,
    where only the first max_num_seqs are looked at."""
    scheduler = make(num_blocks=64, budget=32, max_num_seqs=2)
    assert scheduler.backlog_s == 0.0
    for _ in range(300):  # from the nanosecond that `make` says
        scheduler.cost.observe(0, 0, 10, 0.0, 0.010)
    assert scheduler.speeds == pytest.approx((1.0, 0.001, 0.0))
    scheduler.add(make_seq(0, [1] * 100))
    assert scheduler.backlog_s == pytest.approx(0.100)
    step(scheduler)
    assert scheduler.backlog_s == pytest.approx(0.100 - 0.032)
    for _ in range(3):
        step(scheduler)
    assert scheduler.backlog_s == 0.0, "it decodes"
    for number, length in enumerate((40, 60, 999, 999)):
        scheduler.add(make_seq(1 + number, [2 + number] * length))
    assert scheduler.backlog_s == pytest.approx(4 * 0.050)
    scheduler.cache.stats.num_prefix_query_tokens, scheduler.cache.stats.num_prefix_hit_tokens = 200, 150
    assert scheduler.backlog_s == pytest.approx(0.25 * 4 * 0.050)
