"""What one request's text leaves for others: drafts within a tenant, never the text of those that were rejected, and
nothing at all of requests that are private."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from specserve.config import EngineConfig
from specserve.drafters.suffix import Place, tree
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.explained import HIDDEN, Explained
from specserve.speculation.check import checked
from specserve.speculation.tree import Proposals
from specserve.structured.base import Guarded
from specserve.structured.constrain import constrain
from specserve.testing import LanguageGrammar, path_to, write_tiny_model
from specserve.types import Draft, SamplingParams, Sequence

PAIRS_OF_OTHERS = 40  # answers of others, so that hardly a pair of tokens is not in one


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3)
    options: dict[str, Any] = {"drafter": "auto", "adaptive": False, "max_step_ms": 1e9, "num_speculative_tokens": 4}
    return build(EngineConfig(model=str(folder), dtype="float32", max_model_len=160, **options)).engine


def asked(seed: int, **fields: Any) -> Request:
    """A prompt of its own, and an answer that is drawn."""
    ids = [Random(seed).randrange(280) for _ in range(12)]
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
    return Request(id=f"r{seed}", prompt_ids=ids, params=params, **fields)


def run(engine: Engine, request: Request) -> tuple[list[int], list[Explained], dict[str, list[int]]]:
    """The tokens of prompt and output, each step with what was there before it, and what sources drafted."""
    engine.add(request)
    tokens, steps, stats = list(request.prompt_ids), [], None
    while engine.has_work:
        for event in engine.step():
            tokens += event.tokens
            steps += [] if event.explained is None else [event.explained]
            stats = event.stats or stats
    assert stats is not None
    return tokens, steps, stats.by_source


def test_rejected_tokens_of_others_answers_are_not_told(engine: Engine) -> None:
    """They are drafted, so all that is told of them would be; what the request's own text proposed is told."""
    for seed in range(PAIRS_OF_OTHERS):
        run(engine, asked(seed))
    num_hidden = num_told = 0
    for seed in range(100, 104):
        tokens, steps, _ = run(engine, asked(seed, explain=True))
        own_pairs = set(itertools.pairwise(tokens))
        for step in steps:
            num_hidden += step.tokens.count(HIDDEN)
            for node, (token, parent) in enumerate(zip(step.tokens, step.parents, strict=True)):
                if token != HIDDEN and node not in step.path:
                    num_told += 1
                    before = step.tokens[parent] if parent >= 0 else None
                    assert before != HIDDEN, "what follows a hidden token is hidden"
                    assert before is None or (before, token) in own_pairs
    assert num_hidden > 50
    assert num_told > 0


@pytest.mark.parametrize("drafter", ["suffix", "recycle"])
def test_of_private_requests_nothing_is_kept(tmp_path: Any, drafter: str) -> None:
    """The same request again is drafted for as it was at first; within a tenant it is not."""
    folder = write_tiny_model(tmp_path, "llama", seed=3)
    options: dict[str, Any] = {"drafter": drafter, "adaptive": False, "max_step_ms": 1e9, "num_speculative_tokens": 4}
    engine = build(EngineConfig(model=str(folder), dtype="float32", max_model_len=160, **options)).engine
    first, again = (run(engine, asked(1, private=True))[2] for _ in range(2))
    assert first == again
    assert drafter != "recycle" or not engine.policy.own._drafter._tables  # type: ignore[union-attr]
    run(engine, asked(1))
    assert run(engine, asked(1, private=True))[2] == first, "nor is anything taken from others"
    assert run(engine, asked(1))[2] != first
    many = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True, n=3)
    run(engine, Request(id="many", prompt_ids=[1, 2, 3], params=many, private=True))
    engine.policy.close()


def test_what_takes_up_no_place_is_said_of_one_that_shares_nothing(engine: Engine) -> None:
    """Its salt is its own, whatever drafter keys by it."""
    one, two = asked(1, private=True), asked(2, private=True)
    for request in (one, two):
        engine.add(request)
    engine.step()
    views = {seq.request_id: view for part in engine.policy.own.parts for seq, view in part._views.items()}
    assert len({view.salt for view in views.values()}) == 2
    assert all(view.is_private and len(view.salt) == 16 for view in views.values())
    for request in (one, two):
        engine.abort(request.id)


# --- whose a node is, from proposal to what is verified --------------------------------------------------------------


def paths(draft: Draft, nodes: Any) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens[path_to(draft, node)].tolist()) for node in nodes}


texts = st.lists(st.builds(Place, st.integers(1, 4), st.lists(st.integers(0, 3), max_size=4)), max_size=4)


@given(texts, texts, st.integers(1, 8))
def test_a_node_is_own_if_own_text_goes_through_it(own: list[Place], others: list[Place], most: int) -> None:
    draft = tree(own, most, others)
    wanted = {tuple(place.following[: i + 1]) for place in own for i in range(len(place.following))}
    assert paths(draft, draft.own) == paths(draft, range(len(draft))) & wanted
    assert tree([*own, *others], most).tokens.tolist() == draft.tokens.tolist()


drafts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4)


@given(drafts, drafts, st.data())
def test_merging_and_grammars_keep_whose_a_node_is(own: list[Any], others: list[Any], data: st.DataObject) -> None:
    """Own is what some source says is own, and what a grammar forces."""
    chains = [Draft.chain(tokens, own=range(9)) for tokens in own] + [Draft.chain(tokens) for tokens in others]
    taken = [found for each in chains if isinstance(found := checked(each, 9, 4), Draft)]
    merged = Proposals([(f"s{i}", draft) for i, draft in enumerate(taken)])
    whole = merged.draft(range(len(merged)))
    wanted = {tuple(tokens[: i + 1]) for tokens in own for i in range(len(tokens))}
    assert paths(whole, whole.own) == paths(whole, range(len(whole))) & wanted
    sentences = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4))
    language = LanguageGrammar(sentences)
    seq = Sequence(
        request_id="r", index=0, tokens=[9], num_prompt=1, params=SamplingParams(), seed=0, max_tokens=9,
        grammar=Guarded(language.start(), language),
    )  # fmt: skip
    constrained = constrain(seq, whole, 9)
    again = merged.constrained(constrained).draft(range(len(constrained)))
    for draft in (constrained, again):
        for node in range(len(draft)):
            is_own = paths(draft, [node]) <= wanted or node in draft.jump_forward
            assert (node in draft.own) == is_own


def test_a_drafter_that_says_nothing_shows_nothing() -> None:
    draft = checked(Draft.chain([1, 2]), 4, 4)
    assert isinstance(draft, Draft)
    assert draft.own == frozenset()
    more = checked(Draft(np.array([1, 2], np.int32), np.array([-1, -1], np.int32), own=[1, 7, -1]), 4, 4)
    assert isinstance(more, Draft)
    assert more.own == {1}
