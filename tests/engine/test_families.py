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
from specserve.models.heads.formats import write_head
from specserve.models.heads.spec import EagleSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import check_tensors, native_model_types
from specserve.runtime.executor import local
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import prepare
from specserve.structured.spec import Structured
from specserve.testing import (
    TINY_ARCHITECTURES,
    ScriptedDrafter,
    check_integrity,
    llama_spec,
    tiny_config,
    write_tiny_model,
)
from specserve.testing.causal_models import write_tiny_causal_model
from specserve.testing.heads import random_weights
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


def make(folder: Path, own: Any = None, **options: Any) -> Built:
    """With the weights that the kernels choose by themselves. No chunk ends by the clock."""
    defaults = {"max_model_len": 96, "max_step_ms": 1e9, "drafter": "none", "adaptive": False, "max_num_seqs": 8}
    built = build(EngineConfig(model=str(folder), **{**defaults, **options}))
    if own is not None:
        built.engine.use(DraftHost(own, VOCAB, 10.0), 6)
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


@pytest.mark.parametrize(
    "kind",
    [
        *("stablelm", "ernie4_5_moe", "glm4_moe"),
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("granitemoe", "flex_olmo", "hunyuan_v1_moe")),
    ],
)
def test_texts_of_a_model_that_runs_through_transformers_depend_on_nothing_else(kind: str, tmp_path: Path) -> None:
    check_texts(write_tiny_causal_model(tmp_path, kind, seed=4, vocab_size=VOCAB))


@pytest.mark.parametrize("kind", ["eagle", "draft_model", "draft_model of another kind"])
def test_heads_and_draft_models_run_beside_one_that_runs_through_transformers(kind: str, tmp_path: Path) -> None:
    """Its embedding, final norm, LM head and taps are there for them; and it may draft for a native model."""
    general = write_tiny_causal_model(tmp_path / "general", "stablelm", seed=4, vocab_size=VOCAB)
    native = write_tiny_model(tmp_path / "native", "llama", seed=4)
    target, draft_model = (native, general) if kind.endswith("kind") else (general, native)
    own: dict[str, Any] = {"drafter": "draft_model", "draft_model": str(draft_model)}
    if kind == "eagle":
        own = {"drafter": kind, "drafter_options": {"head": str(write_random_eagle(tmp_path / "head", target))}}
    which = range(2)
    expected, built = drive(make(target), which), make(target, **own)
    for i in which:
        built.engine.add(Request(id=f"r{i}", prompt_ids=prompt(i), params=PARAMS[i]))
    stats = built.engine.requests["r0"][0].stats
    assert drive(built, range(0)) == expected
    assert stats.num_draft_tokens > 20


def test_heads_run_beside_a_model_whose_embedding_is_projected(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target", "opt_350m", seed=4)
    head = write_random_eagle(tmp_path / "head", target)
    expected = drive(make(target), range(2))
    built = make(target, drafter="eagle", drafter_options={"head": str(head)})
    for i in range(2):
        built.engine.add(Request(id=f"r{i}", prompt_ids=prompt(i), params=PARAMS[i]))
    stats = built.engine.requests["r0"][0].stats
    assert drive(built, range(0)) == expected
    assert stats.num_draft_tokens > 20


def write_random_eagle(folder: Path, target: Path) -> Path:
    spec = check_tensors(target).spec
    shape = TargetShape(hidden_size=spec.hidden_size, num_layers=spec.num_layers, vocab_size=spec.vocab_size)
    layers = llama_spec(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=16, intermediate_size=96, max_len=spec.max_len,
    )  # fmt: skip
    head = EagleSpec(version=1, target=shape, layers=layers)
    write_head(folder, head, random_weights(head.shapes()), None, Verifier(str(target)))
    return folder


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
