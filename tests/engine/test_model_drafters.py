"""Drafters that run a model, a small one or a head: outputs are plain decoding's whatever happens to a sequence, and
what is drawn has the target's law."""

from __future__ import annotations

import dataclasses
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

from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.errors import ConfigError, ModelError
from specserve.llm import LLM
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import Head, hidden_layers, read_head, read_next_token_layers, write_head
from specserve.models.heads.spec import BlockSpec, MedusaSpec
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.backend import KernelOptions
from specserve.registry import DRAFTERS, KERNELS
from specserve.runtime.executor import local
from specserve.speculation import controller
from specserve.speculation.planner import Planner
from specserve.speculation.sources import SourceCost
from specserve.speculation.tree import Proposals
from specserve.speculation.upkeep import Upkeep
from specserve.structured.constrain import constrain
from specserve.structured.spec import Structured
from specserve.structured.walk import visit
from specserve.testing import check_integrity, write_tiny_model
from specserve.testing.heads import (
    add_next_token_layer,
    block,
    eagle,
    eagle_states,
    hidden_states,
    matrices,
    medusa,
    trained_block,
    trained_eagle,
    trained_medusa,
)
from specserve.types import Draft, SamplingParams, Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)
SHARP = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.2, seed=9, max_tokens=24, ignore_eos=True)
NUM_TEXTS = 1_200  # of each law
KINDS = ("draft_model-tree", "draft_model", "eagle3", "eagle1", "block", "block-own-places", "medusa", "mtp", "auto")


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
def heads(tiny: Path, target: Decoder, expected: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads that learned what the target says to the prompts of `mixed`, some of it."""
    texts = [request.prompt_ids + expected[request.id, 0] for request in mixed(4)]
    trained = {
        "eagle3": trained_eagle(target, texts, 3, steps=40),
        "eagle1": trained_eagle(target, texts, 1, steps=40),
        "block": trained_block(target, texts, 120, bigram_rank=8, has_anchor_inputs=True),
        "block-own-places": trained_block(target, texts, 120, samples_anchor=False, is_causal=True),
        "medusa": trained_medusa(target, texts, 40),
    }
    folders = {}
    for name, (spec, weights, d2t) in trained.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        write_head(folder, spec, weights, d2t, Verifier(str(tiny)))
    norms = dict.fromkeys(("first_input_norm", "final_norm", "fc_input_norms", "norm_output"), True)
    layers = dataclasses.replace(target.spec, layers=target.spec.layers[:1])
    spec, weights, _ = trained_eagle(target, texts, 1, steps=40, layers=layers, **norms)
    checkpoint = shutil.copytree(tiny, tmp_path_factory.mktemp("mtp") / "model")
    folders["mtp"] = add_next_token_layer(checkpoint, spec, weights)
    return folders


@pytest.fixture(scope="module")
def target(tiny: Path) -> Decoder:
    ops = KERNELS.find("reference").create(KernelOptions(torch.device("cpu"), "float32", "none"))
    return load_model(tiny, ops)


@pytest.fixture(params=KINDS)
def drafting(request: pytest.FixtureRequest, similar: Path, heads: dict[str, Path]) -> dict[str, Any]:
    """The options of an engine that drafts."""
    if request.param.startswith("draft_model"):
        top_k = 3 if request.param.endswith("tree") else 1
        return {"drafter": "draft_model", "draft_model": str(similar), "drafter_options": {"top_k": top_k}}
    if request.param == "auto":
        return {"drafter": "auto", "drafter_options": {"head": str(heads["block"])}}
    return {
        "drafter": request.param.rstrip("13").partition("-")[0],
        "drafter_options": {"head": str(heads[request.param])} | ({"top_k": 2} if request.param == "eagle1" else {}),
    }


def drafter_of(kind: str) -> str:
    return kind.rstrip("13").partition("-")[0]


def make(model: Path, *some: dict[str, Any], **options: Any) -> Engine:
    merged: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "drafter": "none", "adaptive": False,
    }  # fmt: skip
    for each in (*some, options):
        own = {**merged.get("drafter_options", {}), **each.get("drafter_options", {})}
        merged |= each | ({"drafter_options": own} if own else {})
    return build(EngineConfig(model=str(model), **merged)).engine


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


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[tuple[str, int], list[int]]:
    return drive(make(tiny), mixed(6))


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adaptive": True},
        {"max_num_batched_tokens": 24},
        {"prefix_caching": False, "num_speculative_tokens": 1, "max_num_seqs": 2},
        {"num_speculative_tokens": 12, "drafter_options": {"min_probability": 0.3}},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_outputs_are_those_without_it(
    tiny: Path, drafting: dict[str, Any], expected: Any, options: dict[str, Any]
) -> None:
    engine = make(tiny, drafting, **options)
    for _ in range(2):  # the second time with prefix hits
        for request in mixed(6):
            engine.add(request)
        counted = [engine.requests[request.id][0].stats for request in mixed(6)]
        assert drive(engine, []) == expected
    if not options.get("adaptive"):
        accepted = sum(each.num_accepted_tokens for each in counted)
        drafted = sum(each.num_draft_tokens for each in counted)
        assert 0.1 * drafted < accepted, "sometimes right"
        remembers = drafting["drafter"] == "auto"
        assert accepted < drafted or remembers or options.get("drafter_options"), "and sometimes wrong"


@pytest.mark.parametrize(("kind", "top_k"), [*((kind, 1) for kind in KINDS[2:-1]), ("eagle3", 3), ("eagle1", 2)])
def test_drafts_are_the_reference_s(
    tiny: Path, target: Decoder, heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str, top_k: int
) -> None:
    """What a head is given is right: chunks of prompts, accepted and rejected drafts, prefix hits, preemption."""
    made: list[tuple[list[int], list[int]]] = []
    name = drafter_of(kind)
    drafter = DRAFTERS.find(name)
    propose = drafter.propose

    def watched(self: Any, requests: list[Any]) -> Any:
        drafts = propose(self, requests)
        made.extend(
            (list(each.seq.tokens), draft.tokens.tolist()) for each, draft in zip(requests, drafts, strict=True)
        )
        return drafts

    monkeypatch.setattr(drafter, "propose", watched)
    own = {"head": str(heads[kind])} | ({"top_k": top_k} if top_k > 1 else {})
    options: dict[str, Any] = {"drafter": name, "drafter_options": own}
    storage = local(make(tiny, options).executor).storage
    per_block = sum(layer.nbytes for layer in storage.layers) // storage.num_blocks
    engine = make(tiny, options, max_num_batched_tokens=24, kv_cache_gib=14.5 * per_block / 2**30)
    requests = [replace(each, params=GREEDY) for each in mixed(5)]
    drive(engine, requests)
    drive(engine, requests[:2])
    assert engine.counters.num_preemptions > 0
    assert engine.cache.stats.num_prefix_hit_tokens > 0
    drafted = [(tokens, draft) for tokens, draft in made if draft]
    assert len(drafted) > 0.95 * len(made) > 40
    head, same = (read_next_token_layers if kind == "mtp" else read_head)(heads[kind]), []
    for tokens, draft in drafted[:: len(drafted) // 40]:
        same.append(draft == drafted_by(head, target, tokens, len(draft), top_k))
    assert np.mean(same) > 0.9, "but where a block was found again that lacked its last tokens"


def drafted_by(head: Head, target: Decoder, tokens: list[int], count: int, top_k: int) -> list[int]:
    """What the head drafts greedily behind tokens, in plain torch."""
    spec, weights = head.spec, dict(head.weights)
    hidden = hidden_states(target, tokens[:-1], hidden_layers(spec) or (target.spec.num_layers - 1,))
    if isinstance(spec, MedusaSpec):
        places = medusa(spec, weights, target.final_norm(hidden[0])[-1:]).softmax(-1)
        return tree_of(lambda path: places[len(path), 0] if len(path) < len(places) else None, count, 4)
    if isinstance(spec, BlockSpec):
        rows = count if spec.samples_anchor else count + 1
        logits, _ = block(spec, weights, *matrices(target), hidden, tokens[-1], rows)

        def row_behind(path: list[int]) -> torch.Tensor:
            row, before = logits[rows - count + len(path)], (tokens + path)[-1]
            if spec.bigram_rank:
                row = row + weights["bigram_out.weight"] @ weights["bigram_in.weight"][before]
            return row.softmax(-1)

        return comb_of(row_behind, count)
    states = eagle_states(spec, weights, hidden if spec.version == 3 else [target.final_norm(hidden[0])])

    def behind(path: list[int]) -> torch.Tensor:
        read, known = torch.tensor((tokens + path)[1:]), states
        for _ in range(len(path) + 1):
            logits, out = eagle(spec, weights, *matrices(target), read[: len(known)], known)
            known = torch.cat((known, out[-1:]))
        of_all = torch.zeros(target.spec.vocab_size)
        of_all[torch.arange(len(logits[-1])) + (0 if head.d2t is None else head.d2t)] = logits[-1].softmax(-1)
        return of_all

    return comb_of(behind, count) if top_k == 1 else tree_of(behind, count, top_k)


def comb_of(behind: Callable[[list[int]], torch.Tensor], count: int) -> list[int]:
    """The likeliest tokens of a chain of `count` and of the second best beside each, by depth."""
    path, chance, nodes = list[int](), 1.0, list[tuple[float, int, int]]()
    for depth in range(count):
        best = behind(path).topk(2)
        (first, second), tokens = best.values.tolist(), best.indices.tolist()
        nodes += [(-chance * first, depth, tokens[0]), (-chance * second, depth, tokens[1])]
        path.append(tokens[0])
        chance *= first
    return [token for _, _, token in sorted(sorted(nodes)[:count], key=lambda node: node[1])]


def tree_of(behind: Callable[[list[int]], torch.Tensor | None], count: int, top_k: int) -> list[int]:
    """The likeliest tree's tokens, by what is said behind each path."""
    found, waiting = list[int](), [(-1.0, list[int]())]
    while len(found) <= count:
        chance, path = waiting.pop(0)
        found += path[-1:] or [-1]
        if (said := behind(path)) is not None:
            best = said.topk(top_k)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            waiting = sorted([*waiting, *((chance * own, [*path, token]) for own, token in pairs)])
    return found[1:]


def test_it_survives_preemption(tiny: Path, drafting: dict[str, Any], expected: Any) -> None:
    storage = local(make(tiny, drafting).executor).storage
    per_block = sum(layer.nbytes for layer in storage.layers) // storage.num_blocks
    engine = make(tiny, drafting, max_num_batched_tokens=24, kv_cache_gib=14.5 * per_block / 2**30)
    assert drive(engine, mixed(6)) == expected
    assert engine.counters.num_preemptions > 0


def test_completions_share_a_prompt(tiny: Path, drafting: dict[str, Any]) -> None:
    request = Request(id="n", prompt_ids=prompt(3, 45), params=dataclasses.replace(SEEDED, n=3))
    wanted = drive(make(tiny), [request])
    assert drive(make(tiny, drafting), [request]) == wanted


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("length", [16, 32, 37])
def test_a_head_has_read_the_tokens_that_follow_in_a_cached_prefix(
    tiny: Path, heads: dict[str, Path], version: int, length: int
) -> None:
    """The head's KV of a prompt that begins as another did, and goes on otherwise, is bit for bit what an engine has
    that knows no other. Prompts that begin with all of the one or of the other find it whole, and all KV is theirs."""
    options = {"drafter": "eagle", "drafter_options": {"head": str(heads[f"eagle{version}"])}}
    shared = prompt(3, length)
    first, second = ([*shared, token, *prompt(token, 20)] for token in (7, 8))

    def read(engine: Engine, ids: list[int]) -> torch.Tensor:
        engine.add(Request(id="x", prompt_ids=ids, params=GREEDY))
        (seq,) = engine.requests["x"]
        while seq.num_output < 20:
            engine.step()
            check_integrity(engine.cache, engine.scheduler.running)
        slots = [seq.blocks.ids[i // 16] * 16 + i % 16 for i in range(len(ids))]
        (layer,) = local(engine.executor).storage.layers[3:]
        found = layer[:, slots].clone()
        drive(engine, [])
        return found

    engine, fresh = make(tiny, options), make(tiny, options)
    read(engine, first)
    hits = engine.cache.stats.num_prefix_hit_tokens
    assert torch.equal(read(engine, second), read(fresh, second))
    assert engine.cache.stats.num_prefix_hit_tokens - hits == (length - 1) // 16 * 16, "but for a block that both end"
    for known in (first, second):
        hits = engine.cache.stats.num_prefix_hit_tokens
        longer = [*known, *prompt(9, 20)]
        assert torch.equal(read(engine, longer), read(make(tiny, options), longer))
        assert engine.cache.stats.num_prefix_hit_tokens - hits == len(known) // 16 * 16 > length // 16 * 16


def test_requests_end_at_any_moment(tiny: Path, drafting: dict[str, Any], expected: Any) -> None:
    engine = make(tiny, drafting)
    for step in range(12):
        for request in mixed(4):
            engine.add(request)
        for _ in range(step):
            if engine.has_work:
                engine.step()
        for i in range(3):
            engine.abort(f"r{i}")
        outputs = drive(engine, [])
        assert [key for key in outputs if key[0] != "r3"] == []


@pytest.mark.each_choice
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_a_grammar_holds(
    tiny: Path, drafting: dict[str, Any], verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what models draft keeps to it from the beginning."""
    if drafting["drafter"] == "auto" and verification == "rejection":
        pytest.skip("refused at the start")
    fits = {"ignore_eos": False, "structured": Structured.regex("[a-f ]{8,20}|(abc )+xyz")}
    params = [dataclasses.replace(each, **fits) for each in (GREEDY, SEEDED, SHARP)]
    fitting: list[bool] = []

    def watched(seq: Sequence, draft: Draft, budget: int) -> Draft:
        behind: list[int] = []
        visit(seq.grammar, draft.tokens, draft.parents, seq.stop_ids, behind.append)
        fitting.extend(i in behind for i in range(len(draft)))
        return constrain(seq, draft, budget)

    monkeypatch.setattr(controller, "constrain", watched)
    outputs = []
    for options in ({"drafter": "none"}, drafting):
        mode = {"verification": verification} if options is drafting else {}
        with LLM(str(tiny), dtype="float32", adaptive=False, kv_cache_gib=0.05, **options, **mode) as llm:
            outputs.append([each.outputs[0].token_ids for each in llm.generate([prompt(i) for i in (1, 2, 3)], params)])
    sampled = slice(1) if verification == "rejection" else slice(None)
    assert outputs[0][sampled] == outputs[1][sampled]
    assert drafting["drafter"] == "auto" or (all(fitting) and len(fitting) > 20)


def constrained_pairs(tiny: Path, first_seed: int, **options: Any) -> tuple[Counter[tuple[int, ...]], int]:
    """The second and third token of texts that fit a grammar, and how many of them were drafted."""
    grammar = Structured.regex("[a-d]{1,9}")
    asked = dataclasses.replace(SEEDED, ignore_eos=False, max_tokens=3, temperature=2.0, structured=grammar)
    params = [dataclasses.replace(asked, seed=first_seed + i) for i in range(NUM_TEXTS)]
    together = {"max_num_seqs": 64, "max_step_ms": 1e9, "kv_cache_gib": 0.05}
    with LLM(str(tiny), dtype="float32", adaptive=False, **together, **options) as llm:
        found = [each.outputs[0] for each in llm.generate([prompt(1)] * len(params), params)]
    return Counter(tuple(each.token_ids[1:]) for each in found), sum(each.stats.num_accepted_tokens for each in found)


@pytest.fixture(scope="module")
def plain_constrained_pairs(tiny: Path) -> Counter[tuple[int, ...]]:
    return constrained_pairs(tiny, 10_000, drafter="none")[0]


@pytest.mark.parametrize("drafting", ["draft_model", "eagle3", "block"], indirect=True)
def test_the_law_under_a_grammar_is_the_targets(
    tiny: Path, plain_constrained_pairs: Any, drafting: dict[str, Any]
) -> None:
    """Distributions of drafts are those that grammars leave."""
    drafted, num_accepted = constrained_pairs(tiny, 0, **drafting, verification="rejection")
    assert num_accepted > 50
    assert_alike(plain_constrained_pairs, drafted)


def seeded_pairs(engine: Engine, seeds: range) -> Counter[tuple[int, ...]]:
    """The second and third token of seeded texts."""
    params = [dataclasses.replace(SEEDED, seed=seed, max_tokens=3, temperature=0.35) for seed in seeds]
    outputs = drive(engine, [Request(id=str(p.seed), prompt_ids=prompt(1), params=p) for p in params])
    return Counter(tuple(tokens[1:]) for tokens in outputs.values())


@pytest.fixture(scope="module")
def plain_pairs(tiny: Path) -> Counter[tuple[int, ...]]:
    return seeded_pairs(make(tiny, max_num_seqs=64, max_num_batched_tokens=512), range(10_000, 10_000 + NUM_TEXTS))


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("verification", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("drafting", ["draft_model", "eagle3", "block", "medusa"], indirect=True)
def test_the_law_is_the_targets(tiny: Path, plain_pairs: Any, drafting: dict[str, Any], verification: str) -> None:
    """Pairs of tokens against plain decoding's, compared as two samples; what is rare counts together. The false alarm
    is 1 in 10,000, with seeds that are fixed."""
    mode = {"verification": verification, "num_speculative_tokens": 2}
    engine = make(tiny, drafting, mode, max_num_seqs=64, max_num_batched_tokens=512)
    assert_alike(seeded_pairs(engine, range(NUM_TEXTS)), plain_pairs)


def assert_alike(*samples: Counter[tuple[int, ...]]) -> None:
    common = [pair for pair, count in (samples[0] + samples[1]).most_common() if count >= 10]
    table = [[sample[pair] for pair in common] for sample in samples]
    table = [[*row, sample.total() - sum(row)] for sample, row in zip(samples, table, strict=True)]
    assert stats.chi2_contingency([[*row[:-1], row[-1] + 1] for row in table]).pvalue > 1e-4
    assert sum(table[0][:-1]) > samples[0].total() / 4, "enough is not rare"


@pytest.mark.parametrize("kind", ["block", "eagle3", "medusa"])
def test_auto_merges_the_head_s_drafts_with_what_is_looked_up(
    tiny: Path, heads: dict[str, Path], expected: Any, kind: str
) -> None:
    engine = make(tiny, {"drafter": "auto", "drafter_options": {"head": str(heads[kind])}})
    for request in mixed(6):
        engine.add(request)
    counted = [engine.requests[request.id][0].stats for request in mixed(6)]
    assert drive(engine, []) == expected
    drafted, accepted = np.sum([each.by_source.get(drafter_of(kind), [0, 0]) for each in counted], 0)
    assert 0 < accepted < drafted
    assert sum(each.by_source.get("suffix", [0, 0])[0] for each in counted) > 0


def test_auto_takes_part_in_the_next_token_layers_of_its_target(
    tiny: Path, heads: dict[str, Path], expected: Any
) -> None:
    engine = make(heads["mtp"], {"drafter": "auto"})
    for request in mixed(6):
        engine.add(request)
    counted = [engine.requests[request.id][0].stats for request in mixed(6)]
    assert drive(engine, []) == expected
    drafted, accepted = np.sum([each.by_source.get("mtp", [0, 0]) for each in counted], 0)
    assert 0 < accepted < drafted
    named = make(heads["mtp"], {"drafter": "auto", "drafter_options": {"head": str(heads["block"])}})
    assert "block" in {part.name for part in named.policy.own.parts}
    assert "mtp" not in {part.name for part in named.policy.own.parts}
    assert drive(make(heads["mtp"], {"drafter": "mtp"}), mixed(6)) == expected


def test_next_token_layers_that_are_not_there_or_broken_are_refused(
    tiny: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"no next-token layers .* another drafter, such as auto, or name"):
        make(tiny, {"drafter": "mtp"})
    broken = shutil.copytree(heads["mtp"], tmp_path / "broken")
    stored = load_file(broken / "model.safetensors")
    del stored["model.mtp_layers.0.input_proj.weight"]
    save_file(stored, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks fc\.weight"):
        make(broken, {"drafter": "mtp"})


@pytest.mark.parametrize("drafter", ["eagle", "auto"])
def test_drafts_of_passes_that_are_weighed(
    tiny: Path, heads: dict[str, Path], expected: Any, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Nodes are cut, by nobody's rule, and merged with others', lengths change; blocks are few."""

    def some(self: Any, proposals: list[Proposals], most: int) -> list[list[int]]:
        chosen: list[list[int]] = []
        for each in proposals:
            kept: list[int] = []
            for node, parent in enumerate(each.parents):
                if (parent < 0 or parent in kept) and (len(each) + 3 * node) % 7 and most > 0:
                    kept.append(node)
                    most -= 1
            chosen.append(kept)
        return chosen

    monkeypatch.setattr(Planner, "choose", some)
    monkeypatch.setattr(Planner, "can_draft", lambda *_: True)
    monkeypatch.setattr(SourceCost, "of", lambda *_: 0.0)  # so that it is asked however long a tiny model takes
    monkeypatch.setattr(Upkeep, "took", lambda *_: None)  # and does not rest
    options: dict[str, Any] = {"drafter": drafter, "drafter_options": {"head": str(heads["eagle3"])}, "adaptive": True}
    storage = local(make(tiny, options).executor).storage
    per_block = sum(layer.nbytes for layer in storage.layers) // storage.num_blocks
    engine = make(tiny, options, max_num_batched_tokens=24, kv_cache_gib=14.5 * per_block / 2**30)
    for request in mixed(6):
        engine.add(request)
    counted = [engine.requests[request.id][0].stats for request in mixed(6)]
    assert drive(engine, []) == expected
    assert engine.counters.num_preemptions > 0
    drafted, accepted = np.sum([each.by_source.get("eagle", [0, 0]) for each in counted], 0)
    assert 0 < accepted < drafted
    for _ in range(2):
        assert drive(engine, mixed(5)[4:]) == {("r4", 0): expected["r4", 0]}
    assert engine.cache.stats.num_prefix_hit_tokens > 0


def test_auto_refuses_a_head_whose_drafts_it_may_not_cut(tiny: Path, heads: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"under --verification coupled alone, and it is rejection"):
        make(tiny, {"drafter": "auto", "drafter_options": {"head": str(heads["block"])}}, verification="rejection")
