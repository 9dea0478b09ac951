"""A smaller model as drafter: outputs are plain decoding's whatever happens to a sequence, what it draws has the law it
says, and models that cannot draft for a target are refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from scipy import stats

from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.errors import ConfigError, InputError, ModelError
from specserve.llm import LLM
from specserve.ops.backend import KernelOptions
from specserve.registry import KERNELS
from specserve.sampling import noise
from specserve.speculation.draft_sampler import DraftSampler
from specserve.testing import check_integrity, write_tiny_model
from specserve.text.tokenizer import Tokenizer
from specserve.text.vocabularies import shared_vocabulary
from specserve.types import SamplingParams

REFERENCE = KERNELS.find("reference").create(KernelOptions(torch.device("cpu"), "float32", "none"))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)
SHARP = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.2, seed=9, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=3)


@pytest.fixture(scope="module")
def similar(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with some noise on its weights: often right and often wrong."""
    folder = tmp_path_factory.mktemp("similar") / "model"
    shutil.copytree(tiny, folder)
    generator = torch.Generator().manual_seed(5)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight + 0.03 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def tinier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape, and of fewer tokens than the target has."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return write_tiny_model(tmp_path_factory.mktemp("draft"), "llama", seed=8, **shape)


def make(model: Path, **options: Any) -> Engine:
    defaults = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "drafter": "none", "adaptive": False}
    if "draft_model" in options:
        defaults["drafter"] = "draft_model"
    return build(EngineConfig(model=str(model), **{**defaults, **options})).engine


def prompt(i: int, length: int = 0) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(length or 5 + 13 * i % 60)]


def mixed(count: int) -> list[Request]:
    params = GREEDY, SEEDED, SHARP
    return [Request(id=f"r{i}", prompt_ids=prompt(i), params=params[i % 3]) for i in range(count)]


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
    assert engine.cache.num_free == engine.cache.num_blocks
    return tokens


# --- right, wrong and in turns ---------------------------------------------------------------------------------------


def test_the_target_itself_is_always_right(tiny: Path) -> None:
    """Greedy, and sampled with the target's noise."""
    engine = make(tiny, draft_model=str(tiny))
    requests = [Request(id=f"r{i}", prompt_ids=prompt(i), params=(GREEDY, SEEDED)[i % 2]) for i in range(4)]
    for request in requests:
        engine.add(request)
    counted = [engine.requests[request.id][0].stats for request in requests]
    drive(engine, [])
    assert all(each.num_accepted_tokens == each.num_draft_tokens > 0 for each in counted)
    assert all(each.num_steps == 1 + 4 for each in counted), "one token, then 23 by sixes"


def test_no_drafts_beyond_its_context(tiny: Path, tinier: Path) -> None:
    requests = [
        Request(id="short", prompt_ids=prompt(1, 30), params=dataclasses.replace(GREEDY, max_tokens=80)),
        Request(id="long", prompt_ids=prompt(2, 70), params=GREEDY),
    ]
    wanted = drive(make(tiny), requests)
    engine = make(tiny, draft_model=str(tinier))
    for request in requests:
        engine.add(request)
    short, long = (engine.requests[request.id][0].stats for request in requests)
    assert drive(engine, []) == wanted
    assert short.num_draft_tokens > 20
    assert long.num_draft_tokens == 0


def test_drafters_take_turns(tiny: Path, similar: Path, tinier: Path) -> None:
    """As `bench` has them: one that comes back has its KV where it was, and finds nothing of what was there before."""
    with LLM(str(tiny), dtype="float32", adaptive=False, kv_cache_gib=0.05, draft_model=str(similar)) as llm:
        outputs = []
        for name, model in (("none", None), ("draft_model", similar), ("ngram", None), ("draft_model", tiny)):
            llm.use_drafter(name, 5, **({} if model is None else {"model": str(model)}))
            (found,) = llm.generate([prompt(3, 45)], [GREEDY])
            outputs.append(found.outputs[0])
        with pytest.raises(ConfigError, match="KV must be planned at the start"):
            llm.use_drafter("draft_model", 5, model=str(tinier))
    assert len({tuple(each.token_ids) for each in outputs}) == 1
    right = outputs[3].stats
    assert right.num_accepted_tokens == right.num_draft_tokens > 0, "prefix hits have no KV of the model before"


