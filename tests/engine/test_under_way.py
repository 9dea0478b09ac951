"""Several steps under way at once, on an executor that computes each as late as may be: what is generated stays what it
is in one step at a time, whatever ends, fails or lacks memory meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.packed import Packed
from specserve.engine.request import Request
from specserve.runtime.executor import local
from specserve.speculation.host import DraftHost
from specserve.structured.base import Grammar
from specserve.testing import ScriptedDrafter, check_integrity, check_under_way, write_tiny_model
from specserve.types import SamplingParams
from tests.engine.beams import beams
from tests.engine.lagging import Lagging, overlap_always
from tests.engine.test_engine import GREEDY, block_bytes, finish, ids, make as make_alone, prompt, requests, scripted

Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def wishes() -> list[Request]:
    """Greedy and drawn, several completions, scored prompts, beams."""
    scored = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    several = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True)
    others = [("scored", scored), ("several", several), ("beams", beams(3, ignore_eos=True))]
    return requests(6) + [Request(id=n, prompt_ids=prompt(6 + i, 40), params=p) for i, (n, p) in enumerate(others)]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Tokens:
    """Of one step at a time, one request after the other, without drafts."""
    engine, found = make_alone(tiny, prefix_caching=False), {}
    for request in [*requests(16), *wishes()[6:]]:
        found |= drive(engine, [request])
    return found


def make(
    tiny: Path,
    most: int = 3,
    own: ScriptedDrafter | None = None,
    blocks: int | None = None,
    seed: int | None = None,
    **options: Any,
) -> Engine:
    """Of so many steps at once; with `seed` of any number up to that. `blocks` sizes the KV cache."""
    settings = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "drafter": "none", "adaptive": False}
    if blocks is not None:
        settings["kv_cache_gib"] = blocks * block_bytes(make_alone(tiny)) / 2**30
    config = EngineConfig(model=str(tiny), **{**settings, **options})
    engine = build(config, connect=lambda local: Lagging(local, most)).engine
    overlap_always(engine, seed)
    if own is not None:
        engine.use(DraftHost(own, engine.limits.vocab_size, 10.0), 5)
    return engine


def drive(engine: Engine, some: list[Request], num_steps: int = 10**6, grammar: Grammar | None = None) -> Tokens:
    """All that comes of them, or of so many steps; every invariant is checked after every step. `grammar` is of those
    that ask for one."""
    tokens: Tokens = {}
    for request in some:
        engine.add(request, None if request.params.structured is None else grammar)
    while engine.has_work and num_steps:
        for event in engine.step():
            assert event.error is None
            tokens.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check(engine)
        num_steps -= 1
    return tokens


def check(engine: Engine) -> None:
    check_integrity(engine.cache, engine.scheduler.running)
    check_under_way(engine.scheduler)


def check_idle(engine: Engine) -> None:
    assert not engine.has_work and not engine.requests and not engine.scheduler.under_way
    assert engine.cache.num_free == engine.cache.num_blocks


@pytest.mark.parametrize("drafting", [None, {"accuracy": 0.7}, {"accuracy": 0.8, "decoys": 2}])
@pytest.mark.parametrize("most", [2, 3])
def test_what_is_generated_does_not_depend_on_how_many_are_under_way(
    tiny: Path, alone: Tokens, most: int, drafting: dict[str, Any] | None
) -> None:
    drafter = None if drafting is None else scripted(alone, **drafting)
    engine = make(tiny, most, drafter, max_num_batched_tokens=24, blocks=26)
    found, most_seen = {}, 0
    for request in wishes():
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            found.setdefault((event.request_id, event.index), []).extend(event.tokens)
        most_seen = max(most_seen, 1 + len(engine.scheduler.under_way))
        check(engine)
    assert found == {key: tokens for key, tokens in alone.items() if key in found}
    assert len(found) == 6 + 1 + 3 + 3 and most_seen == most
    assert engine.counters.num_preemptions > 0, "the cache was to be too small"
    check_idle(engine)
    assert drafter is None or (drafter.num_accepted > 20 and engine.policy.num_dropped == 0)


@settings(max_examples=min(25, settings().max_examples))
@given(data=st.data())
def test_any_order_of_arrivals_and_aborts_keeps_the_invariants(tiny: Path, alone: Tokens, data: st.DataObject) -> None:
    """Blocks of what is aborted while it is under way go to others at once, and these are not harmed."""
    drafter = scripted(alone, accuracy=0.7, decoys=data.draw(st.sampled_from([0, 2])))
    most, seed = data.draw(st.integers(2, 4)), data.draw(st.none() | st.integers(0, 99))
    engine = make(tiny, most, drafter, data.draw(st.integers(22, 34)), seed, max_num_batched_tokens=24)
    coming, found, aborted = data.draw(st.permutations(wishes())), Tokens(), set[str]()
    while coming or engine.has_work:
        if coming and (not engine.has_work or data.draw(st.booleans())):
            engine.add(coming.pop())
        if engine.requests and data.draw(st.integers(0, 5)) == 0:
            aborted.add(victim := data.draw(st.sampled_from(sorted(engine.requests))))
            engine.abort(victim)
            check(engine)
        for event in engine.step() if engine.has_work else ():
            assert event.error is None
            found.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check(engine)
    check_idle(engine)
    assert not drafter.live
    for key, tokens in found.items():
        assert tokens == alone[key] or (key[0] in aborted and tokens == alone[key][: len(tokens)])


def test_chunks_of_a_prompt_follow_each_other_at_once(tiny: Path) -> None:
    """So that every stage has one; where it is cut does not change what is said of it."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    asked = Request(id="long", prompt_ids=prompt(2, 150), params=params)
    whole = make_alone(tiny)
    whole.add(asked)
    expected = finish(whole)
    engine = make(tiny, max_num_batched_tokens=20)
    engine.add(asked)
    (seq,) = engine.requests["long"]
    assert engine.step() == []
    assert [[(each.start, each.num_new) for each in step.seqs] for step in engine.scheduler.under_way] == [
        [(20, 20)],
        [(40, 20)],
    ]
    assert (seq.cached, seq.under_way) == (20, 40)
    events = finish(engine)
    assert ids(events, "long") == ids(expected, "long")
    assert list(Packed(events[0].prompt_logprobs or ())) == list(Packed(expected[0].prompt_logprobs or ()))
    assert len(Packed(events[0].prompt_logprobs or ())) == 150


