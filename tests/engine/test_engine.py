"""The whole engine on tiny random models: what is generated never depends on company, drafters, memory or chunking."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from specserve import registry
from specserve.bench.drive import NoTarget
from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.packed import Packed
from specserve.engine.request import Request
from specserve.errors import ConfigError, InputError, PromptTooLongError
from specserve.runtime.cost import ROWS, DecodeCost
from specserve.runtime.executor import local
from specserve.sampling.bad_words import of_ids
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.guard import Guard
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import makers, prepare
from specserve.testing import ScriptedDrafter, check_integrity, tiny_config, write_tiny_model
from specserve.types import Draft, Event, SamplingParams

VOCAB = tiny_config("llama")["vocab_size"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def create(name: str) -> Any:
    """A drafter with its default options, of those that need no target."""
    make = prepare(name, {})
    return None if make is None else make(cast(Any, NoTarget()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


def make(tiny: Path, drafter: Any = None, k: int = 5, blocks: int | None = None, **options: Any) -> Engine:
    """An engine on the tiny model; `blocks` sizes the KV cache exactly, null block included. No chunk ends by the
    clock, so that a run can be repeated."""
    defaults = {"dtype": "float32", "max_model_len": 160, "num_speculative_tokens": k, "max_step_ms": 1e9}
    options = {**defaults, "drafter": "none", "adaptive": False, **options}
    engine = build(EngineConfig(model=str(tiny), **options)).engine
    if blocks is not None:
        engine = build(
            EngineConfig(model=str(tiny), kv_cache_gib=blocks * block_bytes(engine) / 2**30, **options)
        ).engine
        assert engine.cache.num_blocks == blocks - 1
    if drafter is not None:
        engine.use(DraftHost(drafter, engine.limits.vocab_size, 10.0), k)
    return engine


def block_bytes(engine: Engine) -> int:
    layer = local(engine.executor).storage.layers[0]
    slots = layer.shape[1]
    return len(local(engine.executor).storage.layers) * layer.nbytes // slots * engine.cache.block_size


def drive(engine: Engine, requests: Iterable[Request], check: bool = True) -> dict[tuple[str, int], list[int]]:
    """Run requests to their end; every invariant of the cache is checked after every step."""
    tokens: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens.setdefault((event.request_id, event.index), []).extend(event.tokens)
        if check:
            check_integrity(engine.cache, engine.scheduler.running)
            for seq in engine.scheduler.running:
                assert 0 <= seq.cached < len(seq.tokens)
    assert engine.cache.num_free == engine.cache.num_blocks
    assert not engine.requests
    return tokens


def finish(engine: Engine) -> list[Event]:
    """All events until nothing is left to do."""
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def ids(events: list[Event], request_id: str = "r0") -> list[int]:
    return [token for event in events if event.request_id == request_id for token in event.tokens]


def prompt(i: int, length: int = 0) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(length or 5 + 13 * i % 60)]


PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=6, max_tokens=24, ignore_eos=True, presence_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=17, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.02, seed=7, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=24, logit_bias={5: 3.0, 9: -4.0}, bad_words=["the"], min_tokens=4),
]


def requests(count: int) -> list[Request]:
    bad = of_ids([(40, 41)])
    return [
        Request(id=f"r{i}", prompt_ids=prompt(i), params=PARAMS[i % len(PARAMS)], bad_words=bad if i % 6 == 5 else None)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[tuple[str, int], list[int]]:
    """Every request run by itself, without a drafter, prefix cache or chunks: what all others must equal."""
    engine = make(tiny, prefix_caching=False)
    outputs: dict[tuple[str, int], list[int]] = {}
    for request in requests(16):
        outputs |= drive(engine, [request])
    assert len({tuple(tokens) for tokens in outputs.values()}) == 16, "outputs must differ to tell anything"
    return outputs


def scripted(alone: dict[tuple[str, int], list[int]], **options: Any) -> ScriptedDrafter:
    scripts = {tuple(r.prompt_ids): alone[r.id, 0] for r in requests(16)}
    return ScriptedDrafter(scripts, VOCAB, **options)


DRAFTERS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "perfect": {"accuracy": 1.0},
    "lucky": {"accuracy": 0.7},
    "tree": {"accuracy": 0.8, "decoys": 2},
    "hopeless": {"accuracy": 0.0},
}


@pytest.mark.parametrize(
    ("name", "batch"),
    [("plain", 4), ("perfect", 16), ("lucky", 4), ("hopeless", 4), ("tree", 1), ("tree", 4), ("tree", 16)],
)
def test_output_does_not_depend_on_batch_or_drafter(tiny: Path, alone, name: str, batch: int) -> None:
    options = DRAFTERS[name]
    drafter = scripted(alone, **options) if options is not None else None
    engine = make(tiny, drafter, k=7, max_num_seqs=batch, threads=2)
    assert drive(engine, requests(16)) == alone
    if drafter is not None:
        assert drafter.num_drafted > 100
        assert (drafter.num_accepted > 50) == (name != "hopeless")
        assert not drafter.live
        assert engine.policy.num_dropped == 0


@pytest.mark.parametrize("name", ["plain", "lucky", "tree"])
def test_output_survives_preemption_and_chunks(tiny: Path, alone, name: str) -> None:
    options = DRAFTERS[name]
    drafter = scripted(alone, **options) if options is not None else None
    engine = make(tiny, drafter, blocks=14, max_num_batched_tokens=24, max_num_seqs=16, threads=2)
    assert drive(engine, requests(16)) == alone
    assert engine.counters.num_preemptions > 0, "the cache was to be too small"
    assert engine.counters.num_prefill_chunks > 0, "prompts were to be cut"
    if drafter is not None:
        assert drafter.num_accepted > 20


def test_ngram_drafts_are_accepted_and_change_nothing(tiny: Path) -> None:
    bias = dict.fromkeys((3, 4, 5), 20.0)  # few tokens are likely, so that texts repeat themselves
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=60, ignore_eos=True, logit_bias=bias)
    looping = Request(id="loop", prompt_ids=prompt(1, 12), params=params)
    plain = drive(make(tiny), [looping])
    engine = make(tiny, create("ngram"))
    engine.add(looping)
    stats = engine.requests["loop"][0].stats
    assert drive(engine, []) == plain
    assert stats.num_accepted_tokens > 10
    assert stats.num_steps < 50


@pytest.mark.parametrize("options", [{"max_num_seqs": 4}, {"blocks": 14}])
def test_recycled_drafts_are_accepted_and_change_nothing(tiny: Path, alone, options: dict[str, Any]) -> None:
    """Twice: the second time answers are known, and prompts are hits of the prefix cache."""
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 16} if "blocks" in options else {}
    engine = make(tiny, create("recycle"), k=7, **options, **small)
    for _ in range(2):
        group = requests(16)
        for request in group:
            engine.add(request)
        stats = [engine.requests[request.id][0].stats for request in group]
        assert drive(engine, []) == alone
        assert sum(each.num_draft_tokens for each in stats) > 100
        assert sum(each.num_accepted_tokens for each in stats) > 4
    assert engine.policy.num_dropped == 0
    assert (engine.counters.num_preemptions > 0) == ("blocks" in options)
    assert engine.cache.stats.num_prefix_hit_tokens > 0 or engine.cache.num_blocks < 100, "room for all prompts"


@pytest.mark.parametrize("architecture", ["mistral", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_architectures_and_bfloat16(tmp_path: Path, architecture: str, dtype: str) -> None:
    """Sliding windows, norms on queries and keys, bfloat16 rounding: a tree against plain decoding, in a batch."""
    folder = write_tiny_model(tmp_path, architecture, seed=1)
    plain: dict[tuple[str, int], list[int]] = {}
    engine = make(folder, dtype=dtype)
    for request in requests(6):
        plain |= drive(engine, [request])
    drafter = scripted({(f"r{i}", 0): plain.get((f"r{i}", 0), []) for i in range(16)}, accuracy=0.9, decoys=1)
    assert drive(make(folder, drafter, dtype=dtype, k=8), requests(6)) == plain
    assert drafter.num_accepted > 20


def test_prefix_cache_hits_are_counted_and_change_nothing(tiny: Path) -> None:
    engine = make(tiny)
    long = Request(id="a", prompt_ids=prompt(4, 90), params=GREEDY)
    first = drive(engine, [long])
    steps = engine.counters.num_rows
    again = drive(engine, [Request(id="a", prompt_ids=prompt(4, 90), params=GREEDY)])
    assert again == first
    assert engine.cache.stats.num_prefix_hit_tokens == 80
    assert engine.counters.num_rows - steps == steps - 80
    other = Request(id="a", prompt_ids=prompt(4, 90), params=GREEDY, salt=b"tenant")
    assert drive(engine, [other]) == first
    assert engine.cache.stats.num_prefix_hit_tokens == 80, "another salt shares nothing"


def test_n_completions_share_the_prompt(tiny: Path) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    engine = make(tiny)
    outputs = drive(engine, [Request(id="n", prompt_ids=prompt(3, 50), params=params)])
    assert len({tuple(tokens) for tokens in outputs.values()}) == 4
    assert engine.cache.stats.num_forked_blocks == 3 * 4, "three children share four blocks each"
    assert engine.cache.stats.num_copies_on_write >= 3, "each child writes its own tail"
    assert engine.counters.num_rows < 50 + 4 * 12 + 8, "the prompt is computed once"
    drafter = ScriptedDrafter({tuple(prompt(3, 50)): outputs["n", 2]}, VOCAB, decoys=1)
    assert drive(make(tiny, drafter), [Request(id="n", prompt_ids=prompt(3, 50), params=params)]) == outputs
    solo = SamplingParams(n=1, temperature=1.0, seed=11, max_tokens=12, ignore_eos=True)
    assert drive(make(tiny), [Request(id="n", prompt_ids=prompt(3, 50), params=solo)])["n", 0] == outputs["n", 0]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("decoys", [0, 2])
def test_nothing_is_emitted_past_max_tokens(tiny: Path, alone, max_tokens: int, decoys: int) -> None:
    drafter = scripted(alone, decoys=decoys)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine = make(tiny, drafter)
    engine.add(Request(id="r0", prompt_ids=prompt(0), params=params))
    events = finish(engine)
    assert ids(events) == alone["r0", 0][:max_tokens]
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize("kind", ["eos", "stop_token_ids"])
@pytest.mark.parametrize("at", range(1, 8))
def test_the_end_may_lie_anywhere_in_the_window(tiny: Path, alone, kind: str, at: int) -> None:
    script = alone["r0", 0]
    token = script[at]
    end = script.index(token)
    engine = make(tiny, scripted(alone), k=6)
    if kind == "eos":
        engine.limits = type(engine.limits)(VOCAB, 160, frozenset({token}))
    stops = [token] if kind != "eos" else []
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=stops, ignore_eos=kind != "eos")
    engine.add(Request(id="r0", prompt_ids=prompt(0), params=params))
    events = finish(engine)
    assert ids(events) == script[: end + 1]
    assert events[-1].finish_reason == "stop"
    assert events[-1].stop_reason == (None if kind == "eos" else token)
    assert engine.cache.num_free == engine.cache.num_blocks


def test_the_context_length_ends_a_request(tiny: Path) -> None:
    long = prompt(2, 150)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    plain = drive(make(tiny), [Request(id="x", prompt_ids=long, params=params)])
    assert len(plain["x", 0]) == 10
    drafter = ScriptedDrafter({tuple(long): plain["x", 0]}, VOCAB)
    assert drive(make(tiny, drafter, k=16), [Request(id="x", prompt_ids=long, params=params)]) == plain
    with pytest.raises(PromptTooLongError, match="160 tokens and at most 159"):
        make(tiny).add(Request(id="x", prompt_ids=prompt(2, 160), params=params))


def test_abort_gives_every_block_back(tiny: Path) -> None:
    engine = make(tiny, max_num_batched_tokens=20, max_num_seqs=4)
    for request in requests(8):
        engine.add(request)
    for i in range(8):
        engine.step()
        ended = engine.abort(f"r{i}")
        assert all(event.finish_reason == "abort" for event in ended)
        check_integrity(engine.cache, engine.scheduler.running)
    assert engine.abort("r0") == [], "aborting twice is no error"
    assert engine.counters.num_aborted > 3
    drive(engine, [])


def test_the_end_of_a_text_is_no_abort(tiny: Path) -> None:
    """Who reads it ends one completion; what goes on is aborted with the request."""
    engine = make(tiny)
    engine.add(Request(id="x", prompt_ids=prompt(1), params=SamplingParams(n=3, max_tokens=20, ignore_eos=True)))
    engine.step()
    assert [event.finish_reason for event in engine.abort("x", 1)] == ["abort"]
    assert engine.counters.num_aborted == 0
    assert len(engine.abort("x")) == engine.counters.num_aborted == 2


@pytest.mark.parametrize("name", ["none", "ngram"])
def test_what_an_event_counts_is_counted_no_further(tiny: Path, name: str) -> None:
    """Any event of a request with stop strings may be its last, and is read when later steps have run."""
    engine = make(tiny, create(name))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=["never said"])
    engine.add(Request(id="r0", prompt_ids=[5, 6, 7] * 4, params=params))
    num_tokens, events = 0, finish(engine)
    for i, event in enumerate(events):
        num_tokens += len(event.tokens)
        stats = event.stats
        assert stats is not None
        assert (stats.num_steps, stats.num_steps + stats.num_accepted_tokens) == (i + 1, num_tokens)
        assert sum(stats.accepted_by_position) == stats.num_accepted_tokens
        assert sum(counts[0] for counts in stats.by_source.values()) == stats.num_draft_tokens
    assert [event.stats.finished is None for event in events if event.stats] == [True] * (len(events) - 1) + [False]


def test_a_chunk_of_one_token_is_not_drafted_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that was preempted computes what it said again, where four others leave a step one token: what follows
    that is known, and what is guessed to follow its last token would be judged by it."""
    engine = make(tiny, create("suffix"), max_num_seqs=5, max_num_batched_tokens=5)
    asked = [Request(id=f"r{i}", prompt_ids=prompt(i, 5), params=GREEDY) for i in range(5)]
    draft, steps = engine.drafting.draft, list[Any]()
    monkeypatch.setattr(engine.drafting, "draft", lambda step: (draft(step), steps.append(step)))
    for request in asked:
        engine.add(request)
    events: list[Event] = []
    while engine.has_work:
        last = engine.scheduler.running[-1] if len(engine.scheduler.running) == 5 else None
        if last is not None and last.num_output % 8 == 5 and len(last.tokens) - last.cached == 1:
            engine.scheduler._preempt(last)
        events += engine.step()
    chunks = [each for step in steps for each in step.seqs if not each.sampled and each.start >= each.seq.num_prompt]
    assert sum(each.num_new == 1 for each in chunks) >= 3
    assert not any(len(each.draft) for each in chunks)
    alone = drive(make(tiny), asked)
    assert {(name, 0): ids(events, name) for name in (request.id for request in asked)} == alone


