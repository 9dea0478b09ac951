"""What executes steps is exchangeable: with a model in another process, which gets each StepInput over a pipe and sends
a StepOutput back, outputs have the same bits. The other process is this file, run as a program."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.errors import ConfigError
from specserve.models.heads.formats import write_head
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import load_model
from specserve.ops.backend import KernelOptions
from specserve.registry import KERNELS
from specserve.runtime.executor import LocalExecutor, MakeMasks, StepOutput, local
from specserve.runtime.pack import StepInput
from specserve.structured.spec import Structured
from specserve.testing import check_integrity, write_tiny_model
from specserve.testing.heads import trained_block, trained_eagle, trained_medusa
from specserve.types import Event, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
PARAMS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(
        temperature=0.7, top_k=20, repetition_penalty=1.2, seed=9, max_tokens=24, logit_bias={7: 3.0}, min_tokens=20
    ),
    SamplingParams(temperature=0, max_tokens=24, structured=Structured.regex(r"(the|and) [a-z]{3,8}\.")),
    SamplingParams(temperature=1, seed=2, max_tokens=24, structured=Structured.choice(["then", "other", "stone"])),
)


def send(pipe: Connection, what: Any) -> None:
    pipe.send_bytes(pickle.dumps(what))  # tensors by value, too, which `pipe.send` would share


def received(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


class PipeExecutor:
    """Sends steps to an executor that was built of the same configuration in another process."""

    def __init__(self, here: LocalExecutor, pipe: Connection, config: EngineConfig) -> None:
        self._here, self._pipe = here, pipe  # that here has the KV of drafters' models
        self.is_asynchronous = True
        self.block_size, self.num_blocks, self.most_under_way = here.block_size, here.num_blocks, 1
        self.row_multiple, self.max_rows, self.max_logit_rows = here.row_multiple, here.max_rows, here.max_logit_rows
        send(self._pipe, ("build", {**dataclasses.asdict(config), "kv_cache_gib": self._kv_cache_gib()}))

    def start(self, step: StepInput) -> None:
        send(self._pipe, ("start", step))

    def finish(self, masks: MakeMasks) -> StepOutput:
        send(self._pipe, ("finish", masks(None)))
        found, taps = received(self._pipe)
        return replace(found, taps={layer: torch.from_numpy(numbers) for layer, numbers in taps.items()})

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        self._here.copy_slots(sources, targets)
        send(self._pipe, ("copy_slots", (sources, targets)))

    def read_blocks(self, ids: Sequence[int]) -> list[bytes]:
        send(self._pipe, ("read_blocks", ids))
        found: list[bytes] = received(self._pipe)
        return found

    def write_blocks(self, ids: Sequence[int], data: Sequence[bytes]) -> None:
        send(self._pipe, ("write_blocks", (ids, data)))

    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None:
        send(self._pipe, ("set_outputs", (taps, top_k)))

    def _kv_cache_gib(self) -> float:
        per_block = sum(layer.nbytes for layer in self._here.storage.layers) / self.num_blocks
        return (self.num_blocks + 0.5) * per_block / 2**30


def serve(pipe: Connection) -> None:
    """Execute what comes over the pipe until it is closed."""
    while True:
        try:
            kind, what = received(pipe)
        except EOFError:
            return
        if kind == "build":
            executor = build(EngineConfig(**what)).engine.executor
        elif kind == "start":
            executor.start(what)
        elif kind == "finish":
            found = executor.finish(lambda best, masks=what: masks)
            send(pipe, (replace(found, taps={}), {layer: tap.numpy() for layer, tap in found.taps.items()}))
        elif kind == "read_blocks":
            send(pipe, executor.read_blocks(what))
        else:
            getattr(executor, kind)(*what)


@pytest.fixture(scope="module")
def pipe() -> Iterator[Connection]:
    with Listener(family="AF_UNIX") as listener:
        process = subprocess.Popen([sys.executable, __file__, str(listener.address)])
        with listener.accept() as connection:
            yield connection
        assert process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=3)


@pytest.fixture(scope="module")
def heads(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Heads that learned little: they are right sometimes, which is all that is asked here."""
    ops = KERNELS.find("reference").create(KernelOptions(torch.device("cpu"), "float32", "none"))
    target, texts = load_model(tiny, ops), [prompt(i) for i in range(4)]
    trained = {
        "eagle": trained_eagle(target, texts, 3, steps=10),
        "block": trained_block(target, texts, 10),
        "medusa": trained_medusa(target, texts, 10),
    }
    folders = {}
    for name, (spec, weights, d2t) in trained.items():
        folder = tmp_path_factory.mktemp(name)
        write_head(folder, spec, weights, d2t, Verifier(str(tiny)))
        folders[name] = str(folder)
    return folders


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * j * j + j) % 280 for j in range(20 + 13 * i % 60)]


