"""Beam search in an engine, and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.runtime.executor import local
from specserve.structured.base import Grammar
from specserve.testing import check_integrity
from specserve.types import Event, SamplingParams

Found = list[tuple[list[int], float]]  # ids and score of each answer, best first


def make(tiny: Path, blocks: int | None = None, **options: Any) -> Engine:
    """An engine in fp32; `blocks` sizes the KV cache, null block included."""
    settings = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "adaptive": False, **options}
    engine = build(EngineConfig(model=str(tiny), **settings)).engine
    if blocks is None:
        return engine
    layers = local(engine.executor).storage.layers
    size = len(layers) * layers[0].nbytes // layers[0].shape[1] * engine.cache.block_size
    return build(EngineConfig(model=str(tiny), kv_cache_gib=blocks * size / 2**30, **settings)).engine


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(5 + 13 * i % 60)]


def beams(width: int, n: int | None = None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"beam_width": width, "n": width if n is None else n, "max_tokens": 12, **more})


def finish(engine: Engine) -> list[Event]:
    """All events until nothing is left to do; every invariant of the cache is checked after every step."""
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        check_integrity(engine.cache, engine.scheduler.running)
        for seq in engine.scheduler.running:
            assert 0 <= seq.cached < len(seq.tokens)
    assert engine.cache.num_free == engine.cache.num_blocks
    assert not engine.requests
    return events


def search(engine: Engine, ids: list[int], params: SamplingParams, grammar: Grammar | None = None) -> Found:
    engine.add(Request(id="b", prompt_ids=ids, params=params), grammar)
    return answers(finish(engine), "b")


def answers(events: list[Event], request_id: str) -> Found:
    own = sorted((event for event in events if event.request_id == request_id), key=lambda event: event.index)
    assert [event.error for event in own] == [None] * len(own)
    return [(event.tokens, event.beam[1]) for event in own if event.beam is not None]


def expected(
    reference: Any, ids: list[int], params: SamplingParams, ends: list[int] | None = None, **more: Any
) -> Found:
    """What transformers finds."""
    eos = reference.generation_config.eos_token_id if ends is None else ends
    out = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    lengths = (out.beam_indices >= 0).sum(1).tolist()
    sequences, scores = out.sequences[:, len(ids) :].tolist(), out.sequences_scores.tolist()
    return [(text[:length], score) for text, length, score in zip(sequences, lengths, scores, strict=True)]


def same(ours: Found, theirs: Found) -> None:
    assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=1e-4, abs=1e-4)
