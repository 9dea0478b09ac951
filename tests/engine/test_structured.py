"""Structured output through the whole engine: every output fits its grammar, no draft, batch or lack of memory changes
it, free neighbours do not notice it, and a grammar that fails ends its own request."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import msgspec
import numpy as np
import pytest
from scipy.stats import chisquare

from specserve.bench.drive import NoTarget
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.packed import Packed
from specserve.engine.request import Request
from specserve.errors import NoTokenLeftError
from specserve.runtime.executor import local
from specserve.sampling.bad_words import of_ids
from specserve.speculation.base import StepReport
from specserve.speculation.constants import MOST_JUMP_FORWARD
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import prepare
from specserve.structured.base import Grammar, Guarded, RefusedError
from specserve.structured.spec import Structured
from specserve.testing import LanguageGrammar, ScriptedDrafter, check_integrity, write_tiny_model
from specserve.types import Draft, Event, SamplingParams

Outputs = dict[str, list[int]]
Asked = tuple[Request, Grammar | None]  # with its grammar, compiled

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["the", "and", "other"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
ASKED = [
    Structured.json(SCHEMA),
    Structured.regex(r"(the|and) [a-z]{3,8}\."),
    Structured.choice(["then", "other", "stone"]),
]
NAMES = ("none", "ngram", "suffix", "recycle", "grammar", "chain", "tree")


def create(name: str) -> Any:
    """A drafter with its default options, of those that need no target."""
    make = prepare(name, {})
    return None if make is None else make(cast(Any, NoTarget()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)


@pytest.fixture(scope="module")
def built(tiny: Path) -> Built:
    return make(tiny)


def make(tiny: Path, **options: Any) -> Built:
    options = {"drafter": "none", "adaptive": False, "max_step_ms": 1e9, **options}  # nothing hangs on the clock
    return build(EngineConfig(model=str(tiny), **{"dtype": "float32", "max_model_len": 160, **options}))


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(5 + 3 * i % 20)]


def params(i: int, structured: Structured | None) -> SamplingParams:
    temperature = 0.0 if i % 4 < 2 else 1.0
    return SamplingParams(
        temperature=temperature, seed=i, max_tokens=90, structured=structured, presence_penalty=i % 3 / 4
    )


def requests(built: Built, count: int = 8, drafter: str | None = None) -> list[Asked]:
    """Every other one is free."""
    made = []
    for i in range(count):
        asked = ASKED[i // 2 % len(ASKED)] if i % 2 else None
        grammar = None if asked is None else built.compiler.compile(asked)
        made.append((Request(id=f"r{i}", prompt_ids=prompt(i), params=params(i, asked), drafter=drafter), grammar))
    return made


def drive(built: Built, asked: list[Asked]) -> Outputs:
    """Run to the end; no request may fail, and every invariant of the cache holds after every step."""
    engine, outputs = built.engine, {request.id: [] for request, _ in asked}
    for request, grammar in asked:
        engine.add(request, grammar)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            outputs[event.request_id] += event.tokens
        check_integrity(engine.cache, engine.scheduler.running)
    assert engine.cache.num_free == engine.cache.num_blocks
    return outputs


@pytest.fixture(scope="module")
def alone(built: Built) -> Outputs:
    """Each by itself, without any draft: what all others must equal."""
    found: Outputs = {}
    for request in requests(built, 16, "none"):
        found |= drive(built, [request])
    return found


def fits(built: Built, structured: Structured, tokens: list[int]) -> bool:
    text = built.tokenizer.decode(tokens, skip_special_tokens=True)
    if structured.kind == "json_schema":
        return jsonschema_rs.is_valid(json.loads(structured.text), json.loads(text))
    if structured.kind == "choice":
        return text in json.loads(structured.text)
    return jsonschema_rs.is_valid({"type": "string", "pattern": f"^(?:{structured.text})$"}, text)


def test_every_output_that_ended_fits(built: Built, alone: Outputs) -> None:
    ended = 0
    for i in range(1, 16, 2):
        tokens = alone[f"r{i}"]
        if tokens[-1] in built.tokenizer.eos_ids:
            ended += 1
            assert fits(built, ASKED[i // 2 % len(ASKED)], tokens)
    assert ended >= 5, "too few ended within their limit to tell anything"


@pytest.fixture(scope="module")
def with_xgrammar(tiny: Path) -> tuple[Built, Outputs]:
    """An engine, and what it says without drafts."""
    pytest.importorskip("xgrammar")
    built = make(tiny, grammar_backend="xgrammar", max_num_seqs=8)
    return built, drive(built, requests(built, 8))


@pytest.mark.parametrize("name", ["ngram", "suffix", "recycle", "grammar", "chain", "tree"])
def test_no_drafter_changes_an_output_with_another_backend(with_xgrammar: tuple[Built, Outputs], name: str) -> None:
    """xgrammar's masks have every spelling of what is forced, llguidance's one: outputs differ between them, and with
    each they are the same without drafts."""
    built, plain = with_xgrammar
    built.engine.cache.reset_prefix_cache()
    scripts = {tuple(prompt(i)): plain[f"r{i}"] for i in range(8)}
    script = {"accuracy": 0.8, "decoys": 2 if name == "tree" else 0}
    drafter = ScriptedDrafter(scripts, 293, **script) if name in ("chain", "tree") else create(name)
    built.engine.use(DraftHost(drafter, built.engine.limits.vocab_size, 10.0, name), 5)
    assert drive(built, requests(built, 8)) == plain
    ended = [i for i in range(1, 8, 2) if plain[f"r{i}"][-1] in built.tokenizer.eos_ids]
    assert ended, "none ended within its limit"
    assert all(fits(built, ASKED[i // 2 % len(ASKED)], plain[f"r{i}"]) for i in ended)


@pytest.mark.parametrize(("name", "batch"), [*((name, 8) for name in NAMES), ("grammar", 1), ("tree", 1)])
def test_no_drafter_and_no_company_changes_an_output(tiny: Path, alone: Outputs, name: str, batch: int) -> None:
    built = make(tiny, max_num_seqs=batch)
    scripts = {tuple(prompt(i)): alone[f"r{i}"] for i in range(16)}
    script = {"accuracy": 0.8, "decoys": 2 if name == "tree" else 0}
    drafter = ScriptedDrafter(scripts, 293, **script) if name in ("chain", "tree") else create(name)
    built.engine.use(DraftHost(drafter, built.engine.limits.vocab_size, 10.0, name), 5)
    assert drive(built, requests(built, 16)) == alone


def test_preemption_keeps_a_grammar_where_it_was(tiny: Path, alone: Outputs) -> None:
    built = make(tiny, kv_cache_gib=0.0002, max_num_batched_tokens=24)
    assert drive(built, requests(built, 16)) == alone
    assert built.engine.counters.num_preemptions > 0, "the cache was to be too small"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_may_come_is_found_out_while_the_target_works(
    built: Built, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Once in each step without a draft, between the start of the target's work and its end."""
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.append(name) or real(*args))

    watch(local(built.engine.executor).runner, "start")
    watch(Guarded, "fill")
    watch(local(built.engine.executor).runner, "finish")
    asked = SamplingParams(temperature=temperature, seed=1, max_tokens=90, structured=ASKED[0])
    grammar = built.compiler.compile(ASKED[0])
    built.engine.add(Request(id="one", prompt_ids=prompt(1), params=asked, drafter="none"), grammar)
    num_tokens = 0
    while built.engine.has_work:
        num_tokens += sum(len(event.tokens) for event in built.engine.step())
    assert num_tokens > 10
    assert calls == ["start", "fill", "finish"] * num_tokens