def config_of(model: Path, **options: Any) -> EngineConfig:
    usual: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "max_step_ms": 1e9, "adaptive": False}
    return EngineConfig(model=str(model), **{**usual, **options})


def drive(built: Built) -> dict[str, list[Any]]:
    """What each of a batch of requests says: tokens, log-probabilities, how it ended."""
    requests = [Request(id=f"r{i}", prompt_ids=prompt(i), params=PARAMS[i % len(PARAMS)]) for i in range(10)]
    for each in requests:
        asked = each.params.structured
        built.engine.add(each, None if asked is None else built.compiler.compile(asked))
    found: dict[str, list[Any]] = {}
    while built.engine.has_work:
        for event in built.engine.step():
            _add(found.setdefault(event.request_id, [[], [], None, None]), event)
        check_integrity(built.engine.cache, built.engine.scheduler.running)
    assert built.engine.cache.num_free == built.engine.cache.num_blocks
    assert built.engine.policy.num_dropped == 0
    return found


def _add(known: list[Any], event: Event) -> None:
    assert event.error is None, event.error
    known[0] += event.tokens
    known[1] += (
        [] if event.logprobs is None else [entry for block in event.logprobs for entry in [msgspec.to_builtins(block)]]
    )
    known[2] = event.finish_reason
    known[3] = known[3] or msgspec.to_builtins(event.prompt_logprobs)


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "none"},
        {"drafter": "auto"},
        {"drafter": "suffix", "adaptive": True},
        {"drafter": "draft_model", "drafter_options": {"top_k": 3}},
        {"drafter": "draft_model", "verification": "rejection"},
        {"drafter": "draft_model", "verification": "block", "max_num_batched_tokens": 24},
        {"drafter": "eagle", "drafter_options": {"top_k": 2}},
        {"drafter": "block"},
        {"drafter": "medusa"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.each_choice
@pytest.mark.parametrize("is_scarce", [False, True], ids=["roomy", "preempted"])
def test_a_model_in_another_process_says_the_same(
    tiny: Path, heads: Mapping[str, str], pipe: Connection, options: dict[str, Any], is_scarce: bool
) -> None:
    name = options["drafter"]
    if name == "draft_model":
        options = {**options, "draft_model": str(tiny)}
    elif name in heads:
        options = {**options, "drafter_options": {**options.get("drafter_options", {}), "head": heads[name]}}
    here = build(config_of(tiny, **options))
    if is_scarce:
        storage = local(here.engine.executor).storage
        per_block = sum(layer.nbytes for layer in storage.layers) / storage.num_blocks
        options = {**options, "kv_cache_gib": 14.5 * per_block / 2**30}
        here = build(config_of(tiny, **options))
    config = config_of(tiny, **options)
    kv: list[torch.Tensor] = []

    def connect(executor: LocalExecutor) -> PipeExecutor:
        kv.extend(executor.runner.kv)
        return PipeExecutor(executor, pipe, config)

    there = build(config, connect=connect)
    expected = drive(here)
    assert drive(there) == expected
    assert not any(layer.any() for layer in kv), "nothing was computed here"
    assert (there.engine.counters.num_preemptions > 0) is is_scarce
    with pytest.raises(ConfigError, match="another process"):
        local(there.engine.executor)


def test_blocks_are_read_and_written_where_the_model_is(tiny: Path, pipe: Connection) -> None:
    """A prefix that was computed here is used there, and read from there again."""
    config, tokens = config_of(tiny, drafter="none"), prompt(4)
    here, there = build(config), build(config, connect=lambda own: PipeExecutor(own, pipe, config))
    request = Request(id="r", prompt_ids=tokens, params=GREEDY)
    found: list[Any] = []
    frame: bytes | None = None
    for built in (here, there):
        if frame is not None:
            assert built.prefix_transfer().import_prefix(frame) == 64
        built.engine.add(request)
        events = []
        while built.engine.has_work:
            events += built.engine.step()
        frame = built.prefix_transfer().export_prefix(tokens)
        assert frame is not None
        found.append(([token for event in events for token in event.tokens], frame))
    stats = events[-1].stats
    assert stats is not None
    assert stats.num_prefix_cached_tokens == 64 < len(tokens)
    assert found[0] == found[1]


if __name__ == "__main__":
    with Client(sys.argv[1], family="AF_UNIX") as pipe_to_engine:
        serve(pipe_to_engine)