# --- the same law -----------------------------------------------------------------------------------------------------


class View:
    def __init__(self, seed: int, temperature: float, length: int) -> None:
        self.seed, self.temperature, self.tokens = seed, temperature, [0] * length


@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
def test_tokens_are_drawn_from_what_is_said(verification: str) -> None:
    """The false alarm is 1 in 10,000, with seeds that are fixed."""
    sampler, count = DraftSampler(verification, 8, REFERENCE), 20_000
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1)).repeat(count, 1)
    seqs: Any = [View(seed, 0.8, 5) for seed in range(count)]
    first = sampler.sample(seqs, logits, sampler.keys(seqs), 0)
    second = sampler.sample(seqs, logits, first.keys, 1)
    law = torch.softmax(logits[0].double() / 0.8, -1).numpy()
    pairs = Counter(zip(first.tokens, second.tokens, strict=True))
    seen = np.array([[pairs[a, b] for b in range(6)] for a in range(6)])
    assert stats.chisquare(seen.ravel(), count * np.outer(law, law).ravel()).pvalue > 1e-4
    if verification == "coupled":
        assert first.q == [None] * count
        scores = (logits[:50].double() / 0.8).log_softmax(-1)
        keys = noise.row_keys(range(50), [5] * 50, [noise.Purpose.SAMPLE] * 50)
        assert first.tokens[:50] == noise.sample(scores, keys, noise.hash_tokens(torch.arange(6))).tolist()
    else:
        q = first.q[0]
        assert q is not None
        assert q.shape == (8,)
        assert np.allclose(q[:6].numpy(), law, atol=1e-6)
        assert not q[6:].any()


def test_what_a_tree_is_chosen_by_has_the_targets_noise() -> None:
    """Then it begins with what the target would say, and the second best is what it would say without that."""
    sampler, draw = DraftSampler("coupled", 50, REFERENCE), torch.Generator().manual_seed(3)
    ids, logits = torch.randperm(50, generator=draw)[:30].sort().values, torch.randn(40, 30, generator=draw)
    seqs: Any = [View(seed, (0.0, 0.6, 1.3)[seed % 3], 4) for seed in range(40)]
    depths = [seed % 5 for seed in range(40)]
    noisy = sampler.noisy(seqs, depths, logits, ids)
    assert torch.equal(noisy[::3], logits[::3])
    best, shares = sampler.best(noisy, 2, ids)
    for depth in range(5):
        drawn = sampler.sample(seqs, logits, sampler.keys(seqs), depth, ids)
        for row in range(depth, 40, 5):
            assert best[row] == [drawn.tokens[row], drawn.second[row][0]]
            assert shares[row] == pytest.approx([drawn.confidence[row], drawn.second[row][1]], rel=1e-4)
    for verification in ("rejection", "block"):
        assert DraftSampler(verification, 50, REFERENCE).noisy(seqs, depths, logits, ids) is logits


def test_greedy_ones_are_not_drawn() -> None:
    sampler = DraftSampler("rejection", 5, REFERENCE)
    logits = torch.tensor([[0.0, 3.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 5.0, 0.0]])
    seqs: Any = [View(1, 0.0, 3), View(2, 1.0, 3)]
    drawn = sampler.sample(seqs, logits, sampler.keys(seqs), 0)
    assert drawn.tokens[0] == 1
    assert drawn.q[0] is None
    assert drawn.q[1] is not None
    assert drawn.confidence[0] == pytest.approx(float(torch.softmax(logits[0], -1)[1]))


# --- who cannot draft -------------------------------------------------------------------------------------------------


