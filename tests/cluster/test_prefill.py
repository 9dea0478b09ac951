"""When a prompt is worth sending elsewhere, by what transfers cost."""

from __future__ import annotations

from specserve.cluster.prefill import TransferCost, Ways
from specserve.cluster.router import Load, Router


def test_before_a_measurement_long_prompts_go_and_short_ones_stay() -> None:
    cost = TransferCost()
    assert not cost.pays(1000, 0.0), "an engine that has not measured its prompts"
    assert not cost.pays(100, 0.1)
    assert cost.pays(1000, 0.1)


def test_costs_are_those_that_were_measured() -> None:
    cost = TransferCost()
    cost.observe(1000, 50.0)
    cost.observe(100, 8.0)
    assert cost.milliseconds(10) == 8.0, "no fewer than the shortest took"
    assert 50 < cost.milliseconds(1000) < 60
    for _ in range(100):
        cost.observe(1000, 200.0)
    assert 199 < cost.milliseconds(1000) < 201, "old ones fade"
    assert cost.pays(1000, 0.3)
    assert not cost.pays(1000, 0.1)


def test_a_transfer_that_was_slow_once_is_tried_again() -> None:
    cost = TransferCost()
    cost.observe(100, 1e4)
    assert sum(not cost.pays(1000, 1.0) for _ in range(1000)) in range(300, 600)


def test_the_router_says_what_is_not_cached() -> None:
    router = Router(2, 4)
    load = Load(0, num_blocks=100)
    router.choose(range(10), b"", [load, None])
    assert router.num_uncached == 10
    router.choose(range(11), b"", [load, None])
    assert router.num_uncached == 3
    router.choose(range(11), b"", [None, load])
    assert router.num_uncached == 11


def test_a_way_that_fails_again_and_again_is_left_alone_for_longer_and_longer() -> None:
    now = 0.0
    ways = Ways(lambda: now)
    ways.failed(0, 1)
    assert ways.is_open(0, 1), "once may be chance"
    for pause in (1, 2, 4, 8, 16, 30, 30):
        ways.failed(0, 1)
        assert not ways.is_open(0, 1) and ways.is_open(1, 0) and ways.is_open(2, 1)
        now += pause - 0.5
        assert not ways.is_open(0, 1)
        now += 0.5
        assert ways.is_open(0, 1)
    ways.succeeded(0, 1)
    ways.failed(0, 1)
    assert ways.is_open(0, 1)
    ways.failed(0, 1)
    ways.forget(2)
    assert not ways.is_open(0, 1)
    ways.forget(1)
    assert ways.is_open(0, 1), "it is another engine"
