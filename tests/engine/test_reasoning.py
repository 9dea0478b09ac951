"""Reasoning before structured output, through the whole engine: the same tokens with any draft, batch and lack of
memory, wherever in a draft reasoning ends; and the law of the first token, where the model may reason or answer."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import pytest
from scipy.stats import chisquare
from tokenizers import AddedToken, Tokenizer as Backend

from specserve.bench.drive import NoTarget
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.packed import Packed
from specserve.engine.request import Request
from specserve.llm import LLM
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import prepare
from specserve.structured.base import Grammar
from specserve.structured.reasoning import ReasoningGrammar, ReasoningState, _Phase, _Place
from specserve.structured.spec import Structured
from specserve.testing import LanguageGrammar, ScriptedDrafter, check_integrity, write_tiny_model
from specserve.text.reasoning import Reasoning
from specserve.types import SamplingParams

Outputs = dict[str, list[int]]
Asked = tuple[Request, Grammar | None]  # with its grammar, compiled

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": [1, 2, 3]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
ASKED = (Structured.json(SCHEMA), Structured.choice(["then", "other", "stone"]))
NAMES = ("none", "ngram", "suffix", "recycle", "grammar", "chain", "tree")
COUNT = 12


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
    options = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, **options}  # no chunk ends by the clock
    return build(EngineConfig(model=str(tiny), **options))


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(5 + 3 * i % 20)]


def params(i: int, structured: Structured | None) -> SamplingParams:
    temperature = 0.0 if i % 4 < 2 else 1.0
    return SamplingParams(temperature=temperature, seed=i, max_tokens=80, structured=structured)


@pytest.fixture(scope="module")
def free(built: Built) -> Outputs:
    """What is said without a grammar, and without an end where there is to be one: its beginning is the reasoning."""
    found: Outputs = {}
    for i in range(COUNT):
        endless = dict.fromkeys(built.tokenizer.eos_ids, -100.0) if i % 3 else None
        asked = replace(params(i, None), logit_bias=endless)
        found |= drive(built, [(Request(id=f"r{i}", prompt_ids=prompt(i), params=asked, drafter="none"), None)])
    return found


def marks(built: Built, free: Outputs, i: int) -> Reasoning:
    """A made-up end of reasoning that comes after a few tokens: one token, or two in a row."""
    said = free[f"r{i}"]
    place = next(at for at in range(3 + i % 4, len(said)) if said[at] not in said[:at])
    close = tuple(said[place - i % 2 : place + 1])
    return Reasoning((291,), close, (), frozenset(), built.tokenizer.eos_ids)


def requests(built: Built, free: Outputs, drafter: str | None = None) -> list[Asked]:
    """Every third one is free."""
    made = []
    for i in range(COUNT):
        asked = ASKED[i // 3 % len(ASKED)] if i % 3 else None
        grammar: Grammar | None = None
        if asked is not None:
            grammar = ReasoningGrammar(built.compiler.compile(asked), marks(built, free, i), is_open=True)
        made.append((Request(id=f"r{i}", prompt_ids=prompt(i), params=params(i, asked), drafter=drafter), grammar))
    return made


def drive(built: Built, asked: list[Asked]) -> Outputs:
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
def alone(built: Built, free: Outputs) -> Outputs:
    found: Outputs = {}
    for request in requests(built, free, "none"):
        found |= drive(built, [request])
    return found


def test_the_answer_fits_and_the_reasoning_is_as_it_was(built: Built, free: Outputs, alone: Outputs) -> None:
    ended = 0
    for request, grammar in requests(built, free):
        said = alone[request.id]
        if grammar is None:
            assert said == free[request.id]
            continue
        asked = request.params.structured
        assert asked is not None
        assert isinstance(grammar, ReasoningGrammar)
        close = grammar.reasoning.close
        end = next(at for at in range(len(said) + 1) if tuple(said[at - len(close) : at]) == close and at >= len(close))
        assert said[:end] == free[request.id][:end]
        assert end >= 4
        if said[-1] in built.tokenizer.eos_ids:
            ended += 1
            text = built.tokenizer.decode(said[end:], skip_special_tokens=True)
            value = json.loads(text) if asked.kind == "json_schema" else text
            schema = SCHEMA if asked.kind == "json_schema" else {"enum": json.loads(asked.text)}
            assert jsonschema_rs.is_valid(schema, value)
    assert ended >= 5, "too few ended within their limit to tell anything"


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_no_draft_across_the_end_of_reasoning_changes_an_output(
    tiny: Path, free: Outputs, alone: Outputs, name: str, batch: int
) -> None:
    built = make(tiny, max_num_seqs=batch)
    use(built, name, alone)
    assert drive(built, requests(built, free)) == alone


def use(built: Built, name: str, script: Outputs) -> None:
    scripts = {tuple(prompt(i)): script[f"r{i}"] for i in range(COUNT)}
    luck: dict[str, Any] = {"accuracy": 0.8, "decoys": 2 if name == "tree" else 0}
    drafter = ScriptedDrafter(scripts, 293, **luck) if name in ("chain", "tree") else create(name)
    built.engine.use(DraftHost(drafter, built.engine.limits.vocab_size, 10.0, name), 5)


def test_preemption_keeps_reasoning_where_it_was(tiny: Path, free: Outputs, alone: Outputs) -> None:
    built = make(tiny, kv_cache_gib=0.0002, max_num_batched_tokens=24)
    assert drive(built, requests(built, free)) == alone
    assert built.engine.counters.num_preemptions > 0, "the cache was to be too small"


@pytest.mark.parametrize("fault", ["late", "early"])
def test_an_end_of_reasoning_that_is_seen_too_late_or_too_early_is_caught(
    tiny: Path, free: Outputs, alone: Outputs, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """vLLM #36138 and #44297: the grammar began a token after the end, or where a draft that was taken back ended."""
    thinking, rollback = ReasoningState._thinking, ReasoningState.rollback

    def late(self: ReasoningState, token: int) -> _Place:
        if self._place.matched == len(self._close):
            return _Place(_Phase.ANSWERING, 0, self._place.moved, False)
        found = thinking(self, token)
        return replace(found, phase=_Phase.THINKING)

    def early(self: ReasoningState, n: int) -> None:
        was = self._place
        rollback(self, n)
        if was.phase is _Phase.ANSWERING and self._place.phase is _Phase.THINKING:
            self._place = _Place(_Phase.ANSWERING, 0, self._place.moved, False)

    monkeypatch.setattr(
        ReasoningState, "_thinking" if fault == "late" else "rollback", late if fault == "late" else early
    )
    built = make(tiny)
    use(built, "chain", alone)
    with pytest.raises(AssertionError):
        assert drive(built, requests(built, free)) == alone


