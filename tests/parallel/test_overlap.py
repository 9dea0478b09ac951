"""How many steps are under way: as many as a clock shows to be best, on stages whose times are known."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from specserve.parallel.overlap import Overlap
from specserve.runtime.cost import ROWS, DecodeCost

STEP_S, ROW_S = 0.004, 0.001


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(time, "perf_counter", clock := Clock())
    return clock


def alone(rows: float) -> float:
    return STEP_S + ROW_S * rows


def make(most: int) -> Overlap:
    cost = DecodeCost()
    cost.begin(np.array([alone(rows) for rows in ROWS]))
    return Overlap(cost, most)


def run(
    clock: Clock,
    overlap: Overlap,
    num_seqs: int,
    gain: Callable[[int], float],
    num_steps: int = 1000,
    chunk_s: float = 0.0,
) -> tuple[float, list[int]]:
    """Seconds of a round of all sequences, on average, and how many steps were under way; of so many at once each takes
    that part of its time alone."""
    begun, rounds, chosen = clock.now, 0.0, list[int]()
    for _ in range(num_steps):
        num = overlap.choose(num_seqs, 0, chunk_s)
        parts = min(num, max(num_seqs, 1))
        rows = round(num_seqs / parts)
        seconds = (alone(rows) if num_seqs else 0.0) + chunk_s / num
        clock.now += seconds / gain(num)
        overlap.ended(rows, rows, seconds, seconds, num == 1)
        rounds += 1 / num
        chosen.append(num)
    return (clock.now - begun) / rounds, chosen


@pytest.mark.parametrize(
    ("most", "num_seqs", "best", "gain"),
    [
        (2, 8, 2, lambda num: max(1.0, 0.9 * num)),  # 12 ms, or twice 8 / 1.8
        (2, 8, 1, lambda num: 1.2 if num > 1 else 1.0),  # and twice 8 / 1.2
        (2, 8, 1, lambda num: 0.5 if num > 1 else 1.0),  # all stages have the same cores
        (2, 2, 1, lambda num: max(1.0, 0.8 * num)),  # 6 ms, or twice 5 / 1.6
        (4, 16, 4, lambda num: max(1.0, 0.8 * num)),
        (4, 16, 2, lambda num: {1: 1.0, 2: 1.9, 3: 2.0, 4: 1.9}[num]),
    ],
)
def test_as_many_are_under_way_as_is_best(
    clock: Clock, most: int, num_seqs: int, best: int, gain: Callable[[int], float]
) -> None:
    overlap = make(most)
    seconds, chosen = run(clock, overlap, num_seqs, gain)
    expected = best * alone(num_seqs / best) / gain(best)
    assert seconds <= 1.05 * expected, "trials included"
    assert max(set(chosen), key=chosen.count) == best
    assert overlap.num in chosen and overlap.gain >= 1.0


def test_one_stream_is_one_step_at_a_time(clock: Clock) -> None:
    assert set(run(clock, make(4), 1, lambda num: float(num), 50)[1]) == {1}
    assert set(run(clock, make(1), 8, lambda num: float(num), 50)[1]) == {1}


def test_a_prompt_alone_has_a_chunk_in_every_stage(clock: Clock) -> None:
    _, chosen = run(clock, make(2), 0, lambda num: max(1.0, 0.8 * num), 50, chunk_s=0.25)
    assert set(chosen[:5]) == {1} and set(chosen[5:]) == {2}, "once it is known what a step takes"
    _, chosen = run(clock, make(2), 0, lambda num: 0.9 if num > 1 else 1.0, 300, chunk_s=0.25)
    assert chosen.count(1) > 270, "where it is slower it is tried, and not for long"


def test_what_has_become_better_is_found(clock: Clock) -> None:
    overlap = make(2)
    assert run(clock, overlap, 8, lambda num: 1.0, 300)[1].count(1) > 250
    assert run(clock, overlap, 8, lambda num: max(1.0, 0.95 * num), 400)[1].count(2) > 100
    assert overlap.gain > 1.2


def test_steps_beside_others_count_as_what_they_take_alone(clock: Clock) -> None:
    """Where stages share cores each takes longer; the costs that drafts are weighed by keep to one step at a time."""
    overlap = make(2)
    believed = []
    for i in range(60):
        clock.now += 0.008
        believed.append(overlap.ended(4, 4, alone(4), 2 * alone(4) * (1.25 if i % 2 else 0.75), False))
    assert believed[-1] == pytest.approx(1.25 * alone(4), rel=0.1)
    assert believed[-2] == pytest.approx(0.75 * alone(4), rel=0.1)
    assert overlap.ended(8, 8, alone(8), 0.015, True) == 0.015


def test_time_without_work_is_no_steps(clock: Clock) -> None:
    overlap = make(2)
    run(clock, overlap, 8, lambda num: max(1.0, 0.9 * num), 100)
    overlap.pause()
    clock.now += 1000.0
    assert set(run(clock, overlap, 8, lambda num: max(1.0, 0.9 * num), 100)[1]) == {2}
