"""Times by their logarithm, and what the engine counts of masks and forced tokens."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, strategies as st

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.histogram import Histogram
from specserve.structured.base import Grammar
from specserve.structured.spec import Structured
from specserve.testing import write_tiny_model
from specserve.types import SamplingParams

seconds = st.floats(1e-6, 16.0)


@given(st.lists(seconds, min_size=1, max_size=60), st.sampled_from([1, 50, 90, 99, 100]))
def test_a_percentile_is_the_true_one_or_up_to_nine_percent_more(all_times: list[float], percent: int) -> None:
    times = Histogram()
    for each in all_times:
        times.add(each)
    true = sorted(all_times)[-(-percent * len(all_times) // 100) - 1]
    found = times.percentile(percent)
    assert found is not None
    assert true * (1 - 1e-12) <= found <= true * 1.0906


def test_times_that_no_bin_is_for_are_the_shortest_and_the_longest() -> None:
    times = Histogram()
    assert times.percentile(50) is None
    times.add(0.0, 3)
    assert times.percentile(100) == 1e-6
    times.add(3600.0)
    longest = times.percentile(100)
    assert longest is not None
    assert 15 < longest < 17


@given(st.lists(seconds, max_size=20), st.lists(seconds, max_size=20))
def test_the_times_of_a_stretch_are_a_difference(before: list[float], after: list[float]) -> None:
    total, later = Histogram(), Histogram()
    for each in before:
        total.add(each)
    seen = total + Histogram()
    for each in after:
        total.add(each)
        later.add(each)
    assert total - seen == later


def run(built: Built, request: Request, grammar: Grammar | None = None) -> None:
    built.engine.add(request, grammar)
    while built.engine.has_work:
        built.engine.step()


def bound(built: Built, prompt_ids: list[int], asked: Structured) -> tuple[Request, Grammar]:
    params = SamplingParams(temperature=0.0, max_tokens=40, structured=asked)
    return Request(id="bound", prompt_ids=prompt_ids, params=params), built.compiler.compile(asked)


def test_masks_have_a_phase_of_their_own_and_forced_tokens_are_counted(tmp_path: Path) -> None:
    """A text that is forced from its second token on: all but what begins it was drafted and stood, in the sequence's
    counts and in the engine's, and its rows are in the times of masks, which free requests leave alone."""
    folder = write_tiny_model(tmp_path, "llama", seed=3)
    built = build(EngineConfig(model=str(folder), dtype="float32", drafter="none", adaptive=False))
    counters, params = built.engine.counters, SamplingParams(temperature=0.0, max_tokens=40)
    run(built, Request(id="free", prompt_ids=[5, 6, 7], params=params))
    assert sum(counters.mask_per_step.counts) == 0
    assert counters.num_jump_forward_tokens == 0
    before = counters.snapshot()
    built.engine.add(*bound(built, [5, 6, 7], Structured.choice(["the other stone and the other then"])))
    (seq,) = built.engine.requests["bound"]
    while built.engine.has_work:
        built.engine.step()
    assert seq.stats.num_jump_forward_tokens == seq.stats.num_draft_tokens > 5
    assert seq.stats.num_accepted_jump_forward_tokens == seq.stats.num_accepted_tokens > 5
    assert counters.num_jump_forward_tokens == seq.stats.num_jump_forward_tokens
    assert counters.num_accepted_jump_forward_tokens == seq.stats.num_accepted_jump_forward_tokens
    assert sum((counters.mask_per_step - before.mask_per_step).counts) == seq.stats.num_steps
    assert sum((counters.mask_per_row - before.mask_per_row).counts) == seq.stats.num_steps + seq.stats.num_draft_tokens
    assert counters.seconds["mask"] > before.seconds["mask"] > 0
    phases = sum(counters.seconds[phase] for phase in ("draft", "mask", "forward", "sample", "host"))
    assert abs(phases - counters.seconds["total"]) < 1e-9


def test_only_what_a_grammar_forced_is_counted_as_forced(tmp_path: Path) -> None:
    """N-grams draft what the text said before, and that is no forced token although the grammar lets it stand."""
    folder = write_tiny_model(tmp_path, "llama", seed=3)
    built = build(EngineConfig(model=str(folder), dtype="float32", drafter="ngram", adaptive=False))
    built.engine.add(*bound(built, [5, 6, 7] * 5, Structured.regex("[a-z ]{30,}")))
    (seq,) = built.engine.requests["bound"]
    while built.engine.has_work:
        built.engine.step()
    assert seq.stats.num_draft_tokens > 0
    assert seq.stats.num_jump_forward_tokens == 0
