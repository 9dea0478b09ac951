"""`specserve inspect`: what it says of heads, models and neither."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.checkpoint.weights import Weights
from specserve.cli.main import run
from specserve.models.heads.formats import write_head
from specserve.models.heads.spec import EagleSpec, MedusaSpec, TargetShape
from specserve.models.heads.speculators import Verifier
from specserve.models.loader import find_architecture
from specserve.testing import write_adapter, write_tiny_model

Outcome = tuple[int, str, str]


@pytest.fixture
def inspect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Outcome:
        status = run(("inspect", *arguments))
        captured = capsys.readouterr()
        return status, " ".join(captured.out.split()), captured.err

    return call


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


def shape(folder: Path) -> TargetShape:
    config = json.loads((folder / "config.json").read_text())
    return TargetShape(
        hidden_size=config["hidden_size"], num_layers=config["num_hidden_layers"], vocab_size=config["vocab_size"]
    )


def zeros(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def eagle(folder: Path, tiny: Path, target: TargetShape) -> Path:
    config = json.loads((tiny / "config.json").read_text()) | {"num_hidden_layers": 1}
    layers = find_architecture(config).spec(config)
    spec = EagleSpec(version=3, target=target, layers=layers, hidden_layers=(0, 1), has_head=True)
    write_head(folder, spec, zeros(spec.shapes()), None, Verifier("org/tiny"))
    return folder


def test_a_head_and_its_target(inspect: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    folder = eagle(tmp_path / "head", tiny, shape(tiny))
    status, out, _ = inspect(str(folder))
    assert status == 0
    for said in ("Draft head", "kind EAGLE-3", "format speculators", "verifier org/tiny", "layers 0, 1, from 0"):
        assert said in out
    assert "M parameters" in out and "fits" not in out
    status, out, _ = inspect(str(folder / "model.safetensors"), "--target", str(tiny))
    assert status == 0 and f"fits {tiny}: 3 layers" in out


def test_a_head_for_another_target(inspect: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    target = shape(tiny)
    other = TargetShape(hidden_size=target.hidden_size, num_layers=9, vocab_size=target.vocab_size)
    status, out, err = inspect(str(eagle(tmp_path / "head", tiny, other)), "--target", str(tiny))
    assert (status, out) == (2, "")
    assert "a target of 9 layers, and this one has 3" in err


def test_a_damaged_head(inspect: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    folder = eagle(tmp_path / "head", tiny, shape(tiny))
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    status, _, err = inspect(str(folder))
    assert status == 2 and "norm.weight holds NaN" in err


def test_medusa(inspect: Callable[..., Outcome], tmp_path: Path) -> None:
    target = TargetShape(hidden_size=16, num_layers=0, vocab_size=40)
    spec = MedusaSpec(target=target, num_heads=3, draft_vocab_size=40)
    torch.save(zeros(spec.shapes()), tmp_path / "medusa_lm_head.pt")
    status, out, _ = inspect(str(tmp_path))
    assert status == 0
    for said in (
        "Medusa, 3 heads with 1 layers each",
        "layers not said",
        "verifier not named",
        "the final norm's output",
    ):
        assert said in out


def test_a_model(inspect: Callable[..., Outcome], tiny: Path) -> None:
    status, out, _ = inspect(str(tiny), "--target", str(tiny))
    assert status == 0
    for said in ("Model folder", "type llama", "layers 3 of 64", "context 2,048 tokens", "only draft heads"):
        assert said in out


def test_an_adapter_and_whether_it_fits(inspect: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    path = write_adapter(tmp_path / "fr", shapes, 80, ("q_proj", "o_proj"), base_model_name_or_path="org/tiny")
    num_layers = shape(tiny).num_layers
    status, out, _ = inspect(str(path))
    assert status == 0 and "LoRA adapter" in out and "fits" not in out
    for said in (
        "made for org/tiny",
        "rank 80; needs --max-lora-rank 80",
        f"changes {2 * num_layers} layers: o_",
    ):
        assert said in out
    status, out, _ = inspect(str(path / "adapter_model.safetensors"), "--target", str(tiny))
    assert status == 0 and f"changes {2 * num_layers} of its layers" in out
    wide = {name: tuple(2 * size for size in sizes) for name, sizes in shapes.items()}
    other = write_adapter(tmp_path / "other", wide)
    assert inspect(str(other))[0] == 0
    status, _, err = inspect(str(other), "--target", str(tiny))
    assert status == 2 and str(other) in err and "maps" in err


def test_an_adapter_that_is_refused(inspect: Callable[..., Outcome], tiny: Path, tmp_path: Path) -> None:
    shapes = {name: info.shape for name, info in Weights(tiny).infos.items()}
    status, _, err = inspect(str(write_adapter(tmp_path / "dora", shapes, use_dora=True)))
    assert status == 2 and "DoRA" in err
    (tmp_path / "dora" / "adapter_model.safetensors").unlink()
    assert inspect(str(tmp_path / "dora"))[0] == 2


def test_neither(inspect: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    save_file({"pooler.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    status, out, err = inspect(str(tmp_path))
    assert (status, out) == (2, "")
    assert "no draft head of a known format and no model that can be run" in err and "bert" in err


def test_nothing(inspect: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    status, _, err = inspect("empty")
    assert status == 2 and "neither a .safetensors file" in err
    assert inspect("smollm-135m")[0] == 2