@pytest.mark.parametrize("drafter", ["none", "chain"])
def test_the_law_of_the_first_token_is_the_models_own_among_what_may_come(tiny: Path, drafter: str) -> None:
    """Where the model may open its reasoning, that token has the model's own share beside those that begin an
    answer."""
    built = make(tiny, max_num_seqs=64, max_num_batched_tokens=512)
    tokenizer, eos = built.tokenizer, built.tokenizer.eos_id
    assert eos is not None
    scores = first_scores(built)
    opening, *firsts = sorted(scores, key=scores.__getitem__, reverse=True)[:5]
    language = LanguageGrammar([[first, 5, eos] for first in firsts])
    marks = Reasoning((opening,), (280,), (), frozenset(), tokenizer.eos_ids)
    grammar = ReasoningGrammar(language, marks, is_open=False)
    host = ScriptedDrafter({tuple(prompt(2)): [opening, 7]}, 293) if drafter == "chain" else create(drafter)
    built.engine.use(DraftHost(host, built.engine.limits.vocab_size, 10.0, drafter), 3)
    seen: Counter[int] = Counter()
    for round_ in range(10):
        asked = SamplingParams(
            n=64, temperature=1.0, seed=round_ * 7919, max_tokens=2, structured=Structured.choice(["x"])
        )
        built.engine.add(Request(id="law", prompt_ids=prompt(2), params=asked), grammar)
        said: dict[int, list[int]] = {i: [] for i in range(64)}
        while built.engine.has_work:
            for event in built.engine.step():
                said[event.index] += event.tokens
        seen.update(tokens[0] for tokens in said.values())
        assert all(tokens[1] == 5 for tokens in said.values() if tokens[0] != opening)
        assert not any(set(tokens) & tokenizer.eos_ids for tokens in said.values())
    places = [opening, *firsts]
    assert set(seen) <= set(places)
    odds = [math.exp(scores[token]) for token in places]
    expected = [sum(seen.values()) * p / sum(odds) for p in odds]
    assert min(expected) >= 5
    assert chisquare([seen[token] for token in places], expected).pvalue > 1e-4


def first_scores(built: Built) -> dict[int, float]:
    """The model's own log-probabilities of its likeliest first tokens that are text."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    built.engine.add(Request(id="score", prompt_ids=prompt(2), params=asked))
    (event,) = built.engine.step()
    assert event.logprobs is not None
    return {token: score for token, score in Packed(event.logprobs)[0].top.items() if token < 280}


# --- the SDK ----------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if thinking == 'open' %}<think>\n"
    "{% elif thinking == 'none' %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model one of whose tokens that come often is called </think>."""
    folder = write_tiny_model(tmp_path_factory.mktemp("reasoner"), "llama", seed=3, vocab_size=296)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<x>")])
    backend.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


def test_chats_with_a_model_that_reasons(reasoner: Path) -> None:
    """The prompt decides: inside reasoning everything but the end may come; with none the answer begins at once; and
    where the model may choose, a bias decides here."""
    question = [{"role": "user", "content": "Why?"}]
    with LLM(str(reasoner), dtype="float32", max_model_len=200) as llm:
        opening, closing = (llm.tokenizer.added_tokens[text] for text in ("<think>", "</think>"))

        def ask(thinking: str, bias: dict[int, float], **options: Any) -> list[int]:
            asked = SamplingParams(
                temperature=0.0, max_tokens=40, structured=ASKED[1], logit_bias=bias, skip_special_tokens=False
            )
            return llm.chat(question, asked, thinking=thinking, **options)[0].outputs[0].token_ids

        def is_answer(tokens: list[int]) -> bool:
            return tokens[-1] in llm.tokenizer.eos_ids and llm.tokenizer.decode(tokens) in ("then", "other", "stone")

        assert is_answer(ask("none", {}))
        never_closed = ask("open", {closing: -100.0, llm.tokenizer.eos_id or 0: 100.0})
        assert len(never_closed) == 40
        assert not set(never_closed) & llm.tokenizer.eos_ids, "no end before the answer has begun"
        at_once = ask("open", {closing: 100.0})
        assert at_once[0] == closing
        assert is_answer(at_once[1:])
        chosen = ask("own", {opening: 100.0, closing: -100.0})
        assert chosen[0] == opening
        assert len(chosen) == 40
        not_chosen = ask("own", {opening: -100.0})
        assert is_answer(not_chosen)
        raw = SamplingParams(temperature=0.0, max_tokens=40, structured=ASKED[1], logit_bias={opening: 100.0})
        assert is_answer(llm.generate("Once upon", raw)[0].outputs[0].token_ids), "plain text has no turn to reason in"
