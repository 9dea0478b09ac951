"""What cannot be computed: a draft that cannot changes nothing, a prompt that cannot fails alone, and nobody finds KV
of a computation that failed. The models' weights are finite; BROKEN is a token whose reader overflows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from specserve.config import EngineConfig
from specserve.engine import build as building
from specserve.engine.engine import Engine
from specserve.engine.request import Request
from specserve.runtime.executor import local
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.host import DraftHost
from specserve.testing import check_integrity, write_tiny_model
from specserve.types import Draft, SamplingParams

BROKEN = 200
UNSAID = {BROKEN: -100.0}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=UNSAID)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logit_bias=UNSAID)
PREFIX = [(3 * i * i + i) % 190 for i in range(40)]  # two whole blocks and a half
KERNELS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "reference": {"dtype": "float32"},
}


FOLDERS = ("llama", "gemma3")


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gemma3 has layers with a window. The first number of every embedding is 0 but for BROKEN's, which the first norm
    makes so large that a product overflows."""
    window = {"sliding_window": 4} if request.param == "gemma3" else {}
    folder = write_tiny_model(tmp_path_factory.mktemp("broken"), request.param, seed=3, **window)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][BROKEN, 0] = 1
    weights["model.layers.0.input_layernorm.weight"][0] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "reference":
        request.getfixturevalue("without_native")
    return KERNELS[request.param]


def make(folder: Path, **options: Any) -> Engine:
    options = {"max_model_len": 160, "kv_cache_gib": 0.003, "threads": 1, "num_speculative_tokens": 7, **options}
    return building.build(EngineConfig(model=str(folder), **options)).engine


def run(engine: Engine, *requests: Request) -> dict[str, list[int] | str]:
    """What each request said, or why it failed."""
    for request in requests:
        engine.add(request)
    said: dict[str, list[int] | str] = {}
    while engine.has_work:
        for event in engine.step():
            name = event.request_id + "'" * event.index
            tokens = said.setdefault(name, [])
            assert isinstance(tokens, list), "nothing comes after an error"
            tokens += event.tokens
            if event.error is not None:
                said[name] = event.error
        check_integrity(engine.cache, engine.scheduler.running)
    assert all(layer.isfinite().all() for layer in local(engine.executor).storage.layers)
    return said


class Saboteur:
    """Knows the answer, and puts BROKEN into every draft: in a chain at `at`, in a tree beside the right token. Notes
    the best tokens behind BROKEN, and behind what the sequence has."""

    needs = Needs(top_k=3)

    def __init__(self, answer: list[int], at: int, is_tree: bool) -> None:
        self.answer = answer
        self.at = at
        self.is_tree = is_tree
        self.num_broken = 0
        self.behind_broken: list[int] = []
        self.behind_own: list[int] = []

    def begin(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        said = [len(seq.tokens) - seq.num_prompt for seq, _ in requests]
        return [self.draft(self.answer[at:][: most - 1]) for at, (_, most) in zip(said, requests, strict=True)]

    def draft(self, right: list[int]) -> Draft:
        at = min(self.at, len(right))
        self.num_broken += 1
        tokens = [*right[:at], BROKEN, *right[at:]]
        parents = list(range(-1, len(tokens) - 1))
        if self.is_tree and at < len(right):
            parents[at + 1] = at - 1
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32))

    def observe(self, step: StepReport) -> None:
        assert step.top is not None
        for each in step.seqs:
            for node in range(len(each.draft)):
                if each.draft.tokens[node] == BROKEN:
                    self.behind_broken += step.top[each.logits_start + 1 + node].tolist()
            self.behind_own += step.top[each.logits_start].tolist()

    def end(self, seq: SequenceView) -> None: ...