def test_a_failing_row_ends_its_own_request_only(tiny: Path, alone) -> None:
    engine = make(tiny)
    engine.add(Request(id="bad", prompt_ids=prompt(9), params=GREEDY))
    for request in requests(3):
        engine.add(request)
    pick, end, steps = engine.scheduler.pick, local(engine.executor).runner.finish, list[Any]()

    def picked() -> Any:
        steps.append(pick())
        return steps[-1]

    def poisoned() -> Any:
        out = end()
        out.logits, out.best = out.logits.clone(), out.best.clone()
        for each in steps[-1].sampled:
            if each.seq.request_id == "bad" and each.seq.num_output == 5:
                out.logits[each.logits_start], out.best[each.logits_start] = torch.nan, -1
        return out

    engine.scheduler.pick, local(engine.executor).runner.finish = picked, poisoned  # type: ignore[method-assign]
    events = finish(engine)
    failed = [event for event in events if event.error is not None]
    assert [event.request_id for event in failed] == ["bad"]
    assert failed[0].finish_reason == "error"
    for i in range(3):
        assert ids(events, f"r{i}") == alone[f"r{i}", 0]
    assert engine.cache.num_free == engine.cache.num_blocks


@pytest.mark.parametrize("cap", [0, 2])
def test_a_request_may_cap_its_own_drafts(tiny: Path, alone, cap: int) -> None:
    """In one batch with a request that takes the engine's five; neither text changes."""
    engine = make(tiny, scripted(alone), k=5)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, num_speculative_tokens=cap)
    engine.add(Request(id="r0", prompt_ids=prompt(0), params=params))
    engine.add(Request(id="r1", prompt_ids=prompt(1), params=PARAMS[1]))
    stats = [engine.requests[name][0].stats for name in ("r0", "r1")]
    events = finish(engine)
    assert [ids(events, name) for name in ("r0", "r1")] == [alone["r0", 0], alone["r1", 0]]
    assert [len(s.drafted_by_position) for s in stats] == [cap, 5]


