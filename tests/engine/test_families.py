"""Every family of models through the whole engine: what is generated does not depend on drafts, company, chunks of
prompts, preemption or prefix hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from specserve.bench.drive import NoTarget
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.models.loader import native_model_types
from specserve.runtime.executor import local
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import prepare
from specserve.structured.spec import Structured
from specserve.testing import TINY_ARCHITECTURES, ScriptedDrafter, check_integrity, tiny_config, write_tiny_model
from specserve.testing.causal_models import write_tiny_causal_model
from specserve.types import SamplingParams

VOCAB = tiny_config("llama")["vocab_size"]
SCHEMA = {"type": "object", "properties": {"the": {"type": "integer"}}, "required": ["the"]}
JSON = Structured.json({**SCHEMA, "additionalProperties": False})
PARAMS = (
    SamplingParams(temperature=0, max_tokens=28, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.95, seed=5, n=2, max_tokens=28, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, max_tokens=24, structured=JSON),
    SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, repetition_penalty=1.3),
)
Outputs = dict[tuple[str, int], list[int]]


def prompt(i: int) -> list[int]:
    """All begin alike, with more than a block."""
    return [(3 * j * j + j) % 280 for j in range(20)] + [(7 * i + j * j) % 280 for j in range(8 + 5 * i)]


def make(folder: Path, drafter: Any = None, **options: Any) -> Built:
    """With the weights that the kernels choose by themselves. No chunk ends by the clock."""
    defaults = {"max_model_len": 96, "max_step_ms": 1e9, "drafter": "none", "adaptive": False, "max_num_seqs": 8}
    built = build(EngineConfig(model=str(folder), **{**defaults, **options}))
    if drafter is not None:
        built.engine.use(DraftHost(drafter, VOCAB, 10.0), 6)
    return built


def block_bytes(built: Built) -> int:
    layers = local(built.engine.executor).storage.layers
    return sum(layer.nbytes // layer.shape[1] for layer in layers) * built.engine.cache.block_size


def drive(built: Built, which: range) -> Outputs:
    """Requests to their ends, all together; every invariant of the cache is checked after every step."""
    engine, outputs = built.engine, cast(Outputs, {})
    for i in which:
        params = PARAMS[i]
        grammar = None if params.structured is None else built.compiler.compile(params.structured)
        engine.add(Request(id=f"r{i}", prompt_ids=prompt(i), params=params), grammar)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            outputs.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check_integrity(engine.cache, engine.scheduler.running)
    assert engine.cache.num_free == engine.cache.num_blocks
    return outputs


def test_every_family_has_a_tiny_model() -> None:
    kinds = native_model_types()
    families = {kinds[tiny_config(name)["model_type"]] for name in TINY_ARCHITECTURES}
    assert families == set(kinds.values())


@pytest.mark.parametrize("family", TINY_ARCHITECTURES)
def test_texts_of_a_family_depend_on_nothing_else(family: str, tmp_path: Path) -> None:
    check_texts(write_tiny_model(tmp_path, family, seed=4))


def test_texts_of_a_model_that_runs_through_transformers_depend_on_nothing_else(tmp_path: Path) -> None:
    check_texts(write_tiny_causal_model(tmp_path, "stablelm", seed=4, vocab_size=VOCAB))


def check_texts(folder: Path) -> None:
    plain, every = make(folder, prefix_caching=False), range(len(PARAMS))
    alone: Outputs = {}
    for i in every:
        alone |= drive(plain, range(i, i + 1))
    assert len({tuple(tokens) for tokens in alone.values()}) == len(PARAMS) + 1, "outputs must differ to tell anything"

    scripts = {tuple(prompt(i)): alone[f"r{i}", 0] for i in every}
    tree = ScriptedDrafter(scripts, VOCAB, accuracy=0.85, decoys=1)
    scarce = make(folder, tree, max_num_batched_tokens=20, kv_cache_gib=8 * block_bytes(plain) / 2**30)
    assert drive(scarce, every) == alone
    assert tree.num_accepted > 10
    assert scarce.engine.counters.num_preemptions > 0
    assert scarce.engine.counters.num_prefill_chunks > 0

    ngram = prepare("ngram", {})
    assert ngram is not None
    again = make(folder, ngram(cast(Any, NoTarget())))
    assert drive(again, every) == alone
    assert drive(again, range(1)).items() <= alone.items()
    assert again.engine.cache.stats.num_prefix_hit_tokens >= 16