def test_forced_tokens_are_drafted_and_accepted(built: Built) -> None:
    asked, grammar = requests(built)[1]
    for drafter, drafts in ((None, True), ("grammar", True), ("none", False)):
        request = Request(id="f", prompt_ids=asked.prompt_ids, params=asked.params, drafter=drafter)
        built.engine.add(request, grammar)
        stats = built.engine.requests["f"][0].stats
        while built.engine.has_work:
            built.engine.step()
        assert (stats.num_accepted_tokens > 8) == drafts
        rejected = stats.num_draft_tokens - stats.num_accepted_tokens
        assert rejected <= 1, "masks have what is forced alone, but for the end: there are two end tokens"


class Watched(ScriptedDrafter):
    """Keeps what became of its drafts."""

    def observe(self, step: StepReport) -> None:
        super().observe(step)
        said = [(each.draft, each.verdict.tokens) for each in step.seqs if each.verdict is not None]
        self.seen: list[tuple[Draft, list[int]]] = [*getattr(self, "seen", []), *said]


def stood(draft: Draft, tokens: list[int]) -> set[int]:
    """The nodes on the way that an output took through a draft."""
    nodes = [-1]
    for token in tokens:
        nodes += np.flatnonzero((draft.parents == nodes[-1]) & (draft.tokens == token)).tolist() or [len(draft)]
    return set(nodes) - {-1, len(draft)}


