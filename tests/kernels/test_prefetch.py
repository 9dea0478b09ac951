"""Whether weights are prefetched: what takes less time on a machine is found out, which costs next to nothing where it
was done already."""

from __future__ import annotations

import random

import pytest

_native = pytest.importorskip("specserve.kernels._native", reason="no native kernels here")


class Machine:
    """Passes of one row take 1 s without prefetching and `ratio` with, more or less, and some far longer."""

    def __init__(self, ratio: float, seed: int) -> None:
        self.choice = _native.PrefetchChoice()
        self.ratio = ratio
        self.random = random.Random(seed)

    def passes(self, number: int, rows: tuple[int, ...] = (1,)) -> list[bool]:
        """Whether each of them prefetched."""
        done = []
        for _ in range(number):
            count = self.random.choice(rows)
            done.append(self.choice.next(count))
            late = 10.0 if self.random.random() < 0.05 else 1.0
            self.choice.took(count * self.random.gauss(1.0, 0.03) * late * (self.ratio if done[-1] else 1.0))
        return done


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("ratio", "is_better"), [(0.7, True), (0.9, True), (1.1, False), (1.4, False)])
def test_what_takes_less_time_is_done(ratio: float, is_better: bool, seed: int) -> None:
    machine = Machine(ratio, seed)
    machine.passes(100)
    later = machine.passes(3000)
    assert later.count(is_better) > 0.97 * len(later)


@pytest.mark.parametrize("rows", [(1, 2, 5), (16, 16, 400)])
def test_passes_over_as_many_rows_are_compared(rows: tuple[int, ...]) -> None:
    machine = Machine(1.4, 1)
    machine.passes(300, rows)
    assert not machine.choice.is_on


def test_a_machine_that_changes_is_followed() -> None:
    machine = Machine(0.7, 3)
    machine.passes(1000)
    assert machine.choice.is_on
    machine.ratio = 1.4
    machine.passes(3000)
    assert not machine.choice.is_on


def test_a_choice_that_is_right_is_seldom_tried() -> None:
    machine = Machine(0.7, 4)
    machine.passes(2000)
    assert 4 <= machine.passes(2000).count(False) <= 20


def test_passes_over_many_rows_are_no_trials() -> None:
    """Arithmetic takes their time, and no two of them are alike."""
    machine = Machine(1.4, 5)
    assert all(machine.passes(100, (17, 400)))


def test_a_pass_that_was_not_timed_counts_for_nothing() -> None:
    choice = _native.PrefetchChoice()
    for _ in range(50):
        choice.next(1)
    assert choice.is_on
