"""Which engine a request goes to, by scripted loads and by loads that hypothesis makes up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from specserve.cluster.router import Load, Router

BLOCK = 4
IDLE = Load(num_open=0, num_waiting=0, num_places=4, step_ms=10.0, prompt_token_ms=0.5, num_blocks=100)
PROMPT = list(range(80))


def busy(num_open: int, num_waiting: int = 0, step_ms: float = 10.0) -> Load:
    return replace(IDLE, num_open=num_open, num_waiting=num_waiting, step_ms=step_ms)


def chosen(router: Router, loads: Sequence[Load | None], times: int, salt: bytes = b"") -> list[int]:
    """Where prompts that have nothing in common go."""
    return [router.choose([1000 + time] * BLOCK, salt, loads) for time in range(times)]


def test_equals_take_turns() -> None:
    assert chosen(Router(3, BLOCK), [IDLE] * 3, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert chosen(Router(3, BLOCK), [IDLE, None, IDLE], 3) == [0, 2, 0]


def test_one_that_takes_no_requests_gets_none() -> None:
    assert chosen(Router(3, BLOCK), [None, busy(4, 9), None], 3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        pytest.param([busy(3), busy(2)], 1, id="fewer-run"),
        pytest.param([busy(3, step_ms=10), busy(2, step_ms=16)], 0, id="shorter-steps"),
        pytest.param([busy(2, step_ms=0), busy(3)], 0, id="not-measured-counts-as-the-others"),
        pytest.param([busy(4), busy(3)], 1, id="a-free-place"),
        pytest.param([busy(3, 1), busy(3)], 1, id="no-queue"),
        pytest.param([busy(4, step_ms=0.1), busy(3, step_ms=99)], 1, id="a-free-place-however-slow"),
        pytest.param([busy(6, 2), busy(8, 1)], 1, id="one-that-waits-counts-as-four"),
        pytest.param([busy(6, 2), busy(10, 1)], 0, id="four-and-not-five"),
    ],
)
def test_the_load_decides(loads: list[Load], expected: int) -> None:
    assert chosen(Router(2, BLOCK), loads, 1) == [expected]


def test_a_prefix_is_worth_the_prefill_that_it_saves() -> None:
    """80 tokens of 0.5 ms are 40 ms: as much as 4 steps of 10 ms. At 4 steps it is as good to begin elsewhere."""
    router = Router(2, BLOCK)
    loads = [replace(IDLE, num_places=16), replace(IDLE, num_places=16)]
    assert router.choose(PROMPT, b"", loads) == 0
    for num_open in (0, 1, 3):
        assert router.choose(PROMPT, b"", [replace(loads[0], num_open=num_open), loads[1]]) == 0
    assert router.choose(PROMPT, b"", [replace(loads[0], num_open=5), loads[1]]) == 1
    assert router.choose(PROMPT, b"", [replace(loads[0], num_open=1), loads[1]]) == 1, "now both have it"


def test_a_prefix_does_not_draw_requests_into_a_queue() -> None:
    """However long it is."""
    router = Router(2, BLOCK)
    dear = [replace(IDLE, prompt_token_ms=1e6)] * 2
    assert router.choose(PROMPT, b"", dear) == 0
    assert router.choose(PROMPT, b"", [replace(dear[0], num_open=4), replace(dear[1], num_open=3)]) == 1


def test_only_whole_blocks_and_the_same_salt_and_adapter_are_a_prefix() -> None:
    def again(ids: list[int], salt: bytes = b"", adapter: str = "") -> int:
        """Where it goes after PROMPT went to 0 and something else to 1, so that 0 has the next turn."""
        router = Router(3, BLOCK)
        assert router.choose(PROMPT, b"", [IDLE] * 3) == 0
        return router.choose(ids, salt, [IDLE] * 3, adapter)

    assert again([*PROMPT[:BLOCK], 7]) == 0
    assert again(PROMPT[: BLOCK - 1]) == 1, "less than a block"
    assert again([99, *PROMPT[1:]]) == 1, "another beginning"
    assert again(PROMPT, salt=b"x") == 1
    assert again(PROMPT, adapter="f" * 64) == 1


def test_what_is_remembered_is_bounded_and_lost_from_the_end() -> None:
    router = Router(2, BLOCK)
    small = [replace(IDLE, num_blocks=3)] * 2
    assert router.choose(PROMPT, b"", small) == 0  # 20 blocks, of which 3 fit
    assert len(router._known[0]) == 3
    assert router.choose([5] * 8 * BLOCK, b"", small) == 1
    assert router.choose(PROMPT[: 2 * BLOCK], b"", [None, small[1]]) == 1
    assert [len(known) for known in router._known] == [3, 3]
    assert router.choose(PROMPT[: 3 * BLOCK], b"", small) == 0, "the first three of the one, the first two of the other"


def test_without_a_prefix_cache_there_are_no_prefixes() -> None:
    router, none = Router(2, BLOCK), [replace(IDLE, num_blocks=0)] * 2
    assert [router.choose(PROMPT, b"", none) for _ in range(3)] == [0, 1, 0]


def test_an_engine_whose_caches_are_empty_is_no_better_than_others() -> None:
    router = Router(2, BLOCK)
    assert router.choose(PROMPT, b"", [IDLE] * 2) == 0
    router.forget(0)
    assert router.choose(PROMPT, b"", [IDLE] * 2) == 1


def test_a_tenant_stays_where_it_was_while_that_costs_nothing() -> None:
    router = Router(3, BLOCK)
    assert chosen(router, [IDLE] * 3, 3, b"a") == [0, 0, 0]
    assert chosen(router, [IDLE] * 3, 3, b"b") == [1, 1, 1]
    assert chosen(router, [busy(1), IDLE, IDLE], 1, b"a") == [2]
    assert chosen(router, [IDLE] * 3, 1, b"a") == [2], "what was learned last"
    for number in range(5000):
        router.choose([], number.to_bytes(2, "big") + b"!", [IDLE] * 3)
    assert len(router._homes) <= 4096


def test_long_prompts_take_a_bounded_time() -> None:
    router = Router(2, BLOCK)
    assert len(router._digests(range(10**6), b"", "")) == 512


LOADS = st.builds(
    lambda num_open, num_waiting, num_places, step_ms, token_ms, num_blocks: Load(
        num_open, min(num_waiting, num_open), num_places, step_ms, token_ms, num_blocks
    ),
    *(st.integers(0, 9), st.integers(0, 3), st.integers(1, 6)),
    *(st.floats(0, 1e4), st.floats(0, 1e3), st.integers(0, 30)),
)
PROMPTS = st.lists(st.integers(0, 1), max_size=5 * BLOCK)


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.sampled_from([b"", b"a", b"b"]), st.lists(LOADS | st.none(), min_size=3))))
def test_nobody_waits_while_an_engine_has_a_place(requests: list[tuple[list[int], bytes, list[Load | None]]]) -> None:
    """Whatever the loads are and whatever went where: one that takes requests is chosen, and a full one only where all
    are full."""
    router = Router(3, BLOCK)
    for prompt, salt, loads in requests:
        loads = loads[:3]
        taking = [load for load in loads if load is not None]
        if not taking:
            continue
        found = loads[router.choose(prompt, salt, loads)]
        assert found is not None
        assert not found.is_full or all(load.is_full for load in taking)


@pytest.mark.parametrize("seed", range(3))
def test_work_is_conserved(seed: int) -> None:
    """Requests of one tenant, half of them with one long prefix, come and end at random for a while: at no moment does
    one wait that came while another engine had a place, and in all each engine gets a fair share."""
    random_, router, num_open, total = random.Random(seed), Router(4, BLOCK), [0] * 4, [0] * 4
    for turn in range(4000):
        if random_.random() < 0.55:
            loads = [
                replace(IDLE, num_open=count, num_waiting=max(0, count - IDLE.num_places), prompt_token_ms=5.0)
                for count in num_open
            ]
            had_place = [engine for engine in range(4) if num_open[engine] < IDLE.num_places]
            prompt = PROMPT if random_.random() < 0.5 else [turn + 100] * 40
            engine = router.choose(prompt, b"tenant", loads)
            assert engine in (had_place or range(4))
            num_open[engine] += 1
            total[engine] += 1
        for engine in range(4):
            if num_open[engine] and random_.random() < 0.03 * min(num_open[engine], IDLE.num_places):
                num_open[engine] -= 1
    assert min(total) > 0.6 * max(total), total