def test_forced_tokens_stand_in_trees_too_and_are_counted(tiny: Path, alone: Outputs) -> None:
    """A drafter whose trees err half of the time: what is forced is in the midst of them, and the tree goes on."""
    built = make(tiny)
    asked = [each for each in requests(built, 16) if each[1] is not None]
    drafter = Watched({tuple(prompt(i)): alone[f"r{i}"] for i in range(16)}, 293, accuracy=0.5, decoys=1)
    built.engine.use(DraftHost(drafter, built.engine.limits.vocab_size, 10.0, "tree"), 8)
    assert drive(built, asked) == {request.id: alone[request.id] for request, _ in asked}
    counters = built.engine.counters
    forced = [(draft, tokens) for draft, tokens in drafter.seen if draft.jump_forward and not draft.is_chain]
    assert any(draft.jump_forward & stood(draft, tokens) for draft, tokens in forced)
    assert any(draft.jump_forward < set(range(len(draft))) for draft, _ in forced), "the drafter's own beside them"
    assert counters.num_jump_forward_tokens == sum(len(draft.jump_forward) for draft, _ in drafter.seen) > 50
    accepted = sum(len(draft.jump_forward & stood(draft, tokens)) for draft, tokens in drafter.seen)
    assert counters.num_accepted_jump_forward_tokens == accepted > 50
    most = max(len(draft) for draft, _ in drafter.seen)
    assert 8 <= most <= MOST_JUMP_FORWARD


def test_a_request_may_forbid_drafts_of_what_is_forced(built: Built) -> None:
    asked, grammar = requests(built)[1]
    capped = SamplingParams(temperature=0.0, max_tokens=60, structured=ASKED[0], num_speculative_tokens=0)
    built.engine.add(Request(id="f", prompt_ids=asked.prompt_ids, params=capped), grammar)
    stats = built.engine.requests["f"][0].stats
    while built.engine.has_work:
        built.engine.step()
    assert stats.num_draft_tokens == 0


def test_completions_of_one_request_stand_in_places_of_their_own(built: Built) -> None:
    several = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=40, structured=ASKED[1])
    built.engine.add(Request(id="n", prompt_ids=prompt(3), params=several), built.compiler.compile(ASKED[1]))
    texts: dict[int, list[int]] = {i: [] for i in range(4)}
    while built.engine.has_work:
        for event in built.engine.step():
            texts[event.index] += event.tokens
    assert all(fits(built, ASKED[1], tokens) for tokens in texts.values())
    assert len({tuple(tokens) for tokens in texts.values()}) == 4


@pytest.mark.parametrize("fault_after", [0, 1, 3])
def test_a_grammar_that_fails_ends_its_own_request_and_says_why(built: Built, alone: Outputs, fault_after: int) -> None:
    eos = built.tokenizer.eos_id
    assert eos is not None
    sentence = [*built.tokenizer.encode("the other stone"), eos]
    grammar: Grammar = LanguageGrammar([sentence, [*sentence[:2], 5, 6, eos]], fault_after)
    failing = Request(id="bad", prompt_ids=prompt(1), params=params(0, Structured.choice(["x"])))
    outputs: Outputs = {}
    errors: dict[str, str] = {}
    codes: set[str | None] = set()
    for each in [*requests(built), (failing, grammar)]:
        built.engine.add(*each)
    while built.engine.has_work:
        for event in built.engine.step():
            outputs.setdefault(event.request_id, []).extend(event.tokens)
            if event.error is not None:
                errors[event.request_id] = event.error
                codes.add(event.error_code)
    assert list(errors) == ["bad"]
    assert "a planted fault" in errors["bad"]
    assert codes == {"completion_failed"}, "that is no fault of the request"
    assert {name: tokens for name, tokens in outputs.items() if name != "bad"} == {
        f"r{i}": alone[f"r{i}"] for i in range(8)
    }
    assert built.engine.cache.num_free == built.engine.cache.num_blocks


