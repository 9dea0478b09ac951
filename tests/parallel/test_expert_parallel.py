"""Replicas that have some of a model's experts each, in one process: their answers have the bits of an engine that has
all, whatever the others do; each reads its own experts alone; and who has nothing to do steps for the others."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import LLM, SamplingParams
from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.build import build
from specserve.engine.compiling import Compiling
from specserve.engine.port import LocalPort
from specserve.engine.request import Request
from specserve.errors import ConfigError, EngineError, SpecserveError
from specserve.kernels.reference import Kernels as Reference
from specserve.models.config import Config
from specserve.models.decoder import Decoder
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model, native_spec
from specserve.models.sharding import Shard
from specserve.ops.backend import KernelOptions
from specserve.ops.choice import choose_ops
from specserve.ops.peers import ExpertRows
from specserve.parallel.lockstep import Lockstep
from specserve.server.engine.together import Together
from specserve.testing import random_weights, tiny_config, write_adapter, write_tiny_model
from specserve.testing.heads import trained_eagle
from specserve.types import Event, SequenceStats

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="Built without native kernels."
)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8, seed=11)
PROMPTS = [[(5 + 7 * i + 3 * j * j) % 40 for j in range(6 + 9 * i)] for i in range(6)]
PARAMS = [(GREEDY, SAMPLED)[i % 2] for i in range(len(PROMPTS))]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 160, "threads": 1, "drafter": "none", "adaptive": False, "kv_cache_gib": 0.01,
    "max_num_batched_tokens": 64, "max_num_seqs": 8,
}  # fmt: skip
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mixtral"), "mixtral", seed=3)


@dataclass
class Replica:
    """One of them, on a thread of its own, which builds its engine and runs it until it is told to stop."""

    lockstep: Lockstep
    config: EngineConfig
    port: LocalPort | None = None
    error: BaseException | None = None
    events: dict[str, list[Event | SpecserveError]] = field(default_factory=dict)
    commands: list[Callable[[LocalPort], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.is_ready, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            built = build(self.config, lockstep=self.lockstep)
            port = self.port = LocalPort(built.engine, Compiling(built.compiler, None), built.loader)
            self.is_ready.set()
            while not self._stop:
                while self.commands:
                    self.commands.pop(0)(port)
                if not port.step() and not self.lockstep.join():
                    select.select([self.lockstep.bell], [], [], 0.002)
        except BaseException as error:
            self.error = error
        finally:
            self.lockstep.leave()
            self.is_ready.set()

    def submit(self, name: str, prompt: list[int], params: SamplingParams, **fields: Any) -> None:
        heard = self.events.setdefault(name, [])
        request = Request(id=name, prompt_ids=prompt, params=params, **fields)
        self.commands.append(lambda port: port.submit(request, heard.append))

    def tokens(self, name: str) -> list[int]:
        """Of the best completion, once it has ended."""
        until(lambda: self.error is not None or any(map(is_last, self.events[name])))
        if self.error is not None:
            raise self.error
        found: list[int] = []
        for event in self.events[name]:
            assert isinstance(event, Event), event
            found += event.tokens if event.index == 0 else []
        return found

    def stats(self, name: str) -> SequenceStats:
        last = self.events[name][-1]
        assert isinstance(last, Event)
        assert last.stats is not None
        return last.stats

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        if self.port is not None:
            self.port.close()


def is_last(event: Event | SpecserveError) -> bool:
    return isinstance(event, SpecserveError) or (event.index == 0 and event.finish_reason is not None)


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def lockstep(together: Together, number: int) -> Lockstep:
    rank, descriptors = together.inheritance(number)
    memory, *bells = descriptors
    return Lockstep(rank, os.dup(memory), bells)


@contextmanager
def replicas(model: Path, count: int = 2, **options: Any) -> Iterator[list[Replica]]:
    together, config = Together(count), EngineConfig(model=str(model), **{**OPTIONS, **options})
    found = [Replica(lockstep(together, number), config) for number in range(count)]
    try:
        for each in found:
            each.is_ready.wait()
            if each.error is not None:
                raise each.error
        yield found
    finally:
        for each in found:
            each.close()
        together.close()


def answers(found: list[Replica], **fields: Any) -> Tokens:
    """Of all prompts at once, which the replicas share."""
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        found[i % len(found)].submit(f"at once {i}", prompt, params, **fields)
    return [found[i % len(found)].tokens(f"at once {i}") for i in range(len(PROMPTS))]


def alone(found: list[Replica], **fields: Any) -> Tokens:
    """One after the other, all of the last replica."""
    texts: Tokens = []
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        found[-1].submit(f"alone {i}", prompt, params, **fields)
        texts.append(found[-1].tokens(f"alone {i}"))
    return texts


def expected(model: Path, **options: Any) -> Tokens:
    """Of one engine that has all experts."""
    with LLM(str(model), **{**OPTIONS, **options}) as llm:
        return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("architecture", "count", "options"),
    [
        ("mixtral", 2, {}),
        ("qwen2_moe", 2, {"quantization": "int8", "dtype": "auto", "max_num_batched_tokens": 16}),
        ("qwen2_moe", 3, {"threads": 2}),
        ("qwen3_moe", 2, {"quantization": "int4", "dtype": "auto"}),
        ("olmoe", 2, {"dtype": "bfloat16"}),
    ],
)
def test_the_bits_of_one_engine(architecture: str, count: int, options: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", architecture, seed=3)
    with replicas(model, count, **options) as found:
        one = expected(model, **options)
        assert alone(found) == one
        assert answers(found) == one
        assert found[0].lockstep.num_empty_steps > 0


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "ngram", "adaptive": True},
        {"drafter": "suffix"},
        {"drafter": "recycle", "max_num_batched_tokens": 16},
        {"drafter": "draft_model"},
        {"drafter": "eagle"},
    ],
    ids=lambda options: options["drafter"],
)
def test_drafters_change_no_bit(mixtral: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """Of one replica or of all; a draft model has all of its experts itself."""
    one, given = expected(mixtral), {}
    if options["drafter"] == "draft_model":
        given = {"drafter_options": {"model": str(mixtral)}}
    if options["drafter"] == "eagle":
        target = load_model(mixtral, choose_ops(torch.device("cpu"), "float32", "none", 1))
        assert isinstance(target, Decoder)
        spec, weights, d2t = trained_eagle(target, PROMPTS, 3, steps=10)
        write_head(tmp_path, spec, weights, d2t, Verifier(str(mixtral)))
        given = {"drafter_options": {"head": str(tmp_path)}}
    with replicas(mixtral, **options, **given) as found:
        assert answers(found) == one
        assert alone(found) == one
        accepted = sum(found[-1].stats(f"alone {i}").num_accepted_tokens for i in range(len(PROMPTS)))
        assert accepted > 0 or options["drafter"] == "ngram", "while the other has no rows"


def test_beams_and_adapters(mixtral: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(mixtral).infos.items()}
    path = write_adapter(tmp_path / "a", shapes, 3, ("q_proj", "o_proj", "lm_head"), seed=1)
    options: dict[str, Any] = {"lora": (f"a={path}",), "max_loras": 1, "drafter": "ngram"}
    with LLM(str(mixtral), **{**OPTIONS, **options, "drafter": "none"}) as llm:
        adapted = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, adapter="a")]
        plain = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS)]
        beams = llm.beam_search(PROMPTS[1], GREEDY, beam_width=3)[0].outputs[0].token_ids
    with replicas(mixtral, **options) as found:
        assert answers(found, adapter="a") == adapted != plain
        found[0].submit("beams", PROMPTS[1], dataclasses.replace(GREEDY, beam_width=3))
        assert alone(found) == plain
        assert found[0].tokens("beams") == beams


def test_nobody_steps_while_nobody_has_work(mixtral: Path) -> None:
    """And whoever has none wakes when another begins: a step takes no longer than steps do."""
    with replicas(mixtral) as found:
        answers(found)
        until(lambda: not any(each.port.engine.has_work for each in found if each.port is not None))
        time.sleep(0.05)

        def counts() -> list[tuple[int, int]]:
            return [(each.lockstep._begun[each.lockstep.rank], each.lockstep.num_empty_steps) for each in found]

        before = counts()
        time.sleep(0.3)
        assert counts() == before
        assert before[0][0] == before[1][0]
        found[0].submit("one", PROMPTS[0], GREEDY)
        found[0].tokens("one")
        taken = counts()[0][0] - before[0][0]
        assert taken == GREEDY.max_tokens
        until(lambda: found[1].lockstep.num_empty_steps == before[1][1] + taken)


def test_where_one_has_left_nobody_waits(mixtral: Path) -> None:
    with replicas(mixtral) as found:
        found[0].submit("endless", PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=140))
        until(lambda: bool(found[0].events["endless"]))
        begun = time.monotonic()
        found[1].close()
        with pytest.raises(EngineError, match="Another replica has ended"):
            found[0].tokens("endless")
        assert time.monotonic() - begun < 2


class Watched(Mapping[str, torch.Tensor]):
    """Weights that note which were read."""

    def __init__(self, config: Config) -> None:
        self._weights = dict(random_weights(config, 0))
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.add(name)
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_has_its_own_experts_alone(mixtral: Path, rank: int) -> None:
    """Those of others are not even read; of a file that has all packed, it keeps its own."""
    ops, spec, together = choose_ops(torch.device("cpu"), "float32", "none", 1), native_spec(mixtral), Together(2)
    peers = lockstep(together, rank).peers(mixtral, ops, 8)
    together.close()
    part = Shard(rank, 2).of(5)
    weights = Watched(tiny_config("mixtral"))
    Decoder(spec, weights, ops, expert_peers=peers)
    own = {name for name in weights if ".experts." not in name or int(name.split(".experts.")[1][0]) in part}
    assert len(own) < len(weights)
    assert weights.read == own

    kept: dict[str, torch.Tensor] = {}

    def cached(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], torch.Tensor]) -> torch.Tensor:
        return kept.setdefault(name, pack())

    model = Decoder(spec, weights, ops, cached, expert_peers=peers)
    for layer in model._stack.layers:
        for memory in layer.mlp.weights.memory:  # type: ignore[union-attr]
            assert len(memory) == len(part)
            starts = [whole.data_ptr() + part.start * whole.nbytes // 5 for whole in kept.values()]
            assert memory.data_ptr() in starts


def test_what_cannot_be_divided_is_said_before_weights_are_read(mixtral: Path, tmp_path: Path) -> None:
    dense = write_tiny_model(tmp_path / "dense", "llama")
    for model, count, words in (
        (dense, 2, "this model has no experts"),
        (mixtral, 6, "--data-parallel-size is 6, and the model has 5 experts in a layer"),
    ):
        together = Together(count)
        with pytest.raises(ConfigError, match=words):
            build(EngineConfig(model=str(model), **OPTIONS), lockstep=lockstep(together, 0))
        together.close()
    with pytest.raises(ConfigError, match="--enable-expert-parallel: the reference kernels divide no experts"):
        Reference.create(KernelOptions(torch.device("cpu"))).expert_memory(2, ExpertRows(8, 2, 64))
