"""Steps of models of transformers that are noted and run again: the bits of steps that run as the model's code says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specserve.models.generic import replay
from specserve.models.generic.modules import LastInput
from specserve.models.generic.norms import norm_like
from specserve.models.generic.replay import Replays
from specserve.models.loader import load_model
from specserve.models.transformers import TransformersModel
from specserve.ops import AttentionRows, Ops
from specserve.ops.pieces import Memory
from specserve.testing import Feed, PagedDecoder
from specserve.testing.causal_models import write_tiny_causal_model

cpu = pytest.importorskip("specserve.kernels.cpu", reason="Built without native kernels.")
PROMPT = torch.randint(0, 293, (30,), generator=torch.Generator().manual_seed(5)).tolist()
TREE = Feed(1, [4, 5, 6, 7], [-1, 0, 0, 1])


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


def native(weights: str) -> Ops:
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    made: Ops = cpu.Kernels(dtype, weights if weights.startswith("int") else "none", threads=1)
    return made


def loaded(folder: Path, weights: str = "float32") -> TransformersModel:
    model = load_model(folder, native(weights))
    assert isinstance(model, TransformersModel)
    return model


def logits_of_a_conversation(model: TransformersModel) -> list[torch.Tensor]:
    """Of steps of several numbers of rows, each often enough to be noted and run again, on different tokens."""
    paged, found = PagedDecoder(model, 2, 48), []
    for start in range(0, 24, 4):
        found += paged.step(Feed(0, PROMPT[start : start + 3]))
        found += paged.step(Feed(0, [PROMPT[start + 3]]))
        found += paged.step(Feed(0, [9]), Feed(1, PROMPT[start : start + 2]))
        found += paged.step(TREE)
    return found


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["gemma", "phi", "olmo", "exaone4"])
def test_a_step_that_is_run_again_has_the_bits_of_the_models_code(kind: str, weights: str, tmp_path: Path) -> None:
    model = loaded(write_tiny_causal_model(tmp_path / kind, kind, seed=3), weights)
    assert model.can_replay
    again = logits_of_a_conversation(model)
    model.replays.is_on = False
    for one, other in zip(again, logits_of_a_conversation(model), strict=True):
        assert torch.equal(one, other)


def test_layer_taps_and_hidden_states_are_run_again_too(tmp_path: Path) -> None:
    model = loaded(write_tiny_causal_model(tmp_path, "stablelm", seed=3))
    kv = [torch.zeros(2, 32, *shape) for shape in model.spec.kv_shapes]
    paged = PagedDecoder(model, 1, 32)
    paged.kv = kv

    def step(token: int) -> list[torch.Tensor]:
        plan = model.ops.plan(AttentionRows.pack([0, 2], [0], [[1]], [-1, 0], 1), 16)
        ids, positions = torch.tensor([token, token + 1]), torch.arange(2)
        with torch.inference_mode():
            hidden, logits, best, taps = model.forward(ids, positions, torch.tensor([1]), kv, plan, (0, 2))
        assert len(taps) == 2 and taps[0].shape == (2, 64) and len(logits) == 1
        return [each.clone() for each in (hidden, logits, best, *taps)]

    noted = [step(token) for token in (5, 9, 77)]
    model.replays.is_on = False
    for again, token in zip(noted, (5, 9, 77), strict=True):
        assert all(map(torch.equal, again, step(token)))


def test_a_step_that_looks_at_numbers_runs_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    shared = LastInput(native("float32"))

    def step(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, *more: Any) -> Any:
        found = ids.float() * (2 if int(positions.max()) > 3 else 1)
        return found, found, ids, ()

    replays = Replays(step, shared)
    replays.is_on, kv = True, list[torch.Tensor]()
    for position in (0, 9, 1, 9):
        inputs = torch.tensor([5]), torch.tensor([position]), torch.tensor([0])
        assert replays.run(inputs, kv, None, ())[0].item() == (10 if position > 3 else 5)
    assert not replays.is_on
    assert "run op by op" in caplog.text


def test_a_noted_step_that_gives_other_bits_is_not_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_causal_model(tmp_path / "olmo", "olmo", seed=3)
    right = logits_of_a_conversation(loaded(folder))
    run = replay._Noted.run

    def off_by_a_bit(self: replay._Noted, *given: Any) -> Any:
        residual, logits, *more = run(self, *given)
        return (residual, logits.nextafter(logits + 1), *more)

    monkeypatch.setattr(replay._Noted, "run", off_by_a_bit)
    model = loaded(folder)
    assert not model.can_replay and "gives other numbers" in caplog.text
    for one, other in zip(right, logits_of_a_conversation(model), strict=True):
        assert torch.equal(one, other)


def test_memory_is_handed_out_again_when_nobody_refers_to_it() -> None:
    memory = Memory()

    def take() -> torch.Tensor:
        return memory.take("a", lambda: torch.zeros(4))

    first = take()
    part, address = first[2:], first.data_ptr()
    del first
    second = take()
    assert second.data_ptr() != address, "a part of the first is still in use"
    assert memory.base(part) is not None and memory.base(torch.zeros(4)) is None
    del part
    assert take().data_ptr() == address
    assert memory.num_bytes == 32


class _Rms(nn.Module):
    """As Llama has it, or Gemma with `offset` 1; with `power` 4 no RMS norm."""

    def __init__(self, offset: float = 0.0, power: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 48))
        self.eps, self.offset, self.power = 1e-5, offset, power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * scale * (self.weight + self.offset)


@pytest.mark.parametrize("module", [_Rms(), _Rms(1.0), nn.LayerNorm(48), nn.LayerNorm(48, bias=False)])
def test_norms_are_recognised_by_their_numbers(module: Any) -> None:
    if isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight)
    norm = norm_like(module, LastInput(native("float32")))
    assert norm is not None
    x = torch.randn(1, 5, 3, 48) * 7 + 2
    torch.testing.assert_close(norm(x), module(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("module", [_Rms(power=4), _Rms(2.0), nn.GELU(), nn.Linear(48, 48), nn.GroupNorm(2, 48)])
def test_what_is_no_such_norm_is_left_alone(module: nn.Module) -> None:
    assert norm_like(module, LastInput(native("float32"))) is None