def test_priority_runs_first_and_arrival_breaks_ties(tiny: Path) -> None:
    engine = make(tiny, max_num_seqs=1)
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        engine.add(Request(id=name, prompt_ids=prompt(1), params=params, priority=priority))
    order = []
    while engine.has_work:
        order += [event.request_id for event in engine.step() if event.finish_reason]
    assert order == ["urgent", "first", "second", "late"]


@pytest.mark.parametrize("ids", [[], [-1], [VOCAB + 100], [2**40], [1.5], [True]])
def test_bad_prompts_are_refused_and_leave_nothing(tiny: Path, ids: list[Any]) -> None:
    engine = make(tiny)
    with pytest.raises(InputError, match=r"prompt"):
        engine.add(Request(id="x", prompt_ids=ids, params=GREEDY))
    with pytest.raises(InputError, match=r"logit_bias"):
        engine.add(Request(id="x", prompt_ids=[1], params=SamplingParams(logit_bias={VOCAB + 9: 1.0})))
    assert not engine.has_work
    assert not engine.requests


@pytest.mark.parametrize("drafted", [False, True])
def test_logprobs_equal_a_prefill_of_the_same_ids(tiny: Path, alone, drafted: bool) -> None:
    """What decoding reports of a token, accepted drafts too, is what scoring the finished text as a prompt reports."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=3)
    engine = make(tiny, scripted(alone, accuracy=0.8) if drafted else None, max_num_batched_tokens=16)
    engine.add(Request(id="r0", prompt_ids=prompt(0), params=params))
    engine.add(Request(id="noise", prompt_ids=prompt(3), params=GREEDY))
    events = [event for event in finish(engine) if event.request_id == "r0"]
    output = ids(events)
    reported = [entry for event in events for entry in Packed(event.logprobs or ())]
    (scored,) = [list(Packed(event.prompt_logprobs)) for event in events if event.prompt_logprobs]
    assert output == alone["r0", 0]
    rescoring = Request(id="again", prompt_ids=prompt(0) + output, params=params)
    engine.add(rescoring)
    (rescored,) = [list(Packed(event.prompt_logprobs)) for event in finish(engine) if event.prompt_logprobs]
    assert rescored[0] is None
    assert rescored == scored + reported
    assert [entry.token for entry in rescored[1:]] == (prompt(0) + output)[1:]


@settings(max_examples=min(20, settings().max_examples))
@given(data=st.data())
def test_any_order_of_arrivals_and_aborts_keeps_the_invariants(tiny: Path, alone, data: st.DataObject) -> None:
    drafter = scripted(alone, accuracy=0.7, decoys=data.draw(st.sampled_from([0, 2])))
    engine = make(tiny, drafter, blocks=data.draw(st.integers(12, 30)), max_num_batched_tokens=24)
    coming = data.draw(st.permutations(wishes(alone)))[:8]
    got: dict[tuple[str, int], list[int]] = {}
    aborted: set[str] = set()
    while coming or engine.has_work:
        if coming and (not engine.has_work or data.draw(st.booleans())):
            engine.add(coming.pop())
        if engine.requests and data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(sorted(engine.requests)))
            aborted.add(victim)
            engine.abort(victim)
        if engine.has_work:
            for event in engine.step():
                got.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check_integrity(engine.cache, engine.scheduler.running)
    assert engine.cache.num_free == engine.cache.num_blocks
    assert not drafter.live
    for (name, index), tokens in got.items():
        whole = alone[name, index]
        assert tokens == whole or (name in aborted and tokens == whole[: len(tokens)])


# --- each request with its own drafter -------------------------------------------------------------------------------


def edited(tokens: list[int], at: int) -> list[int]:
    """A prediction that is nearly right: one token replaced, one deleted, two inserted."""
    return [
        *tokens[:at],
        (tokens[at] + 1) % VOCAB,
        *tokens[at + 1 : at + 4],
        *tokens[at + 5 :][:3],
        7,
        8,
        *tokens[at + 8 :],
    ]


def wishes(alone: dict[tuple[str, int], list[int]]) -> list[Request]:
    """The same requests, in turn with the engine's drafter, a right and a wrong prediction, n-grams, and none."""
    found = []
    for i, request in enumerate(requests(16)):
        output = alone[request.id, 0]
        predicted = {1: tuple(output), 2: tuple(edited(output, 3))}.get(i % 5, ())
        drafter = {3: "ngram", 4: "none"}.get(i % 5)
        found.append(msgspec.structs.replace(request, prediction=predicted, drafter=drafter))
    return found


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", ["plain", "lucky", "tree"])
def test_requests_with_different_drafters_in_one_batch(tiny: Path, alone, name: str, batch: int) -> None:
    """Greedy and seeded, whoever drafts for them and for their neighbours: the same bits as plain decoding alone."""
    drafter = scripted(alone, **DRAFTERS[name]) if name != "plain" else None
    engine = make(tiny, drafter, k=5, max_num_seqs=batch)
    for request in wishes(alone):
        engine.add(request)
    seqs = [engine.requests[f"r{i}"][0] for i in range(16)]
    assert drive(engine, []) == alone
    drafted = [sum(seq.stats.num_draft_tokens for seq in seqs[who::5]) for who in range(5)]
    accepted = [sum(seq.stats.num_accepted_tokens for seq in seqs[who::5]) for who in range(5)]
    assert (drafted[0] > 20) == (name != "plain"), "the engine's own drafter, where it has one"
    assert accepted[1] == drafted[1] > 40, "a right prediction"
    assert drafted[2] > accepted[2] > 10, "a prediction with errors"
    assert drafted[3] > 0, "n-grams"
    assert drafted[4] == 0, "plain decoding"
    assert engine.policy.num_dropped == 0
    if drafter is not None:
        assert not drafter.live
        assert drafter.num_drafted == drafted[0], "it heard of its own sequences only"


