"""Chunks of prompts: as long as their time allows, whatever else a step does, and no output depends on them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.errors import ConfigError
from specserve.runtime.cost import StepCost
from specserve.testing import check_integrity, write_tiny_model
from specserve.types import SamplingParams

DECODE_S, TOKEN_S, CONTEXT_S = 0.010, 2e-4, 1e-6
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", seed=3, max_position_embeddings=4096)


class KnownCost(StepCost):
    """What steps cost is known beforehand, and not what this machine takes."""

    def __init__(self, decode_s: float = DECODE_S) -> None:
        super().__init__()
        self._decode_s = decode_s

    def observe(self, rows: int, context: int, tokens: int, read: float, seconds: float) -> None:
        super().observe(rows, 0, tokens, read, self._decode_s * (rows > 0) + tokens * (TOKEN_S + CONTEXT_S * read))


def make(tiny: Path, cost: StepCost | None = None, **options: Any) -> Engine:
    """An engine that knows what steps cost."""
    options = {"dtype": "float32", "max_model_len": 4096, "kv_cache_gib": 0.005, "prefix_caching": False, **options}
    engine = build(EngineConfig(model=str(tiny), **options)).engine
    engine.scheduler.cost = cost or KnownCost()
    for context in [0.0, 1000.0] * 40:
        engine.scheduler.cost.observe(1, 0, 0, 0.0, 1.0)
        engine.scheduler.cost.observe(1, 0, 100, context, 1.0)
    return engine


def prompt(i: int, length: int) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(length)]


def chunks(engine: Engine, name: str) -> list[tuple[int, int]]:
    """Runs until that request has ended: where each of its chunks began, and its tokens."""
    found = []
    while name in engine.requests:
        (seq,) = engine.requests[name]
        before = seq.cached
        engine.step()
        if seq.num_output == 0 or not found or found[-1][0] + found[-1][1] < seq.num_prompt:
            found.append((before, seq.cached - before if not seq.finished else seq.num_prompt - before))
    return found


def seconds(chunk: tuple[int, int]) -> float:
    start, count = chunk
    return count * (TOKEN_S + CONTEXT_S * (start + count / 2))


@pytest.mark.parametrize(("max_step_ms", "added_s"), [(None, 0.006), (50, 0.04), (11, 0.001)])
def test_a_prompt_beside_a_stream_takes_its_time(tiny: Path, max_step_ms: float | None, added_s: float) -> None:
    engine = make(tiny, max_step_ms=max_step_ms)
    engine.add(Request(id="stream", prompt_ids=prompt(1, 5), params=ENDLESS))
    for _ in range(3):
        engine.step()
    engine.add(Request(id="long", prompt_ids=prompt(2, 2000), params=ONE))
    found = chunks(engine, "long")
    assert sum(count for _, count in found) == 2000
    for chunk in found[:-1]:
        assert seconds(chunk) <= added_s * 1.01 or chunk[1] == 8
        assert seconds((chunk[0], chunk[1] + 2)) > added_s, "and not less than it may"


@pytest.mark.parametrize(
    ("pace", "decode_s", "num_streams", "added_s"),
    [(1, 0.002, 1, 0.003), (2, 0.001, 1, 0.004), (8, 0.004, 1, 0.006), (1, 0.006, 2, 0.009), (8, 0.006, 2, 0.012)],
)
def test_streams_wait_for_prompts_no_longer_than_their_number_allows(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, pace: float, decode_s: float, num_streams: int, added_s: float
) -> None:
    """Where drafts make up for it a step may be longer, but what it gives comes all at once, and late."""
    engine = make(tiny, KnownCost(decode_s))
    for i in range(num_streams):
        engine.add(Request(id=f"stream{i}", prompt_ids=prompt(i, 5), params=ENDLESS))
    for _ in range(num_streams + 2):
        engine.step()
    monkeypatch.setattr(engine.scheduler, "pace", pace)
    monkeypatch.setattr(engine.scheduler, "observe", lambda num_seqs, num_tokens: None)
    engine.add(Request(id="long", prompt_ids=prompt(num_streams, 600), params=ONE))
    for chunk in chunks(engine, "long")[:-1]:
        assert seconds(chunk) <= added_s * 1.01 or chunk[1] == 8
        assert seconds((chunk[0], chunk[1] + 2)) > added_s


def test_a_prompt_alone_gives_way_four_times_a_second(tiny: Path) -> None:
    engine = make(tiny, max_num_batched_tokens=4096)
    engine.add(Request(id="long", prompt_ids=prompt(2, 3000), params=ONE))
    found = chunks(engine, "long")
    assert [round(seconds(chunk), 2) for chunk in found[:-1]] == [0.25] * (len(found) - 1)
    assert len(found) > 3


def test_the_token_budget_holds_beside_the_time(tiny: Path) -> None:
    engine = make(tiny, max_num_batched_tokens=40, max_step_ms=1e6)
    engine.add(Request(id="long", prompt_ids=prompt(2, 200), params=ONE))
    assert [count for _, count in chunks(engine, "long")] == [40] * 5


def test_prompts_share_the_time_of_a_step(tiny: Path) -> None:
    """The first in line takes what it can use; nobody starts where none is left."""
    engine = make(tiny, max_num_batched_tokens=4096)
    for i in range(6):
        engine.add(Request(id=f"r{i}", prompt_ids=prompt(i, 500), params=ONE))
    engine.step()
    assert [len(engine.requests.get(f"r{i}", ())) for i in range(3)] == [0, 1, 1]
    (second,) = engine.requests["r1"]
    assert 0 < second.cached < 500
    assert [seq.request_id for seq in engine.scheduler.running] == ["r1"]


class AnyCost(KnownCost):
    """Whatever is said of time, over and over, prompts are computed."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = itertools.cycle(sizes)

    def chunk(self, seconds: float, context: int) -> int:
        return next(self.sizes)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> list[list[int]]:
    engine = make(tiny, max_step_ms=1e9)
    return [_outputs(engine, [i])[i] for i in range(6)]


def _outputs(engine: Engine, which: list[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {i: [] for i in which}
    for i in which:
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True, n=1 + (i == 3))
        engine.add(Request(id=str(i), prompt_ids=prompt(i, 20 + 45 * i), params=params, drafter="ngram"))
    while engine.has_work:
        for event in engine.step():
            if event.index == 0:
                found[int(event.request_id)] += event.tokens
        check_integrity(engine.cache, engine.scheduler.running)
    return found


@settings(max_examples=min(25, settings().max_examples))
@given(sizes=st.lists(st.sampled_from([0, 1, 3, 8, 17, 64, 10**6]), min_size=1, max_size=30))
def test_no_output_depends_on_where_chunks_end(tiny: Path, alone: list[list[int]], sizes: list[int]) -> None:
    engine = make(tiny, AnyCost(sizes), prefix_caching=True)
    assert _outputs(engine, list(range(6))) == dict(enumerate(alone))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="max_step_ms"):
        EngineConfig(max_step_ms=value)
