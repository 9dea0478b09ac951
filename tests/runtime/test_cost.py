"""The measured cost of steps: what is learned of it, and how much of a prompt fits into a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specserve.runtime import timing
from specserve.runtime.cost import ROWS, DecodeCost, StepCost

A, B = 5e-4, 2e-7  # seconds a token of a prompt takes, and those for each token that it reads


def taught(num_decoding: int = 1, decode_s: float = 0.004) -> StepCost:
    """Has seen steps of decoding alone, then a prompt of 4,096 tokens in chunks."""
    cost = StepCost()
    for _ in range(20):
        cost.observe(num_decoding, 0, 0, 0.0, decode_s)
    for context in range(0, 4096, 256):
        cost.observe(num_decoding, 0, 256, context + 128, decode_s + 256 * (A + B * (context + 128)))
    return cost


def test_the_line_through_measurements_is_found() -> None:
    cost = taught()
    assert cost.decoding.seconds(1) == pytest.approx(0.004)
    assert cost.prompt_line == pytest.approx((A, B), rel=0.01)
    assert StepCost().prompt_line == (0.0, 0.0)
    for context in (0, 1000, 8000):
        assert cost.added(100, context) == pytest.approx(100 * (A + B * (context + 50)), rel=0.01)


@given(seconds=st.floats(0, 10), context=st.integers(0, 2**17))
def test_a_chunk_is_the_longest_that_fits(seconds: float, context: int) -> None:
    cost = taught()
    count = cost.chunk(seconds, context)
    assert cost.added(count, context) <= seconds * (1 + 1e-9)
    assert cost.added(count + 2, context) > seconds


def test_no_time_is_no_token() -> None:
    assert taught().chunk(0.0, 0) == taught().chunk(-1.0, 100) == 0


def test_what_was_never_measured_begins_small() -> None:
    cost = StepCost()
    assert 0 < cost.chunk(1e9, 0) <= 64
    assert (cost.added(100, 100), cost.decoding.seconds(4)) == (0.0, 0.0)


def test_decoding_is_known_by_rows() -> None:
    cost = DecodeCost()
    for rows, seconds in ((1, 0.004), (16, 0.02)) * 40:
        cost.observe(rows, 0, seconds)
    assert [cost.seconds(rows) for rows in (1, 16)] == pytest.approx([0.004, 0.02], rel=0.02)
    curve = cost.curve(1, 299)
    assert curve == sorted(curve)


def test_a_pause_of_the_machine_is_forgotten() -> None:
    cost = taught()
    before = cost.chunk(0.01, 0)
    cost.observe(1, 0, 16, 8.0, 5.0)
    cost.observe(1, 0, 0, 0.0, 5.0)
    assert cost.chunk(0.01, 0) > before / 3
    for _ in range(40):
        cost.observe(1, 0, 0, 0.0, 0.004)
        cost.observe(1, 0, 16, 8.0, 0.004 + 16 * (A + B * 8))
    assert cost.chunk(0.01, 0) == pytest.approx(before, rel=0.05)


def test_a_machine_that_becomes_slower_is_followed() -> None:
    cost = taught()
    for _ in range(60):
        cost.observe(1, 0, 0, 0.0, 0.04)
        cost.observe(1, 0, 16, 8.0, 0.04 + 160 * (A + B * 8))
    assert cost.decoding.seconds(1) == pytest.approx(0.04, rel=0.05)
    assert cost.added(16, 0) == pytest.approx(160 * A, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 9000), st.integers(0, 600), st.floats(0, 1e5), st.floats(0, 100)),
        max_size=40,
    )
)
def test_whatever_is_measured_the_answers_are_usable(steps: list[tuple[int, int, int, float, float]]) -> None:
    cost = StepCost()
    for step in steps:
        cost.observe(*step)
    for context in (0, 100, 10**6):
        assert 0 <= cost.chunk(0.25, context) < 2**40
        assert 0 <= cost.added(512, context) < float("inf")


@given(st.lists(st.tuples(st.sampled_from((1, 1, 2, 4, 7, 9, 30, 200)), st.floats(1e-4, 1.0)), max_size=60))
def test_more_rows_never_take_less(steps: list[tuple[int, float]]) -> None:
    cost = DecodeCost()
    for rows, seconds in steps:
        cost.observe(rows, 0, seconds)
        curve = cost.curve(1, 299)
        assert curve == sorted(curve)


def test_rows_that_were_measured_often_say_what_fewer_take() -> None:
    cost = DecodeCost()
    cost.begin(0.001 * (1 + 9 * (np.array(ROWS) > 1)))
    for at in range(200):
        rows = (1, 6)[at % 2]
        cost.observe(rows, 0, 0.001 if rows == 1 else 0.0012)
    assert [cost.seconds(rows) for rows in (1, 3, 6)] == pytest.approx([0.001, 0.0012, 0.0012], rel=0.15)
    assert [cost.is_doubted(rows) for rows in (1, 3, 6, 64)] == [False, True, False, True]


def test_a_slow_moment_at_the_start_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What few rows take is measured several times even if there is no time for many."""
    now, asked = [0.0], list[int]()

    def run(runner: Any, rows: int) -> float:
        asked.append(rows)
        seconds = 0.001 * (1 + 0.1 * rows) * (5.0 if len(asked) % 7 == 3 else 1.0)
        now[0] += seconds
        return seconds

    monkeypatch.setattr(timing, "_run", run)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    runner: Any = SimpleNamespace(max_rows=100, max_logit_rows=128)
    found = timing.step_seconds(runner, ROWS, 0.08)
    assert found[:8].tolist() == pytest.approx([0.001 * (1 + 0.1 * rows) for rows in ROWS[:8]])
    assert max(asked) < 64
    assert found.tolist() == sorted(found.tolist())
    asked.clear()
    assert len(timing.step_seconds(runner, ROWS, 1.0)) == len(ROWS)
    assert max(asked) == 96