def respelled(tiny: Path, folder: Path, move: Callable[[int, int], int]) -> Path:
    """A copy of the model whose tokens have other ids: move(id, how many there are)."""
    shutil.copytree(tiny, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {word: move(token, len(words)) for word, token in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return folder


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_model_of_another_vocabulary_drafts_by_bytes(tiny: Path, tmp_path: Path, top_k: int) -> None:
    """The target itself with its ids in another order, and so its embedding: its drafts are right."""
    folder = respelled(tiny, tmp_path / "other", lambda token, count: (token + 100) % count)
    weights = load_file(folder / "model.safetensors")
    words = len(json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = torch.cat((weights[name][:words].roll(100, 0), weights[name][words:])).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    expected = drive(make(tiny, drafter="none"), mixed(4))
    engine = make(tiny, draft_model=str(folder), drafter_options={"top_k": top_k})
    for request in mixed(4):
        engine.add(request)
    counted = [engine.requests[request.id][0].stats for request in mixed(4)]
    assert drive(engine, []) == expected
    drafted = sum(each.num_draft_tokens for each in counted)
    assert sum(each.num_accepted_tokens for each in counted) > (0.8 if top_k == 1 else 0.2) * drafted > 20


def test_tokens_that_it_does_not_have_are_read_by_their_ends(tiny: Path, tmp_path: Path) -> None:
    folder = respelled(tiny, tmp_path / "other", lambda token, count: (token + 1) % count)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    words = tokenizer["model"]["vocab"]
    own, other = Tokenizer(tiny), Tokenizer(folder)
    size = own.vocab_size
    plain = shared_vocabulary(own, other, (size, size), "other")
    assert plain.ids is not None
    assert plain.rows is not None
    assert plain.reads is not None
    assert all(
        own.token_bytes(i) == other.token_bytes(j) for i, j in zip(plain.ids.tolist(), plain.rows.tolist(), strict=True)
    )
    assert plain.reads[plain.ids].tolist() == plain.rows.tolist()
    long = next(word for word in sorted(words, key=len, reverse=True) if len(word) > 2)
    words["\u0120nothing" + long] = words.pop(long)
    tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    changed = shared_vocabulary(own, Tokenizer(folder), (size, size), "other")
    (lost,) = set(plain.ids.tolist()) - set(changed.ids.tolist() if changed.ids is not None else [])
    spelled = own.token_bytes(lost)
    assert changed.reads is not None
    read = Tokenizer(folder).token_bytes(int(changed.reads[lost]))
    assert spelled.endswith(read)
    assert read


def test_a_vocabulary_that_shares_too_little_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    words = tokenizer["model"]["vocab"]
    tokenizer["model"] |= {"vocab": {f"x{word}y" * 3: token for word, token in words.items()}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(ConfigError, match=r"shares [\d,]+ tokens with the target, whose vocabulary has .*It needs 10%"):
        make(tiny, draft_model=str(folder))


def test_what_is_asked_for_in_vain(tiny: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        make(tiny, draft_model="nowhere")
    with pytest.raises(ConfigError, match="Drafter 'draft_model' needs model"):
        make(tiny, drafter="draft_model")
    with pytest.raises(ConfigError, match="--draft-model is for --drafter draft_model, not for 'ngram'"):
        make(tiny, drafter="ngram", draft_model=str(tiny))
    for wrong in (-0.1, 1.5, float("nan"), "0.5", True):
        with pytest.raises(ConfigError, match="min_probability"):
            make(tiny, draft_model=str(tiny), drafter_options={"min_probability": wrong})
    with pytest.raises(InputError, match="must be the engine's --drafter"):
        make(tiny).add(replace(mixed(1)[0], drafter="draft_model"))


@pytest.fixture(scope="module")
def first_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model's first four layers with its own head: a model of another size."""
    folder = tmp_path_factory.mktemp("layers")
    for file in smollm2.iterdir():
        if file.suffix in (".json", ".jinja") and not file.name.startswith("model."):
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}), "utf-8")
    kept = {
        name: weight
        for name, weight in Weights(smollm2).items()
        if not re.match(r"model\.layers\.([4-9]|\d\d)\.", name)
    }
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_real_model_says_the_same(smollm2: Path, first_layers: Path) -> None:
    prompts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was"]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=24) for t in (0.0, 1.0, 0.0)]
    outputs, counted = [], []
    for options in ({"drafter": "none"}, {"draft_model": str(first_layers)}, {"draft_model": str(smollm2)}):
        with LLM(str(smollm2), adaptive=False, kv_cache_gib=0.1, max_model_len=256, **options) as llm:
            found = [each.outputs[0] for each in llm.generate(prompts, params)]
        outputs.append([each.token_ids for each in found])
        counted.append([each.stats for each in found])
    assert outputs[0] == outputs[1] == outputs[2]
    assert sum(each.num_draft_tokens for each in counted[1]) > 100
    assert all(each.num_accepted_tokens == each.num_draft_tokens for each in counted[2]), "it foresees itself"