def test_a_grammar_that_fails_costs_nobody_a_cached_prefix(built: Built) -> None:
    """Two tenants have the same system prompt; of one of them a request runs, and one fails beside it. The next of
    each, and what comes after that, finds all that was there."""
    engine, eos = built.engine, built.tokenizer.eos_id
    assert eos is not None
    engine.cache.reset_prefix_cache()
    system, free = [(5 * i) % 280 for i in range(48)], params(0, None)
    for tenant in (b"one", b"two"):
        drive(built, [(Request(id="first", prompt_ids=[*system, 9], params=free, salt=tenant), None)])
    engine.add(Request(id="runs", prompt_ids=[*system, 7], params=free, salt=b"one"))
    engine.step()
    before = dict(engine.cache.pool.digests())
    for fault_after in (0, 1, 3):
        grammar: Grammar = LanguageGrammar([[*built.tokenizer.encode("the other stone"), eos]], fault_after)
        asked = params(0, Structured.choice(["x"]))
        engine.add(Request(id="bad", prompt_ids=[*system, 8], params=asked, salt=b"one"), grammar)
        while "bad" in engine.requests:
            engine.step()
        assert dict(engine.cache.pool.digests()).items() >= before.items()
        assert "runs" in engine.requests
    while engine.has_work:
        engine.step()
    for tenant in (b"one", b"two"):
        found = engine.cache.stats.num_prefix_hit_tokens
        drive(built, [(Request(id="next", prompt_ids=[*system, 6], params=free, salt=tenant), None)])
        assert engine.cache.stats.num_prefix_hit_tokens == found + 48


def test_where_nothing_may_come_the_request_ends_with_an_error(built: Built) -> None:
    asked = SamplingParams(temperature=0.0, structured=ASKED[2], bad_words=["x"])
    every = of_ids([(token,) for token in range(293)])
    grammar = built.compiler.compile(ASKED[2])
    request = Request(id="x", prompt_ids=prompt(1), params=asked, bad_words=every)
    with pytest.raises(NoTokenLeftError, match=r"the grammar, .* forbid every one"):
        built.engine.add(request, grammar)
    assert not built.engine.requests, "nothing of it remains"
    ended = msgspec.structs.replace(request, bad_words=None, params=replace(asked, min_tokens=16, bad_words=()))
    built.engine.add(ended, grammar)
    events: list[Event] = []
    while built.engine.has_work:
        events += built.engine.step()
    assert (events[-1].finish_reason, events[-1].error_code) == ("error", "no_token_left")
    assert "grammar" in str(events[-1].error)


def test_a_grammar_that_comes_to_its_limits_is_the_requests_fault(built: Built) -> None:
    class Limited(LanguageGrammar):
        def start(self) -> Any:
            state = super().start()
            fill, num_filled = state.fill, iter(range(100))

            def limited(row: Any) -> None:
                if next(num_filled) > 1:
                    raise RefusedError("it has too many states.")
                fill(row)

            state.fill = limited  # type: ignore[method-assign]
            return state

    asked = SamplingParams(temperature=0.0, structured=ASKED[2], num_speculative_tokens=0)
    request = Request(id="x", prompt_ids=prompt(1), params=asked, drafter="none")
    built.engine.add(request, Limited([[9, 8, 7, 6, 5]]))
    events: list[Event] = []
    while built.engine.has_work:
        events += built.engine.step()
    assert events[-1].error == "The grammar cannot go on here: it has too many states."
    assert events[-1].error_code == "no_token_left"


LANGUAGE = ("the", "then", "other", "on", "one", "ten")


@pytest.fixture(scope="module")
def odds(built: Built) -> dict[tuple[int, ...], float]:
    return exact_law(built, [[*built.tokenizer.encode(text), cast(int, built.tokenizer.eos_id)] for text in LANGUAGE])