def test_who_decodes_is_divided_and_one_stream_never_waits_for_itself(tiny: Path) -> None:
    engine = make(tiny, 2)
    for request in requests(5):
        engine.add(request)
    drive(engine, [], 3)
    sizes = []
    while len(engine.requests) == 5:
        engine.step()
        sizes.append(len(engine.scheduler.under_way[0].seqs) if engine.scheduler.under_way else 0)
    assert set(sizes[2:-2]) == {2, 3}
    drive(engine, [])
    engine.add(Request(id="one", prompt_ids=prompt(1), params=GREEDY))
    engine.step()
    while engine.has_work:
        engine.step()
        assert not engine.scheduler.under_way, "its next token hangs on this one"


def test_what_is_aborted_under_way_is_spoken_of_no_more(tiny: Path, alone: Tokens) -> None:
    drafter = scripted(alone, accuracy=0.8)
    engine = make(tiny, 2, drafter)
    drive(engine, requests(4), 6)
    under_way = [each.seq.request_id for step in engine.scheduler.under_way for each in step.seqs]
    assert under_way
    for name in set(under_way):
        (event,) = engine.abort(name)
        assert event.finish_reason == "abort"
    check(engine)
    assert not {event.request_id for _ in range(2) for event in engine.step()} & set(under_way)
    left = {f"r{i}" for i in range(4)} - set(under_way)
    assert drive(engine, []).keys() <= {(name, 0) for name in left}
    check_idle(engine)
    assert drive(engine, requests(4)) == {key: alone[key] for key in [(f"r{i}", 0) for i in range(4)]}


def test_a_step_that_is_left_halfway_was_never_begun(
    tiny: Path, alone: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tiny)
    found = drive(engine, requests(5), 4)
    assert engine.scheduler.under_way

    def cut_off(self: Any, masks: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Lagging, "finish", cut_off)
        engine.step()
    check(engine)
    assert not engine.scheduler.under_way and all(not seq.under_way for seq in engine.scheduler.running)
    for key, tokens in drive(engine, []).items():
        found.setdefault(key, []).extend(tokens)
    assert found == {key: alone[key] for key in found} and len(found) == 5


def test_another_drafter_waits_for_what_is_under_way(tiny: Path, alone: Tokens) -> None:
    engine = make(tiny)
    drive(engine, requests(5), 4)
    for i in range(5):
        engine.abort(f"r{i}")
    assert engine.scheduler.under_way
    engine.use(DraftHost(drafter := scripted(alone, accuracy=0.9), engine.limits.vocab_size, 10.0), 5)
    check_idle(engine)
    assert drive(engine, requests(3)) == {(f"r{i}", 0): alone[f"r{i}", 0] for i in range(3)}
    assert drafter.num_accepted > 10


def test_drafts_are_weighed_by_their_own_steps(tiny: Path, alone: Tokens) -> None:
    """What a step was expected to cost is not taken for what the next one is, which has begun when it ends."""
    engine = make(tiny, 2, drafter="ngram", adaptive=True, max_num_batched_tokens=48)
    loads: list[tuple[int, int]] = []
    assert engine.drafting.weighing is not None
    took = engine.drafting.weighing.planner.guard.took

    def noted(load: Any, drafted: int, *others: Any) -> None:
        loads.append((load.rows, load.tokens))
        took(load, drafted, *others)

    engine.drafting.weighing.planner.guard.took = noted  # type: ignore[method-assign]
    begun = engine.scheduler.begin
    expected: list[tuple[int, int]] = []

    def note(step: Any) -> None:
        decoding = len(step.decoding)
        expected.append((decoding, sum(each.num_new for each in step.seqs) - decoding))
        begun(step)

    engine.scheduler.begin = note  # type: ignore[method-assign]
    assert drive(engine, requests(7)) == {(f"r{i}", 0): alone[f"r{i}", 0] for i in range(7)}
    assert loads == expected and len(set(loads)) > 3


def test_one_step_at_a_time_is_all_that_this_process_takes(tiny: Path) -> None:
    engine = make_alone(tiny)
    assert local(engine.executor).most_under_way == 1 and engine.scheduler.overlap.most == 1
    for request in requests(6):
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert not engine.scheduler.under_way and all(not seq.under_way for seq in engine.scheduler.running)
