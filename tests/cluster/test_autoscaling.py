"""How many engines there should be, look after look."""

from __future__ import annotations

from hypothesis import given, strategies as st

from specserve.cluster.autoscaling import Autoscaler, Scaling
from specserve.cluster.router import Load

SCALING = Scaling(least=1, most=4, target_ms=1000, up_s=3, down_s=60)


def looks(autoscaler: Autoscaler, waits: list[float], num_engines: int, times: range) -> list[int]:
    return [autoscaler.wanted(float(now), waits, num_engines) for now in times]


def test_there_are_more_once_they_have_been_too_few_for_a_while() -> None:
    assert looks(Autoscaler(SCALING), [2500], 1, range(5)) == [1, 1, 1, 3, 1]


def test_a_moment_in_which_there_is_enough_begins_the_while_anew() -> None:
    autoscaler = Autoscaler(SCALING)
    assert looks(autoscaler, [2500], 1, range(3)) == [1] * 3
    assert looks(autoscaler, [900], 1, range(3, 4)) == [1]
    assert looks(autoscaler, [2500], 1, range(4, 8)) == [1, 1, 1, 3]


def test_only_as_many_are_started_as_were_needed_all_the_while() -> None:
    autoscaler = Autoscaler(SCALING)
    assert looks(autoscaler, [3500], 1, range(3)) == [1] * 3
    assert looks(autoscaler, [1500], 1, range(3, 4)) == [2]


def test_there_are_fewer_once_they_have_been_too_many_for_longer() -> None:
    found = looks(Autoscaler(SCALING), [100, 100, 100], 3, range(62))
    assert found == [3] * 60 + [1, 3]


def test_as_many_stay_as_the_busiest_moment_needed() -> None:
    autoscaler = Autoscaler(SCALING)
    looks(autoscaler, [0, 0, 0, 0], 4, range(30))
    looks(autoscaler, [500, 500, 500, 500], 4, range(30, 31))
    assert looks(autoscaler, [0, 0, 0, 0], 4, range(31, 61))[-1] == 2


def test_engines_that_do_not_take_requests_yet_count() -> None:
    """Two are needed, one of two is being started: there is no third."""
    assert set(looks(Autoscaler(SCALING), [1500], 2, range(100))) == {2}


@given(st.lists(st.lists(st.floats(0, 1e6), max_size=5), min_size=1, max_size=40), st.integers(1, 3), st.integers(0, 3))
def test_there_are_never_more_or_fewer_than_allowed(waits: list[list[float]], least: int, more: int) -> None:
    autoscaler, num_engines = Autoscaler(Scaling(least, least + more, 1000, 3, 6)), least
    for now, each in enumerate(waits):
        num_engines = autoscaler.wanted(float(now), each, num_engines)
        assert least <= num_engines <= least + more


def test_what_waits_counts_as_four_steps() -> None:
    assert Load(num_open=6, num_waiting=2, step_ms=10).wait_ms == 10 * (4 + 2 * 4)
    assert Load(num_open=6, num_waiting=2, step_ms=10, backlog_ms=5).wait_ms == 125
    assert Load(num_open=6, num_waiting=2).wait_ms == 0