def takes(rows: int) -> float:
    """As on a CPU where a row more takes as long as the one before it."""
    return 0.008 * (1 + 0.15 * (rows - 1))


def decoded(cost: DecodeCost, rows: tuple[int, ...], num_steps: int, times: float = 1.0) -> None:
    """Steps of a machine that is so many times slower, restless, and pauses now and then, in texts of all lengths."""
    draw = np.random.default_rng(num_steps)
    for _ in range(num_steps):
        each = int(draw.choice(rows))
        pause = float(draw.choice((2, 5))) if draw.random() < 0.01 else 1.0
        cost.observe(
            each, each * int(draw.integers(1000)), takes(each) * times * pause * float(draw.lognormal(0, 0.05))
        )


def error(cost: DecodeCost, times: float = 1.0) -> float:
    return max(abs(cost.seconds(rows, 500) / takes(rows) / times - 1) for rows in ROWS)


@pytest.fixture
def begun() -> DecodeCost:
    cost = DecodeCost()
    cost.begin(np.array([takes(rows) for rows in ROWS]))
    return cost


@pytest.mark.parametrize("rows", [(1,), (1, 2, 3, 6), (4, 5, 9), (16, 17, 24)])
def test_a_restless_machine_teaches_nothing_wrong_of_other_rows(rows: tuple[int, ...], begun: DecodeCost) -> None:
    """One stream for long, and then sixteen: what these take is known still."""
    decoded(begun, rows, 3000)
    assert error(begun) < 0.1


@pytest.mark.parametrize("times", [0.6, 1.5])
def test_a_machine_that_changes_is_followed_by_all_rows(times: float, begun: DecodeCost) -> None:
    decoded(begun, (1, 2, 4), 500)
    decoded(begun, (1, 2, 4), 100, times)
    assert error(begun, times) < 0.15


def test_a_pause_in_rows_seldom_measured_is_not_their_cost(begun: DecodeCost) -> None:
    decoded(begun, (1,), 300)
    before = begun.seconds(16, 500)
    begun.observe(16, 500, 5 * before)
    decoded(begun, (1,), 50)
    assert begun.seconds(16, 500) < 1.15 * before
    for _ in range(4):  # it was no pause
        begun.observe(16, 500, 5 * before)
    decoded(begun, (1,), 50)
    assert begun.seconds(16, 500) > 3 * before
