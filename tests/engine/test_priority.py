"""Priorities say who runs first among those that wait, and never who waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams

STEP, MOST = 16, 64  # as the documents say: places in the order of arrival, and steps that count
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """One that runs one request at a time."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")
    return build(EngineConfig(model=str(folder), dtype="float32", max_num_seqs=1, max_model_len=64)).engine


def served(engine: Engine, waiting: int, priorities: Iterable[int]) -> list[int]:
    """Requests in the order in which they ended, by number of arrival: so many wait already when the first one runs,
    and with each that ends another comes."""
    left = deque(enumerate(priorities))
    ended: list[int] = []
    while left or engine.has_work:
        while left and len(engine.requests) <= waiting:
            number, priority = left.popleft()
            engine.add(Request(id=str(number), prompt_ids=[5], params=ONE_TOKEN, priority=priority))
        ended += [int(event.request_id) for event in engine.step() if event.finish_reason]
    return ended


def clamped(priority: int) -> int:
    return max(-MOST, min(priority, MOST))


PRIORITIES = st.sampled_from([0, 0, 0, -1, 1, -2, 3, -MOST, MOST, -(2**31) + 1, 2**31 - 1]) | st.integers(-99, 99)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60), st.lists(PRIORITIES, min_size=1, max_size=80))
def test_nobody_is_passed_by_more_than_the_steps_between(engine: Engine, waiting: int, priorities: list[int]) -> None:
    ended = served(engine, waiting, priorities)
    assert sorted(ended) == list(range(len(priorities)))
    place = {number: index for index, number in enumerate(ended)}
    for early, first in enumerate(priorities):
        for late in range(early + 1, len(priorities)):
            if place[late] < place[early]:
                steps = clamped(first) - clamped(priorities[late])
                assert late - early < steps * STEP


def test_an_endless_stream_of_urgent_ones_starves_nobody(engine: Engine) -> None:
    """Forty wait at any time, all of them before it by what they say; it has its turn all the same."""
    for priority, most in ((-1, STEP), (-5, 5 * STEP)):
        ended = served(engine, 40, [priority] * 10 + [0] + [priority] * 400)
        assert 10 < ended.index(10) <= 10 + most
    ended = served(engine, 40, [0] + [-(2**31) + 1] * (MOST * STEP + 100))
    assert ended.index(0) <= MOST * STEP


def test_without_priorities_all_run_as_they_come(engine: Engine) -> None:
    assert served(engine, 30, [7] * 60) == served(engine, 30, [0] * 60) == list(range(60))
