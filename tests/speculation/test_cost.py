"""The measured cost of steps: what is learned of it, and how much of a prompt fits into a time."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from specserve.speculation.cost import DecodeCost, StepCost

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