@pytest.mark.parametrize(
    ("folder", "kernels", "params"),  # any two of them in every combination
    [
        pytest.param(folder, kernels, (GREEDY, SAMPLED)[(i + j) % 2], id=f"{folder}-{kernels}")
        for (i, folder), (j, kernels) in itertools.product(enumerate(FOLDERS), enumerate(KERNELS))
    ],
    indirect=["folder", "kernels"],
)
def test_a_draft_that_cannot_be_computed_changes_nothing(
    folder: Path, kernels: dict[str, Any], params: SamplingParams
) -> None:
    engine = make(folder, **kernels)
    asked = Request(id="a", prompt_ids=PREFIX, params=params)
    plain = run(engine, asked)["a"]
    assert isinstance(plain, list) and len(plain) == 12, plain
    for is_tree in (False, True):
        for at in (0, 1, 3, 5):
            saboteur = Saboteur(plain, at, is_tree)
            engine.use(DraftHost(saboteur, engine.limits.vocab_size, 10.0), 7)
            assert run(engine, asked) == {"a": plain}
            assert saboteur.num_broken >= 2
            assert len(saboteur.behind_broken) >= 6
            assert set(saboteur.behind_broken) == {-1}
            assert min(saboteur.behind_own) >= 0
            engine.cache.reset_prefix_cache()


def test_an_accepted_token_that_cannot_be_read_fails_as_without_drafts(folder: Path, kernels: dict[str, Any]) -> None:
    """The token is forced; what it said before and why it failed are those of plain decoding."""
    engine = make(folder, **kernels)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={BROKEN: 100.0})
    asked = Request(id="a", prompt_ids=PREFIX, params=params)
    plain = run(engine, asked)
    assert "NaN" in plain["a"]
    for is_tree in (False, True):
        engine.use(DraftHost(Saboteur([1, 2, 3], 0, is_tree), engine.limits.vocab_size, 10.0), 7)
        assert run(engine, asked) == plain


def test_a_prompt_that_cannot_be_computed_fails_alone(folder: Path, kernels: dict[str, Any]) -> None:
    """It is computed in chunks, one with the same beginning runs beside it, and another comes after it. Were they to
    find a block of its, they would fail too or say something else."""
    engine = make(folder, max_num_batched_tokens=32, **kernels)
    asked = Request(id="good", prompt_ids=[*PREFIX, 9], params=GREEDY)
    alone = run(engine, asked)
    for at in (0, 15, 16, 33, 39, 90):
        engine.cache.reset_prefix_cache()
        bad_prompt = [*PREFIX, *PREFIX, *PREFIX]
        bad_prompt[at] = BROKEN
        said = run(engine, Request(id="bad", prompt_ids=bad_prompt, params=SamplingParams(n=2, temperature=0)), asked)
        assert all(f"token {at} " in said[name] for name in ("bad", "bad'"))
        assert said["good"] == alone["good"]
        assert run(engine, asked) == alone


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("at", [0, 15, 16, 70])
def test_a_step_that_fails_leaves_nothing_that_is_found(folder: Path, kernels: dict[str, Any], at: int) -> None:
    """The whole blocks of the steps before it are found, bit for bit as another engine makes them of these tokens."""
    engine = make(folder, max_num_batched_tokens=16, max_num_seqs=4, **kernels)
    prompt = (PREFIX * 2)[:at]
    engine.add(Request(id="bad", prompt_ids=[*prompt, BROKEN, *PREFIX], params=GREEDY))
    kept = 0
    while engine.has_work:
        kept = engine.requests["bad"][0].cached
        events = engine.step()
    assert "NaN" in (events[0].error or "") and kept <= at
    assert engine.cache.pool.num_published == kept // 16
    other = make(folder, **kernels)
    run(other, Request(id="good", prompt_ids=[*prompt, 9], params=GREEDY))
    for block, digest in engine.cache.pool.digests():
        same = other.cache.pool.find(digest)
        assert same is not None, "it is of the good tokens alone"
        for one, two in zip(local(engine.executor).storage.layers, local(other.executor).storage.layers, strict=True):
            assert one[:, block * 16 : block * 16 + 16].equal(two[:, same * 16 : same * 16 + 16])
    run(engine, Request(id="good", prompt_ids=[*prompt, 9], params=GREEDY))
    assert engine.cache.stats.num_prefix_hit_tokens == kept // 16 * 16


def test_a_broken_chunk_ends_its_request_at_once(folder: Path) -> None:
    """Not after the rest of a long prompt."""
    engine = make(folder, dtype="float32", max_num_batched_tokens=16)
    engine.add(Request(id="bad", prompt_ids=[BROKEN, *PREFIX, *PREFIX], params=GREEDY))
    (event,) = engine.step()
    assert event.finish_reason == "error"
    assert not engine.has_work
    assert engine.cache.num_free == engine.cache.num_blocks
