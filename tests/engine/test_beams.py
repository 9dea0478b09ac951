"""Beam search of the engine against transformers' on tiny random models, in fp32."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.engine import Engine
from specserve.engine.packed import Packed
from specserve.engine.request import Request
from specserve.errors import InputError
from specserve.runtime.executor import local
from specserve.sampling.bad_words import of_ids
from specserve.structured.base import Grammar
from specserve.structured.spec import Structured
from specserve.testing import check_integrity, write_tiny_model
from specserve.types import Event, SamplingParams
from tests.engine.beams import Found, answers, beams, expected, finish, make, prompt, same, search


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return make(tiny)


@pytest.mark.each_choice(rounds=3)
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0, 2.0])
def test_beams_are_those_of_transformers(
    engine: Engine, reference: Any, width: int, early: Any, penalty: float
) -> None:
    """Several tokens end a text, so that beams end in the middle."""
    ends = list(range(0, 280, 40))
    for i in range(2):
        params = beams(width, length_penalty=penalty, early_stopping=early, stop_token_ids=ends, ignore_eos=True)
        same(search(engine, prompt(i), params), expected(reference, prompt(i), params, ends))


def test_ends_of_the_model_and_logprobs(engine: Engine, reference: Any) -> None:
    """Also what log-probabilities add up to, and edits: a bias, forbidden tokens, no end before min_tokens."""
    params = beams(4, n=3, logprobs=2, min_tokens=3, stop_token_ids=range(0, 280, 20), ignore_eos=True)
    engine.add(Request(id="b", prompt_ids=prompt(5), params=params))
    events = finish(engine)
    same(answers(events, "b"), expected(reference, prompt(5), params, list(range(0, 280, 20))))
    for event in events:
        assert event.logprobs is not None and event.beam is not None and event.stats is not None
        entries = list(Packed(event.logprobs))
        assert [entry.token for entry in entries] == event.tokens and all(len(entry.top) == 2 for entry in entries)
        assert event.beam[0] == sum(entry.logprob for entry in entries)
        assert event.finish_reason == ("stop" if event.tokens[-1] % 20 == 0 else "length")
        assert event.stop_reason == (event.tokens[-1] if event.finish_reason == "stop" else None)
    bias, allowed = {3: 2.0, 9: -1.5}, list(range(90))
    edited = beams(4, logit_bias=bias, allowed_token_ids=allowed, max_tokens=6, ignore_eos=True)
    theirs = expected(
        reference,
        prompt(1),
        edited,
        [],
        sequence_bias=[[[token], value] for token, value in bias.items()],
        suppress_tokens=list(range(90, 512)),
    )
    same(search(engine, prompt(1), edited), theirs)


def ordinary(count: int) -> list[Request]:
    draws = SamplingParams(temperature=1.0, seed=5, max_tokens=14, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    return [Request(id=f"o{i}", prompt_ids=prompt(7 + i), params=[draws, greedy][i % 2]) for i in range(count)]


def run(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.add(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    for event in finish(engine):
        assert event.error is None
        tokens.setdefault((event.request_id, event.index), []).extend(event.tokens)
    return tokens


@pytest.mark.parametrize("options", [{}, {"blocks": 20}, {"max_num_seqs": 6}, {"prefix_caching": False}])
def test_company_and_preemption_change_nothing(tiny: Path, engine: Engine, options: dict[str, Any]) -> None:
    """Beams beside ordinary requests, in little memory and few seats."""
    wide = [Request(id=f"b{i}", prompt_ids=prompt(i), params=beams(4, ignore_eos=True)) for i in range(3)]
    alone: dict[tuple[str, int], list[int]] = {}
    for request in [*wide, *ordinary(4)]:
        alone |= run(engine, [request])
    crowded = make(tiny, **options)
    assert (
        run(crowded, [each for pair in zip(ordinary(4), [*wide, wide[0]], strict=True) for each in pair][:-1]) == alone
    )
    if "blocks" in options:
        assert crowded.counters.num_preemptions > 0, "the cache was to be too small"
    assert crowded.cache.stats.num_copies_on_write > 0
    assert crowded.cache.stats.num_forked_blocks > 20


def interrupted(engine: Engine, request: Request, grammar: Grammar | None, every: int) -> tuple[Found, int, int]:
    """Its answers, and how many steps they took, where it is preempted after every so many steps that go on; and how
    often it was."""
    engine.add(request, grammar)
    events: list[Event] = []
    num_steps, num_preemptions, length, since = 0, 0, 0, 0
    search = engine.requests[request.id][0].beams.search
    while engine.has_work:
        events += engine.step()
        check_integrity(engine.cache, engine.scheduler.running)
        num_steps, since, length = num_steps + 1, since + (search.length > length), search.length
        if since == every and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1])
            num_preemptions, since = num_preemptions + 1, 0
    assert engine.cache.num_free == engine.cache.num_blocks and not engine.requests
    assert events[0].stats is not None and events[0].stats.num_preemptions == num_preemptions
    return answers(events, request.id), num_steps, num_preemptions


@pytest.mark.parametrize(
    "options", [{}, {"prefix_caching": False}, {"drafter": "ngram"}, {"max_num_batched_tokens": 16}]
)
def test_preempted_beams_go_on_where_they_were(tiny: Path, grammatical: Built, options: dict[str, Any]) -> None:
    """After each of their steps, or some; the same bits, and two steps more each time, where these hold all tokens."""
    engine = make(tiny, **{"max_num_seqs": 8, **options})
    asked = Structured.json(SCHEMA)
    grammar = grammatical.compiler.compile(asked)
    for width, every, structured in [(4, 1, None), (8, 3, None), (4, 1, asked), (1, 2, None)]:
        params = beams(width, 1, structured=structured, max_tokens=40 if structured else 14)
        request = Request(id="b", prompt_ids=prompt(4), params=params)
        given = None if structured is None else grammar
        calm, num_steps, _ = interrupted(engine, request, given, every=-1)
        found, num_more, num_preemptions = interrupted(engine, request, given, every)
        assert found == calm
        assert num_preemptions >= 3
        if "max_num_batched_tokens" not in options:
            assert num_more <= num_steps + 2 * num_preemptions


def test_blocks_are_shared(engine: Engine) -> None:
    """Eight beams of a long prompt hold its whole blocks once."""
    ids = [(3 * j * j + j) % 280 for j in range(100)]
    engine.add(Request(id="b", prompt_ids=ids, params=beams(8, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    tables = [seq.blocks.ids for seq in engine.scheduler.running]
    assert len(tables) == 8
    assert len({tuple(table[:6]) for table in tables}) == 1
    assert engine.cache.num_blocks - engine.cache.num_free <= 6 + 8
    engine.abort("b")
    finish(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_abort_leaves_nothing(engine: Engine, num_steps: int) -> None:
    params = beams(4, n=2, ignore_eos=True)
    engine.add(Request(id="b", prompt_ids=prompt(2), params=params))
    for _ in range(num_steps):
        engine.step()
    ended = engine.abort("b")
    assert [(event.index, event.finish_reason) for event in ended] == [(0, "abort"), (1, "abort")]
    assert finish(engine) == []


def test_numbers_that_are_no_numbers_end_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tiny)
    engine.add(Request(id="b", prompt_ids=prompt(2), params=beams(3, n=2, ignore_eos=True)))
    engine.step()
    engine.step()
    executor = local(engine.executor)
    finish_forward = executor.runner.finish

    def broken() -> Any:
        out = finish_forward()
        with torch.inference_mode():
            out.logits[0], out.best[0] = torch.nan, -1
        return out

    monkeypatch.setattr(executor.runner, "finish", broken)
    events = finish(engine)
    assert [(event.index, event.finish_reason) for event in events] == [(0, "error"), (1, "error")]
    assert "NaN" in (events[0].error or "")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"beam_width": 2, "presence_penalty": 0.5}, "presence_penalty"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError) as refused:
        SamplingParams(**fields)
    assert refused.value.param == name


def test_what_could_never_run_is_refused(tiny: Path) -> None:
    engine = make(tiny, blocks=12, max_num_seqs=6)
    for params in (beams(8), beams(6, max_tokens=40)):
        with pytest.raises(InputError) as refused:
            engine.add(Request(id="b", prompt_ids=prompt(1), params=params))
        assert refused.value.param == "beam_width"
    with pytest.raises(InputError, match="drafter"):
        engine.add(Request(id="b", prompt_ids=prompt(1), params=beams(2), drafter="suffix"))
    assert not engine.has_work and not engine.requests and not engine.policy.parts


REGEX = [r"(the|and) [a-z]{3,8}\.", r"[ab]{1,3}(cd|ef)*x", r"(yes|no)"]


def masked(built: Built, grammar: Grammar, ids: list[int], ends: frozenset[int]) -> Any:
    """transformers' prefix_allowed_tokens_fn of a grammar's own masks."""

    def allowed(_: int, text: torch.Tensor) -> list[int]:
        output = text.tolist()[len(ids) :]
        state = grammar.start()
        if any(token in ends for token in output) or not all(state.advance(token) for token in output):
            return [0]  # what transformers fills up with
        row = np.zeros(-(-built.engine.limits.vocab_size // 32), np.int32)
        state.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=built.engine.limits.vocab_size)
        return list(np.flatnonzero(bits)) or [0]

    return allowed


@pytest.mark.parametrize("pattern", REGEX)
@pytest.mark.parametrize("width", [2, 4])
def test_grammars_are_those_of_transformers(grammatical: Built, reference: Any, pattern: str, width: int) -> None:
    engine, grammar = grammatical.engine, grammatical.compiler.compile(Structured.regex(pattern))
    n = min(width, 2)
    params = beams(width, n, structured=Structured.regex(pattern), max_tokens=20)
    for i in range(2):
        ours = search(engine, prompt(i), params, grammar)
        allowed = masked(grammatical, grammar, prompt(i), engine.limits.eos_ids)
        theirs = expected(reference, prompt(i), params, sorted(engine.limits.eos_ids), prefix_allowed_tokens_fn=allowed)
        same(ours, theirs)
        assert all(re.fullmatch(pattern, grammatical.tokenizer.decode(ids[:-1])) for ids, _ in ours)


@pytest.fixture(scope="module")
def grammatical(tiny: Path) -> Built:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "adaptive": False}
    return build(EngineConfig(model=str(tiny), **options))


SCHEMA = {
    "type": "object",
    "properties": {"description": {"enum": ["the", "other"]}, "category": {"type": "integer"}},
    "required": ["description", "category"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance", "auto"])
def test_tokens_without_a_choice_are_shared_and_change_nothing(tiny: Path, backend: str) -> None:
    """Several steps of the search in one of the engine, on all backends; the same bits without drafts."""
    options = {"dtype": "float32", "max_model_len": 160, "adaptive": False, "grammar_backend": backend}
    built = build(EngineConfig(model=str(tiny), **options))
    asked = Structured.json(SCHEMA)
    grammar = built.compiler.compile(asked)
    for width in (2, 4, 8):
        found, steps = [], []
        for most in (None, 0):
            params = beams(width, 2, structured=asked, max_tokens=60, num_speculative_tokens=most)
            before = built.engine.counters.num_steps
            found.append(search(built.engine, prompt(width), params, grammar))
            steps.append(built.engine.counters.num_steps - before)
        assert found[0] == found[1]
        assert steps[0] < steps[1], "some tokens were to be without a choice"
    assert built.engine.counters.num_accepted_jump_forward_tokens > 10


def test_fewer_texts_than_answers(grammatical: Built) -> None:
    asked = Structured.choice(["yes"])
    engine = grammatical.engine
    only = [*grammatical.tokenizer.encode("yes", add_special_tokens=False), *engine.limits.eos_ids]
    params = beams(4, 4, structured=asked, allowed_token_ids=only, max_tokens=20)
    engine.add(Request(id="b", prompt_ids=prompt(1), params=params), grammatical.compiler.compile(asked))
    events = finish(engine)
    num_found = sum(event.error is None for event in events)
    assert 1 <= num_found < 4
    assert [event.error_code for event in events] == [None] * num_found + ["no_token_left"] * (4 - num_found)


def test_the_real_model(smollm2_safetensors: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_safetensors)
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2_safetensors, dtype=torch.float32).eval()
    engine = make(smollm2_safetensors)
    asked: tuple[tuple[int, float, Any, str], ...] = (
        (4, 1.0, False, "The capital of France is"),
        (2, -0.5, True, "def fibonacci(n):\n"),
        (8, 2.0, "never", "The capital of France is"),
    )
    for width, penalty, early, text in asked:
        params = beams(width, 2, length_penalty=penalty, early_stopping=early)
        ids = tokenizer(text)["input_ids"]
        same(search(engine, ids, params), expected(reference, ids, params, sorted(engine.limits.eos_ids)))


@pytest.mark.parametrize(("drafter", "adaptive"), [("ngram", False), ("auto", False), ("auto", True)])
def test_looked_up_drafts_change_nothing(tiny: Path, engine: Engine, drafter: str, adaptive: bool) -> None:
    """Also beside ordinary requests, and where memory is short."""
    wide = [Request(id=f"b{i}", prompt_ids=prompt(i) * 2, params=beams(4, max_tokens=20)) for i in range(3)]
    alone: dict[tuple[str, int], list[int]] = {}
    for request in [*wide, *ordinary(3)]:
        alone |= run(engine, [request])
    for options in ({}, {"blocks": 24}):
        drafting = make(tiny, drafter=drafter, **{"adaptive": adaptive, **options})
        assert run(drafting, [*wide, *ordinary(3)]) == alone
        assert (drafting.counters.num_preemptions > 0) == ("blocks" in options)
        assert drafting.policy.num_dropped == 0


@pytest.mark.parametrize("source", ["ngram", "prediction"])
def test_looked_up_drafts_of_all_beams_are_accepted(tiny: Path, engine: Engine, source: str) -> None:
    """Two texts alone may come: one token, or another, again and again."""
    words = of_ids([(40, 41), (41, 40)])
    params = beams(2, allowed_token_ids=[40, 41], max_tokens=30, ignore_eos=True)
    asked: dict[str, Any] = {"prediction": (40,) * 30 + (41,) * 30} if source == "prediction" else {"drafter": "ngram"}
    found = []
    for more in ({"drafter": "none"}, asked):
        engine.add(Request(id="b", prompt_ids=prompt(1), params=params, bad_words=words, **more))
        stats, before = engine.requests["b"][0].stats, engine.counters.num_steps
        events = finish(engine)
        found.append(answers(events, "b"))
        assert stats.num_accepted_tokens == 30 - stats.num_steps == 30 - (engine.counters.num_steps - before)
    assert found[0] == found[1]
    assert {tuple(ids) for ids, _ in found[0]} == {(40,) * 30, (41,) * 30}
    assert stats.num_accepted_tokens > 15
