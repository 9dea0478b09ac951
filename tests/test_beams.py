"""The bookkeeping of beam search: against all texts that there are, and what ends it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from specserve.beams import BeamSearch, Candidate, Choice

END = 0


def texts(search: BeamSearch) -> list[tuple[list[int], float]]:
    return [([each.token for each in answer.beam.path()], answer.score) for answer in search.answers]


def run(search: BeamSearch, logprob: Any, vocab: int) -> None:
    """Search to the end in a model that `logprob(text, token)` is."""
    live: list[tuple[int, ...]] = [()]
    while not search.is_done:
        rows = []
        for text in live:
            found = [Candidate(token, logprob(text, token)) for token in range(vocab)]
            rows.append(sorted(found, key=lambda each: -each.logprob)[: search.num_candidates])
        live = [(*live[beam], token) for beam, token in search.advance(rows)]


def model(seed: int) -> Any:
    return lambda text, token: -random.Random(f"{seed} {text} {token}").expovariate(1.0)


@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]), st.integers(2, 4))
def test_enough_beams_find_the_best_of_all_texts(seed: int, length: int, penalty: float, vocab: int) -> None:
    search = BeamSearch(vocab**length, length, {END}, 1, penalty, "never")
    run(search, model(seed), vocab)
    every: list[tuple[list[int], float]] = []
    for size in range(1, length + 1):
        for text in itertools.product(range(vocab), repeat=size):
            if END not in text[:-1] and (text[-1] == END or size == length):
                total = sum(model(seed)(text[:i], token) for i, token in enumerate(text))
                every.append((list(text), total / size**penalty))
    every.sort(key=lambda one: -one[1])
    best = texts(search)
    assert best[0][0] == every[0][0] and best[0][1] == pytest.approx(every[0][1])
    if penalty >= 0 and len(best) == len(every):
        assert [ids for ids, _ in best] == [ids for ids, _ in every]


@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from([True, False, "never"]))
def test_answers_are_distinct_and_in_order(seed: int, width: int, early: Any) -> None:
    search = BeamSearch(width, 6, {END}, 1, 1.0, early)
    run(search, model(seed), 4)
    found = texts(search)
    assert len(found) == len({tuple(ids) for ids, _ in found}) == width
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


def test_one_beam_is_greedy() -> None:
    search = BeamSearch(1, 5)
    run(search, model(3), 6)
    text: tuple[int, ...] = ()
    for _ in range(5):
        text = (*text, max(range(6), key=lambda token: model(3)(text, token)))
    assert texts(search)[0][0] == list(text)


@pytest.mark.parametrize(("early", "num_steps"), [(True, 2), (False, 3), ("never", 9)])
def test_early_stopping(early: Any, num_steps: int) -> None:
    """True ends at width answers; False where the best live beam, at its length, is no better; "never" where it could
    not become better with all tokens that it may have."""
    rows = [
        [[Candidate(END, -1.0), Candidate(1, -1.2), Candidate(2, -1.3), Candidate(3, -9.0)]],
        [[Candidate(1, -0.01), Candidate(END, -3.0)], [Candidate(END, -9.0), Candidate(2, -9.0)]],
        [[Candidate(1, -8.0), Candidate(2, -8.1)], [Candidate(END, -9.0), Candidate(2, -9.0)]],
    ]
    search = BeamSearch(2, 9, {END}, 1, 1.0, early)
    for step in rows[:num_steps]:
        assert not search.is_done
        search.advance(step)
    while not search.is_done:
        search.advance([[Candidate(1, -0.01)] for _ in search.live])
    assert search.length == num_steps


def test_nothing_that_may_come_ends_it() -> None:
    search = BeamSearch(3, 9, {END}, 1)
    assert search.advance([[Candidate(1, -1.0)]]) == [Choice(0, 1)]
    assert search.advance([[Candidate(END, -1.0)]]) == []
    assert search.is_done and texts(search) == [([1, END], -1.0)]
    search = BeamSearch(3, 9, {END}, 1)
    assert search.advance([[]]) == [] and search.is_done and not search.answers
