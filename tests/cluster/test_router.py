"""Which engine a request goes to, by scripted loads and by loads that hypothesis makes up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from specserve.cluster.router import Load, Router

BLOCK = 4
IDLE = Load(num_open=0, num_waiting=0, step_ms=10.0, prompt_token_ms=0.5, num_blocks=100)
PROMPT = list(range(80))


def busy(num_open: int, num_waiting: int = 0, step_ms: float = 10.0) -> Load:
    return replace(IDLE, num_open=num_open, num_waiting=num_waiting, step_ms=step_ms)


def chosen(router: Router, loads: Sequence[Load | None], times: int, salt: bytes = b"") -> list[int]:
    """Where prompts that have nothing in common go, each of which is computed before the next one comes."""
    found = []
    for time in range(times):
        now = [None if load is None else replace(load, num_steps=load.num_steps + 2 * time) for load in loads]
        found.append(router.choose([1000 + time] * BLOCK, salt, now))
    return found


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
        pytest.param([busy(3, 1), busy(3)], 1, id="no-queue"),
        pytest.param([replace(busy(1), backlog_ms=11), busy(2)], 1, id="prompts-that-come-first"),
        pytest.param([replace(busy(1), backlog_ms=9), busy(2)], 0, id="fewer-prompts-than-a-step"),
        pytest.param([busy(6, 2), busy(8, 1)], 1, id="one-that-waits-counts-as-four"),
        pytest.param([busy(6, 2), busy(10, 1)], 0, id="four-and-not-five"),
    ],
)
def test_the_load_decides(loads: list[Load], expected: int) -> None:
    assert chosen(Router(2, BLOCK), loads, 1) == [expected]


def at(num_steps: int, *nums_open: int, **more: float) -> list[Load]:
    """Loads of engines after so many steps."""
    return [replace(IDLE, num_open=num_open, num_steps=num_steps, **more) for num_open in nums_open]


def test_a_prefix_is_worth_the_prefill_that_it_saves() -> None:
    """80 tokens of 0.5 ms are 40 ms, and as many wait for them as 0.3 of the completions that an engine has on average:
    with 10 and 0 that is 2.5 times 40 ms, so much as 10 steps of 10 ms."""
    router = Router(2, BLOCK)
    assert router.choose(PROMPT, b"", at(0, 0, 0)) == 0
    for steps, num_open in ((2, 1), (4, 5), (6, 9)):
        assert router.choose(PROMPT, b"", at(steps, num_open, 0)) == 0
    assert router.choose(PROMPT, b"", at(8, 11, 0)) == 1
    assert router.choose(PROMPT, b"", at(10, 1, 0)) == 1, "now both have it"


def test_what_tokens_read_counts() -> None:
    """The last 8 of 80 tokens read 76 each, all of them 40: 0.1 x 8 x 76 = 60.8 ms, and 0.1 x 80 x 40 = 320."""
    router, more = Router(2, BLOCK), {"prompt_token_ms": 0.0, "context_token_ms": 0.1, "step_ms": 100.0}
    assert router.choose(PROMPT[:72], b"", at(0, 0, 0, **more)) == 0
    weight = 1 + 0.3 * 1.0
    assert (320 - 60.8) * weight > 200
    assert router.choose(PROMPT, b"", at(2, 2, 0, **more)) == 0
    assert router.choose([*PROMPT[:36], *[7] * 44], b"", at(4, 2, 0, **more)) == 1, "36 of 80 save 64 of 320 ms"


def test_prompts_that_the_engine_has_not_told_of_count() -> None:
    """An idle engine tells of a prompt after its next step; one that runs a step reads it only after that."""
    router, idle, runs = Router(2, BLOCK), at(5, 0, 0), at(5, 1, 1)
    router.choose([1] * 40, b"", [idle[0], None])
    assert router.choose([2] * 4, b"", idle) == 1
    assert router.choose([3] * 4, b"", [at(6, 0)[0], None]) == 0
    assert router._unseen_ms(0, at(6, 0)[0]) == 2.0, "the last one's 4 tokens"
    assert router._unseen_ms(0, at(7, 0)[0]) == 0.0
    router.choose([4] * 40, b"", [None, runs[1]])
    assert router._unseen_ms(1, at(6, 1)[0]) == 20.0
    assert router._unseen_ms(1, at(7, 1)[0]) == 0.0
    router.choose([5] * 40, b"", [None, runs[1]])
    router.forget(1)
    assert router._unseen_ms(1, at(0, 0)[0]) == 0.0, "another process counts from 0"


def test_a_load_is_what_the_engine_said_and_what_was_sent_since() -> None:
    after = Load.after(3, 2, (0.01, 0.001, 1e-6, 0.5), num_open=9, num_places=4, num_blocks=7)
    assert after == Load(9, 5, 10.0, 1.0, 1e-3, 500.0, 3, 7)
    assert Load.after(0, 2, (0.0,) * 4, num_open=1, num_places=4, num_blocks=7).num_waiting == 1


def test_only_whole_blocks_and_the_same_salt_and_adapter_are_a_prefix() -> None:
    def again(ids: list[int], salt: bytes = b"", adapter: str = "") -> int:
        """Where it goes after PROMPT went to 0 and something else to 1, so that 0 has the next turn."""
        router = Router(3, BLOCK)
        assert router.choose(PROMPT, b"", [IDLE] * 3) == 0
        return router.choose(ids, salt, at(2, 0, 0, 0), adapter)

    assert again([*PROMPT[:BLOCK], 7]) == 0
    assert again(PROMPT[: BLOCK - 1]) == 1, "less than a block"
    assert again([99, *PROMPT[1:]]) == 1, "another beginning"
    assert again(PROMPT, salt=b"x") == 1
    assert again(PROMPT, adapter="f" * 64) == 1


def test_what_is_remembered_is_bounded_and_lost_from_the_end() -> None:
    router = Router(2, BLOCK)
    assert router.choose(PROMPT, b"", at(0, 0, 0, num_blocks=3)) == 0  # 20 blocks, of which 3 fit
    assert len(router._known[0]) == 3
    assert router.choose([5] * 8 * BLOCK, b"", at(2, 0, 0, num_blocks=3)) == 1
    assert router.choose(PROMPT[: 2 * BLOCK], b"", [None, at(4, 0, num_blocks=3)[0]]) == 1
    assert [len(known) for known in router._known] == [3, 3]
    least = at(6, 0, 0, num_blocks=3)
    assert router.choose(PROMPT[: 3 * BLOCK], b"", least) == 0, "the first three of the one, the first two of the other"


def test_without_a_prefix_cache_there_are_no_prefixes() -> None:
    router = Router(2, BLOCK)
    assert [router.choose(PROMPT, b"", at(2 * time, 0, 0, num_blocks=0)) for time in range(3)] == [0, 1, 0]


def test_an_engine_whose_caches_are_empty_is_no_better_than_others() -> None:
    router = Router(2, BLOCK)
    assert router.choose(PROMPT, b"", [IDLE] * 2) == 0
    router.forget(0)
    assert router.choose(PROMPT, b"", [IDLE] * 2) == 1


def test_a_tenant_stays_where_it_was_while_that_costs_nothing() -> None:
    router = Router(3, BLOCK)
    assert chosen(router, at(0, 0, 0, 0), 3, b"a") == [0, 0, 0]
    assert chosen(router, at(10, 0, 0, 0), 3, b"b") == [1, 1, 1]
    assert chosen(router, at(20, 1, 0, 0), 1, b"a") == [2]
    assert chosen(router, at(30, 0, 0, 0), 1, b"a") == [2], "what was learned last"
    for number in range(5000):
        router.choose([], number.to_bytes(2, "big") + b"!", [IDLE] * 3)
    assert len(router._homes) <= 4096


def test_long_prompts_take_a_bounded_time() -> None:
    router = Router(2, BLOCK)
    assert len(router._digests(range(10**6), b"", "")) == 512


LOADS = st.builds(
    lambda num_open, num_waiting, **more: Load(num_open, min(num_waiting, num_open), **more),
    *(st.integers(0, 9), st.integers(0, 3)),
    step_ms=st.floats(0, 1e4),
    prompt_token_ms=st.floats(0, 1e3),
    context_token_ms=st.floats(0, 1.0),
    backlog_ms=st.floats(0, 1e4),
    num_steps=st.integers(0, 9),
    num_blocks=st.integers(0, 30),
)
PROMPTS = st.lists(st.integers(0, 1), max_size=5 * BLOCK)


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPTS, st.sampled_from([b"", b"a", b"b"]), st.lists(LOADS | st.none(), min_size=3))))
def test_one_that_takes_requests_is_chosen(requests: list[tuple[list[int], bytes, list[Load | None]]]) -> None:
    """Whatever the loads are and whatever went where."""
    router = Router(3, BLOCK)
    for prompt, salt, loads in requests:
        if any(loads[:3]):
            assert loads[router.choose(prompt, salt, loads[:3])] is not None


@settings(deadline=None)
@given(PROMPTS, st.lists(LOADS, min_size=3, max_size=3))
def test_none_is_passed_over_that_is_better_in_all(prompt: list[int], loads: list[Load]) -> None:
    """Where no prefix is known: with fewer completions, no more of which wait, and no longer steps nor backlog."""
    loads = [replace(load, step_ms=load.step_ms + 1.0) for load in loads]
    got = loads[Router(3, BLOCK).choose(prompt, b"", loads)]
    for load in loads:
        is_better = load.num_open < got.num_open and load.num_waiting <= got.num_waiting
        assert not (is_better and load.step_ms <= got.step_ms and load.backlog_ms <= got.backlog_ms)


@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_draws_no_more_than_it_saves(seed: int) -> None:
    """Requests of one tenant, half of them with one long prefix, come and end at random for a while: what more of steps
    an engine has that is chosen than another is at most what its prefix saves, and each engine gets a fair share."""
    random_, router, num_open, total, places = random.Random(seed), Router(4, BLOCK), [0] * 4, [0] * 4, 4
    for turn in range(4000):
        if random_.random() < 0.55:
            loads = [
                replace(IDLE, num_open=count, num_waiting=max(0, count - places), num_steps=2 * turn)
                for count in num_open
            ]
            prompt = PROMPT if random_.random() < 0.5 else [turn + 100] * 40
            engine = router.choose(prompt, b"tenant", loads)
            steps = [load.num_open + 3 * load.num_waiting for load in loads]
            saved = 0.5 * len(PROMPT) * (1 + 0.3 * sum(num_open) / 4) if prompt is PROMPT else 0.0
            assert 10.0 * (steps[engine] - min(steps)) <= saved
            num_open[engine] += 1
            total[engine] += 1
        for engine in range(4):
            if num_open[engine] and random_.random() < 0.03 * min(num_open[engine], places):
                num_open[engine] -= 1
    assert min(total) > 0.6 * max(total), total
