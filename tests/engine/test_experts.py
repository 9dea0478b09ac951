"""Engines on models with experts: what is generated depends neither on company, drafters, memory nor chunks, though
every row takes its own way through the weights."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.models.heads.formats import write_head
from specserve.models.heads.spec import BlockSpec, EagleSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.speculation.host import DraftHost
from specserve.testing import ScriptedDrafter, check_integrity, llama_spec, tiny_config, write_tiny_model
from specserve.testing.heads import random_weights
from specserve.types import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)
SHARP = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.2, seed=9, max_tokens=24, ignore_eos=True)
CASES = (
    ("mixtral", {"dtype": "float32"}),
    ("mixtral", {"dtype": "float32", "quantization": "int4"}),
    ("qwen2_moe", {"dtype": "float32", "quantization": "int8"}),
    ("qwen3_moe", {"dtype": "bfloat16"}),
    ("olmoe", {"dtype": "float32", "quantization": "int8"}),
)
VOCAB = tiny_config("mixtral")["vocab_size"]
HAS_NATIVE = importlib.util.find_spec("specserve.kernels._native") is not None


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join((case[0], *case[1].values())))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A model's folder, and how its weights are kept."""
    family, options = request.param
    if "quantization" in options and not HAS_NATIVE:
        pytest.skip("Built without native kernels.")
    return write_tiny_model(tmp_path_factory.mktemp(family), family, seed=3), options


def make(case: tuple[Path, dict[str, Any]], scripted: Any = None, **options: Any) -> Engine:
    defaults = {"max_model_len": 160, "max_step_ms": 1e9, "drafter": "none", "adaptive": False, "kv_cache_gib": 0.05}
    engine = build(EngineConfig(model=str(case[0]), **{**defaults, **case[1], **options})).engine
    if scripted is not None:
        engine.use(DraftHost(scripted, engine.limits.vocab_size, 10.0), 6)
    return engine


def mixed(count: int = 8) -> list[Request]:
    prompts = [[(7 * i + 3 * j * j + j) % 280 for j in range(5 + 13 * i % 60)] for i in range(count)]
    params = GREEDY, SEEDED, SHARP
    return [Request(id=f"r{i}", prompt_ids=each, params=params[i % 3]) for i, each in enumerate(prompts)]


def drive(engine: Engine, requests: list[Request]) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens.setdefault((event.request_id, event.index), []).extend(event.tokens)
        check_integrity(engine.cache, engine.scheduler.running)
    assert engine.policy.num_dropped == 0
    return tokens


@pytest.fixture(scope="module")
def alone(case: tuple[Path, dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    """Each request by itself, without a drafter."""
    engine, outputs = make(case, prefix_caching=False), {}
    for request in mixed():
        outputs |= drive(engine, [request])
    assert len({tuple(tokens) for tokens in outputs.values()}) == len(mixed()), "outputs must differ to tell anything"
    return outputs


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4, "threads": 2},
        {"max_num_seqs": 16},
        {"max_num_batched_tokens": 24, "threads": 2},
        {"drafter": "ngram", "max_num_seqs": 4},
        {"drafter": "recycle", "adaptive": True},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_company_chunks_and_look_ups_change_nothing(case: Any, alone: Any, options: dict[str, Any]) -> None:
    engine = make(case, **options)
    for _ in range(2):  # the second time prompts are hits of the prefix cache
        assert drive(engine, mixed()) == alone
    assert engine.cache.stats.num_prefix_hit_tokens > 0
    assert (engine.counters.num_prefill_chunks > 0) == ("max_num_batched_tokens" in options)


@pytest.mark.parametrize("small", [False, True])
def test_trees_and_preemption_change_nothing(case: Any, alone: Any, small: bool) -> None:
    drafter = ScriptedDrafter({tuple(r.prompt_ids): alone[r.id, 0] for r in mixed()}, VOCAB, accuracy=0.8, decoys=2)
    block_bytes = 3 * 2 * 2 * tiny_config(case[0].name.rstrip("0123456789"))["head_dim"] * 16
    block_bytes *= 2 if case[1]["dtype"] == "bfloat16" else 4
    limits = {"kv_cache_gib": 14 * block_bytes / 2**30, "max_num_seqs": 16} if small else {"max_num_seqs": 5}
    engine = make(case, drafter, **limits)
    assert drive(engine, mixed()) == alone
    assert drafter.num_accepted > 30
    assert (engine.counters.num_preemptions > 0) == small


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family, seed=3)
    greedy = [Request(id=each.id, prompt_ids=each.prompt_ids, params=GREEDY) for each in mixed(4)]
    found = drive(make((folder, {"dtype": "float32"}), drafter="ngram"), greedy)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request in greedy:
        prompt = torch.tensor([request.prompt_ids])
        seen = torch.ones_like(prompt)
        ids = model.generate(prompt, attention_mask=seen, do_sample=False, max_new_tokens=24, eos_token_id=VOCAB + 1)
        assert found[request.id, 0] == ids[0, len(request.prompt_ids) :].tolist()


def test_completions_share_a_prompt(case: Any) -> None:
    (request,) = mixed(1)
    params = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=12, ignore_eos=True)
    several = Request(id="n", prompt_ids=request.prompt_ids, params=params)
    found = drive(make(case), [several])
    assert drive(make(case, drafter="ngram", max_num_batched_tokens=8, max_num_seqs=4), [several]) == found
    assert len({tuple(tokens) for tokens in found.values()}) == 3


def test_a_draft_model_with_experts(case: Any, alone: Any, tmp_path: Path) -> None:
    """The target with some noise on its weights: often right and often wrong."""
    shutil.copytree(case[0], tmp_path / "similar")
    generator = torch.Generator().manual_seed(5)
    weights = load_file(case[0] / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight + 0.03 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, tmp_path / "similar" / "model.safetensors", {"format": "pt"})
    engine = make(case, drafter="draft_model", draft_model=str(tmp_path / "similar"))
    for request in mixed():
        engine.add(request)
    stats = [engine.requests[request.id][0].stats for request in mixed()]
    assert drive(engine, []) == alone
    assert sum(each.num_draft_tokens for each in stats) > sum(each.num_accepted_tokens for each in stats) > 10


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_a_head_on_a_target_with_experts(case: Any, alone: Any, tmp_path: Path, kind: str) -> None:
    shape = TargetShape(hidden_size=64, num_layers=3, vocab_size=VOCAB)
    layers = llama_spec(
        vocab_size=VOCAB, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=2048
    )
    common: dict[str, Any] = {"target": shape, "layers": layers, "hidden_layers": (0, 1, 2), "has_head": True}
    spec = EagleSpec(version=3, **common) if kind == "eagle" else BlockSpec(block_size=6, mask_token_id=0, **common)
    write_head(tmp_path, spec, random_weights(spec.shapes()), None, Verifier(str(case[0])))
    engine = make(case, drafter=kind, drafter_options={"head": str(tmp_path)})
    for request in mixed():
        engine.add(request)
    stats = [engine.requests[request.id][0].stats for request in mixed()]
    assert drive(engine, []) == alone
    assert sum(each.num_draft_tokens for each in stats) > 100