def test_different_drafters_survive_preemption_and_chunks(tiny: Path, alone) -> None:
    engine = make(tiny, scripted(alone, accuracy=0.7), blocks=14, max_num_batched_tokens=24, max_num_seqs=16)
    assert drive(engine, wishes(alone)) == alone
    assert engine.counters.num_preemptions > 0, "the cache was to be too small"


class Hostile:
    """Breaks every promise of a drafter in turn."""

    needs = Needs()

    def __init__(self) -> None:
        self.num_calls = 0

    def begin(self, seq: SequenceView) -> None: ...
    def end(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> Any:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            raise RuntimeError("planted")
        return [Draft.chain([VOCAB] * most) for _, most in requests] if self.num_calls % 3 == 1 else []

    def observe(self, step: StepReport) -> None:
        raise RuntimeError("planted")


def test_a_hostile_drafter_costs_its_neighbours_nothing(tiny: Path, alone) -> None:
    def run(drafter: Any) -> tuple[Engine, list[list[int]]]:
        engine = make(tiny, drafter)
        for request in wishes(alone):
            engine.add(request)
        seqs = [engine.requests[f"r{i}"][0] for i in range(16) if i % 5 in (1, 2, 3)]
        assert drive(engine, []) == alone
        return engine, [[s.stats.num_steps, s.stats.num_draft_tokens, s.stats.num_accepted_tokens] for s in seqs]

    hostile = Hostile()
    engine, stats = run(hostile)
    assert hostile.num_calls > 10
    assert engine.counters.num_drafts_dropped > hostile.num_calls
    calm, wanted = run(None)
    assert calm.counters.num_drafts_dropped == 0
    assert stats == wanted


@pytest.mark.parametrize(("own", "k", "expected"), [("none", 5, 5), ("ngram", 0, 5), ("none", 0, 5), ("ngram", 3, 3)])
def test_a_request_that_asks_for_drafts_gets_them(tiny: Path, alone, own: str, k: int, expected: int) -> None:
    """Also where the engine itself drafts nothing; and with a cap of its own, no more than that."""
    engine = make(tiny, create(own), k=k)
    first = alone["r0", 0]
    capped = dataclasses.replace(GREEDY, num_speculative_tokens=2)
    for name, params, more in (
        ("plain", GREEDY, {}),
        ("predicted", GREEDY, {"prediction": tuple(first)}),
        ("capped", capped, {"prediction": tuple(first)}),
        ("off", GREEDY, {"prediction": tuple(first), "drafter": "none"}),
    ):
        engine.add(Request(id=name, prompt_ids=prompt(0), params=params, **more))
    stats = {name: group[0].stats for name, group in engine.requests.items()}
    outputs = drive(engine, [])
    assert set(map(tuple, outputs.values())) == {tuple(first)}
    assert len(stats["predicted"].drafted_by_position) == expected
    assert len(stats["capped"].drafted_by_position) == 2
    assert stats["off"].num_drafts == 0
    assert len(stats["plain"].drafted_by_position) <= (0 if own == "none" else k)


def test_a_drafter_hears_of_a_request_when_it_first_runs(tiny: Path, alone) -> None:
    """Not while it waits, for want of seats, for its sibling's prompt or after a preemption; one that is aborted before
    is never spoken of, and every begin has its end."""
    drafter = scripted(alone)
    engine = make(tiny, drafter, max_num_seqs=2, max_num_batched_tokens=24)
    engine.add(Request(id="many", prompt_ids=prompt(40), params=dataclasses.replace(GREEDY, n=4)))
    engine.add(Request(id="gone", prompt_ids=prompt(1), params=GREEDY))
    assert not drafter.live
    engine.step()
    assert [seq.request for seq in drafter.live] == [engine.requests["many"][0].key]
    engine.abort("many", 0)
    engine.abort("gone")
    while engine.has_work:
        engine.step()
        live = {seq._seq for seq in drafter.live}
        assert live.issuperset(engine.scheduler.running) or not live
        assert all(seq.stats.first_scheduled for seq in live)
    assert not drafter.live
    assert engine.counters.num_drafts_dropped == 0


def test_a_right_prediction_takes_the_fewest_steps_and_is_counted(tiny: Path, alone) -> None:
    """The step that ends the prompt has no draft, then 23 tokens by sixes."""
    engine, first = make(tiny), alone["r0", 0]
    never = next(token for token in range(VOCAB) if token not in first)
    for name, prediction, drafter in (
        ("right", first, None),
        ("wrong", [first[0], *[never] * 20], None),
        ("unused", first, "ngram"),
    ):
        engine.add(Request(id=name, prompt_ids=prompt(0), params=GREEDY, prediction=tuple(prediction), drafter=drafter))
    right, wrong, unused = (engine.requests[name][0].stats for name in ("right", "wrong", "unused"))
    drive(engine, [])
    assert right.num_steps == 1 + 4
    assert (right.accepted_prediction_tokens, right.rejected_prediction_tokens) == (24 - 5, 0)
    assert wrong.accepted_prediction_tokens == 0
    assert wrong.rejected_prediction_tokens == wrong.num_draft_tokens == 5, "lost after the first token"
    assert (unused.accepted_prediction_tokens, unused.rejected_prediction_tokens) == (0, 0)


def test_every_completion_of_a_request_has_its_drafter(tiny: Path) -> None:
    params = SamplingParams(n=3, temperature=0, max_tokens=12, ignore_eos=True)
    request = Request(id="n", prompt_ids=prompt(3, 50), params=params)
    outputs = drive(make(tiny), [request])
    engine = make(tiny)
    engine.add(msgspec.structs.replace(request, prediction=tuple(outputs["n", 0])))
    seqs = list(engine.requests["n"])
    assert drive(engine, []) == outputs
    assert [seq.stats.num_steps for seq in seqs] == [1 + 2] * 3, "12 tokens: one, then 11 by sixes"


@pytest.mark.parametrize("own", ["none", "auto", "suffix", "recycle"])
def test_the_drafters_that_may_be_named_are_known(tiny: Path, own: str) -> None:
    """Those and no others are taken, and why the others are not is known."""
    engine = build(EngineConfig(model=str(tiny), dtype="float32", max_model_len=160, drafter=own)).engine
    found = engine.policy.nameable()
    known = {name for name, reason in found.items() if reason is None}
    assert ("recycle" in known) == (own == "recycle")
    assert {"none", "auto", "ngram", "suffix", own} <= set(known)
    assert all("must be the engine's --drafter" in reason for reason in found.values() if reason is not None)
    for name in {*registry.DRAFTERS.files(), *known}:
        request = Request(id=name, prompt_ids=[1, 2], params=GREEDY, drafter=name)
        with nullcontext() if name in known else pytest.raises(InputError, match="must be the engine's --drafter"):
            engine.add(request)
        engine.abort(name)


@pytest.mark.parametrize(
    ("wish", "param", "message"),
    [
        ({"drafter": "ngrams"}, "drafter", r"Unknown drafter 'ngrams'\. Did you mean 'ngram'"),
        ({"drafter": 3}, "drafter", "drafter is 3"),
        ({"drafter": "ngram", "prediction": (1, VOCAB)}, "prediction", f"prediction holds token id {VOCAB}"),
        ({"prediction": (1, -1)}, "prediction", "prediction holds token id -1"),
        ({"prediction": (1.5,)}, "prediction", "prediction holds token id 1.5"),
        ({"prediction": (1,) * 161}, "prediction", "prediction has 161 tokens and the context is 160"),
    ],
)
def test_wrong_wishes_are_refused_and_leave_nothing(tiny: Path, wish: dict[str, Any], param: str, message: str) -> None:
    engine = make(tiny)
    with pytest.raises(InputError, match=message) as caught:
        engine.add(Request(id="x", prompt_ids=[1, 2], params=GREEDY, **wish))
    assert caught.value.param == param
    assert not engine.has_work
    assert not engine.requests
    assert engine.cache.num_free == engine.cache.num_blocks
    drive(engine, [Request(id="x", prompt_ids=[1, 2], params=GREEDY)])


def test_the_engines_drafter_can_be_replaced_between_requests(tiny: Path, alone) -> None:
    engine = make(tiny)
    predicted = msgspec.structs.replace(requests(1)[0], prediction=tuple(alone["r0", 0]))
    engine.add(predicted)
    with pytest.raises(ConfigError, match="while no request is running"):
        engine.use(DraftHost(create("ngram"), VOCAB, 10.0, "ngram"), 5)
    assert drive(engine, [])["r0", 0] == alone["r0", 0]
    script = scripted(alone)
    engine.use(DraftHost(script, VOCAB, 10.0), 5)
    outputs = drive(engine, [predicted, requests(2)[1]])
    assert outputs == {("r0", 0): alone["r0", 0], ("r1", 0): alone["r1", 0]}
    assert script.num_accepted > 10


@pytest.mark.parametrize(
    ("drafter", "batch"),
    [("ngram", 4), ("suffix", 16), ("auto", 4), ("auto", 16), ("scripted", 1), ("scripted", 4), ("scripted", 16)],
)
def test_weighed_drafts_change_nothing(
    tiny: Path, alone, drafter: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows cost little and nothing else is learned of their cost, drafts are made; alone and in batches, with
    blocks that do not suffice and prompts in chunks, outputs are those of plain decoding."""
    monkeypatch.setattr(DecodeCost, "observe", lambda *args: None)
    monkeypatch.setattr(Guard, "took", lambda *args: None)
    engine = make(tiny, blocks=24, adaptive=True, max_num_seqs=batch, max_num_batched_tokens=48, threads=2)
    engine.scheduler.cost.decoding.begin(np.linspace(1.0, 1.5, len(ROWS)))
    host = DraftHost(scripted(alone, accuracy=0.8, decoys=2), VOCAB, 10.0)
    if drafter != "scripted":
        host = DraftHost.of(drafter, makers(drafter, None), cast(Any, NoTarget()), VOCAB, 10.0)
    engine.use(host, 5, adaptive=True)
    assert drive(engine, requests(16)) == alone
    assert drive(engine, requests(16)) == alone, "the second time suffixes are known"
    stats = engine.drafting.weighing
    assert stats is not None
    assert not stats._records
    if drafter != "ngram":
        assert engine.counters.num_rows > engine.counters.num_advanced + 10, "rows of drafts that were rejected"
