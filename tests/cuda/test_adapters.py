"""Adapters on a CUDA device, or one that is faked: each answer is that of its adapter alone, and a graph reads adapters
that were placed after it was captured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.adapters import AdapterSource
from specserve.checkpoint.weights import Weights
from specserve.config import EngineConfig
from specserve.engine.build import Built, build
from specserve.engine.request import Request
from specserve.errors import CapacityError
from specserve.models.decoder import Decoder
from specserve.models.loader import load_model
from specserve.models.lora import read_adapter
from specserve.ops.backend import KernelOptions
from specserve.registry import KERNELS
from specserve.runtime.executor import local
from specserve.runtime.pack import SequenceRows, StepInput, pack
from specserve.runtime.runner import Runner
from specserve.testing import fake_cuda, write_adapter, write_tiny_model
from specserve.types import SamplingParams

TARGETS = (
    ("q_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    ("embed_tokens", "lm_head", "up_proj"),
    ("k_proj", "o_proj", "down_proj"),
)
RANKS = (1, 4, 16, 40)
NAMES = [f"adapter-{i}" for i in range(len(RANKS))]
MIXED = [None, *NAMES]
PROMPTS = [[5 + i, 9, 31, 9, 31, 7, 9, 31, 7, 9] for i in range(len(MIXED))]
PARAMS = [
    SamplingParams(temperature=0.8 if i % 3 == 2 else 0, seed=i, max_tokens=10, ignore_eos=True)
    for i in range(len(MIXED))
]
IS_FAKED = not torch.cuda.is_available()
BLOCK, BLOCKS = 16, 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("cuda") / "tiny", "llama", seed=3, tie_word_embeddings=False, num_hidden_layers=2
    )


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    shapes, folder = {name: info.shape for name, info in Weights(tiny).infos.items()}, tmp_path_factory.mktemp("lora")
    return [
        write_adapter(folder / name, shapes, rank, targets, seed=i)
        for i, (name, rank, targets) in enumerate(zip(NAMES, RANKS, TARGETS, strict=True))
    ]


def make(tiny: Path, adapters: list[Path], **options: Any) -> Built:
    lora = tuple(f"{name}={path}" for name, path in zip(NAMES, adapters, strict=False))
    defaults: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 96, "max_step_ms": 1e9}
    config = defaults | {"adaptive": False, "threads": 1, "drafter": "none", "max_num_batched_tokens": 24} | options
    return build(EngineConfig(model=str(tiny), lora=lora, **config))


def answers(built: Built, names: Sequence[str | None] = MIXED) -> list[list[int]]:
    """Of the prompts of these adapters, in one batch."""
    engine, found = built.engine, dict[str, list[int]]()
    for name in names:
        at = MIXED.index(name)
        engine.add(Request(id=str(name), prompt_ids=PROMPTS[at], params=PARAMS[at], adapter=name))
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            found.setdefault(event.request_id, []).extend(event.tokens)
        assert local(engine.executor).runner._captured.is_replayed == built.ops.records
    return [found[str(name)] for name in names]


def test_answers_are_those_of_each_adapter_alone(tiny: Path, adapters: list[Path], cuda: torch.device) -> None:
    built = make(tiny, adapters)
    together = answers(built)
    assert [answers(built, [name])[0] for name in MIXED] == together
    few = make(tiny, adapters, drafter="ngram", max_loras=2)
    assert answers(few) == together
    assert few.engine.adapters.num_evictions > 0, "slots hold what was placed after their graphs were captured"
    plain = answers(make(tiny, []), [None])
    assert together[0] == plain[0]
    assert len({str(each) for each in together}) == len(MIXED)
    if IS_FAKED:  # a GPU adds in another order
        assert answers(make(tiny, adapters, device="cpu")) == together


def test_adapters_come_and_go_while_it_runs(tiny: Path, adapters: list[Path], cuda: torch.device) -> None:
    wanted = answers(make(tiny, adapters, dtype="bfloat16"))
    built = make(tiny, [], dtype="bfloat16", max_loras=2)
    for i in (3, 1, 2, 1, 0):
        built.engine.adapters.add(built.loader.load(AdapterSource(NAMES[i], str(adapters[i]))))
        assert answers(built, [NAMES[i], None]) == [wanted[1 + i], wanted[0]]
        built.engine.adapters.remove(NAMES[i])


def test_slots_that_do_not_fit_are_refused_at_the_start(
    tiny: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = KERNELS.find("triton").create(KernelOptions(cuda, "bfloat16", "none"))

    def full(*asked: Any, **named: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(CapacityError, match=r"8 LoRA adapters .* lower --max-lora-rank or --max-loras"):
        ops.adapter_bank(8, 576, 960, 192)


def tokens(count: int) -> list[int]:
    return [(i * 37) % 90 + 5 for i in range(count)]


def steps(slots: tuple[int, int, int], multiple: int) -> tuple[StepInput, StepInput]:
    """A prompt of each of three sequences, then a tree of the first, a chain of the second, a token of the third."""
    where = [range(1 + 2 * i, 3 + 2 * i) for i in range(3)]
    prompts = [
        SequenceRows(tokens(3 + i), 0, blocks, adapter=slot)
        for i, (blocks, slot) in enumerate(zip(where, slots, strict=True))
    ]
    drafts = [
        SequenceRows(tokens(4), 3, where[0], [-1, 0, 0, 1], 4, adapter=slots[0]),
        SequenceRows(tokens(2), 4, where[1], num_logits=2, adapter=slots[1]),
        SequenceRows([8], 5, where[2], num_logits=1, adapter=slots[2]),
    ]
    return pack(prompts, multiple), pack(drafts, multiple)


class Served:
    """A model of some backend, with two slots or none."""

    def __init__(self, tiny: Path, backend: Any, device: torch.device, num_slots: int = 2) -> None:
        self.ops = backend.create(KernelOptions(device, "float32", "none"))
        self.model = load_model(tiny, self.ops, 128)
        assert isinstance(self.model, Decoder)
        self.tiny = tiny
        if num_slots:
            self.model.hold_adapters(num_slots, 40)
        kv = [torch.zeros((2, BLOCKS * BLOCK, *shape), device=device) for shape in self.model.spec.kv_shapes]
        self.runner = Runner(self.model, self.ops, kv, BLOCK, 16, 8)

    def place(self, slot: int, adapter: Path | None) -> None:
        packed = None
        if adapter is not None:
            packed = self.model.pack_adapter(read_adapter(adapter, self.tiny, 40).weights)
        self.model.place_adapter(slot, packed)

    def logits(self, slots: tuple[int, int, int]) -> Tensor:
        """Of the drafts, on the host."""
        for step in steps(slots, self.ops.row_multiple):
            self.runner.start(step)
            found = self.runner.finish()
            assert found.is_replayed == self.ops.records
        return found.logits.cpu()[:7].clone()  # and padding


@pytest.mark.skipif(not IS_FAKED, reason="there is a CUDA device, which runs them in all other tests")
def test_the_kernels_themselves_are_replayed_and_are_the_reference_s(tiny: Path, adapters: list[Path]) -> None:
    interpreter = pytest.importorskip("triton", reason="Triton is not installed")
    if not interpreter.knobs.runtime.interpret:
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    with fake_cuda(interprets=True) as device:
        kernels: Any = KERNELS.find("triton")
        kernels.buckets = (16,)
        served = [Served(tiny, kernels, device), Served(tiny, KERNELS.find("reference"), torch.device("cpu"))]
        for slot, adapter in ((0, adapters[1]), (1, adapters[2])):
            for each in served:
                each.place(slot, adapter)
        slots = 0, -1, 1
        found, wanted = (each.logits(slots) for each in served)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        plain = Served(tiny, kernels, device, 0).logits((-1, -1, -1))
        assert torch.equal(found[4:6], plain[4:6]), "the bits of an engine without adapters"
        assert not torch.allclose(found[:4], plain[:4], atol=1e-2)
        for each in served:
            each.place(0, adapters[3])
            each.place(1, None)
        found, wanted = (each.logits(slots) for each in served)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        assert torch.equal(found[4:], plain[4:])