@pytest.mark.parametrize(
    ("verification", "drafter"),
    [("coupled", "none"), *itertools.product(["coupled", "rejection", "block"], ["grammar", "chain"])],
)
def test_the_law_under_a_grammar_is_the_models_own_given_that_it_fits(
    tiny: Path, odds: dict[tuple[int, ...], float], verification: str, drafter: str
) -> None:
    """How often each sentence of a small language comes, against its probability under the masked model: the product
    over its tokens of the model's probability among those that may come."""
    built = make(tiny, verification=verification, max_num_seqs=64, max_num_batched_tokens=512)
    language = [list(sentence) for sentence in odds]
    host = ScriptedDrafter({tuple(prompt(2)): language[1]}, 293) if drafter == "chain" else create(drafter)
    built.engine.use(DraftHost(host, built.engine.limits.vocab_size, 10.0, drafter), 4)
    seen: Counter[tuple[int, ...]] = Counter()
    for round_ in range(10):
        asked = SamplingParams(
            n=64, temperature=1.0, seed=round_ * 7919, max_tokens=30, structured=Structured.choice(["x"])
        )
        built.engine.add(Request(id="law", prompt_ids=prompt(2), params=asked), LanguageGrammar(language))
        texts: dict[int, list[int]] = {i: [] for i in range(64)}
        while built.engine.has_work:
            for event in built.engine.step():
                texts[event.index] += event.tokens
        seen.update(tuple(tokens) for tokens in texts.values())
    assert set(seen) <= set(odds), "a sentence that is not in the language"
    total = sum(seen.values())
    observed = [seen[sentence] for sentence in odds]
    expected = [total * p for p in odds.values()]
    pooled = pool(observed, expected)
    assert chisquare(*pooled).pvalue > 1e-4


def exact_law(built: Built, language: list[list[int]]) -> dict[tuple[int, ...], float]:
    """The model's own log-probabilities, one forward pass a sentence, renormalised among what may come."""
    odds: dict[tuple[int, ...], float] = {}
    for sentence in language:
        chance = 1.0
        for place, token in enumerate(sentence):
            may_come = {s[place] for s in language if s[:place] == sentence[:place] and len(s) > place}
            chance *= share(built, [*prompt(2), *sentence[:place]], token, may_come)
        odds[tuple(sentence)] = chance
    assert math.isclose(sum(odds.values()), 1.0, rel_tol=1e-6)
    return odds


def share(built: Built, text: list[int], token: int, may_come: set[int]) -> float:
    scores = {each: score(built, text, each) for each in may_come}
    return math.exp(scores[token]) / sum(map(math.exp, scores.values()))


def score(built: Built, text: list[int], token: int) -> float:
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    built.engine.add(Request(id="score", prompt_ids=[*text, token], params=asked))
    (event,) = [event for _ in range(1) for event in built.engine.step()]
    assert event.prompt_logprobs is not None
    return float(Packed(event.prompt_logprobs)[-1].logprob)


def pool(observed: list[int], expected: list[float]) -> tuple[list[float], list[float]]:
    """Cells that are expected fewer than five times become one."""
    rare = [i for i, e in enumerate(expected) if e < 5]
    common = [i for i, e in enumerate(expected) if e >= 5]
    cells = [(float(observed[i]), expected[i]) for i in common]
    if rare:
        cells.append((float(sum(observed[i] for i in rare)), sum(expected[i] for i in rare)))
    if cells[-1][1] < 1:
        last = cells.pop()
        cells[-1] = (cells[-1][0] + last[0], cells[-1][1] + last[1])
    return [o for o, _ in cells], [e for _, e in cells]


def test_a_planted_fault_in_the_masks_is_caught(
    tiny: Path, odds: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a draft that all have the root's bits: outputs then leave the language."""
    real = Guarded.fill_draft

    def stale(self: Guarded, tokens: Any, parents: Any, ends: Any, rows: Any) -> None:
        real(self, tokens, parents, ends, rows)
        rows[1:] = rows[0]

    monkeypatch.setattr(Guarded, "fill_draft", stale)
    with pytest.raises(AssertionError):
        test_the_law_under_a_grammar_is_the_models_own_given_that_it_fits(tiny, odds, "coupled", "chain")
