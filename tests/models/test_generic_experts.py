"""Mixtures of experts that run through transformers: its own scores, rows with the same bits in any company, tensors by
expert or stacked, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.models.generic.experts import Experts, Product, RouterLinear, RowsApart
from specserve.models.loader import check_tensors, find_architecture, load_model
from specserve.models.transformers import TransformersModel
from specserve.testing import PagedDecoder, unequal_rows
from specserve.testing.causal_models import tiny_causal_config, write_tiny_causal_model
from tests.models.test_transformers import CPU, PROMPT, native, transformers_logits

KINDS = (
    *("afmoe", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "granitemoe"),
    *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1", "mellum", "minimax_m2", "solar_open"),
)


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


def check_equal(model: Any, expected: Tensor) -> None:
    assert isinstance(model, TransformersModel)
    paged = PagedDecoder(model, 2, 48)
    for found in (paged.chunks(0, PROMPT, 45), paged.chunks(1, PROMPT, 10)):
        error = (found - expected).abs().max() / expected.abs().max()
        assert error < 1e-4, f"relative error {error:.1e}"
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert unequal_rows(model) == []


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_transformers_own_and_rows_keep_their_bits(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_causal_model(tmp_path, kind, seed=3)
    model = load_model(folder, native("float32"))
    assert any(isinstance(each, Experts) for each in model._base.modules())
    check_equal(model, transformers_logits(folder, PROMPT))
    packed = ("bfloat16", "int8", "int4")[KINDS.index(kind) % 3]
    assert unequal_rows(load_model(folder, native(packed))) == []


@pytest.mark.parametrize(
    "kind", ["glm4_moe", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("granitemoe", "hunyuan_v1_moe"))]
)
def test_reference_kernels_serve_them_too(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_causal_model(tmp_path, kind, seed=3)
    check_equal(load_model(folder, Kernels(CPU, torch.float32)), transformers_logits(folder, PROMPT))


@pytest.mark.parametrize("kind", ["flex_olmo", "minimax_m2"])
def test_packed_experts_are_close_where_no_row_can_go_elsewhere(kind: str, tmp_path: Path) -> None:
    """With as many experts as each row goes to: else a rounding before a router may send a row to another one."""
    number = {"flex_olmo": "num_experts", "minimax_m2": "num_local_experts"}[kind]
    folder = write_tiny_causal_model(tmp_path, kind, seed=3, **{number: 3})
    expected = transformers_logits(folder, PROMPT)
    for weights, most in (("bfloat16", 0.03), ("int8", 0.1), ("int4", 1.0)):
        found = PagedDecoder(load_model(folder, native(weights)), 1, 48).chunks(0, PROMPT, 45)
        error = (found - expected).norm() / expected.norm()
        assert error < most, f"{weights}: relative error {error:.1e}"


@pytest.mark.parametrize("kind", ["glm4_moe", "hunyuan_v1_moe"])
def test_routers_stay_in_float32(kind: str, tmp_path: Path) -> None:
    model = load_model(write_tiny_causal_model(tmp_path, kind, seed=3, num_hidden_layers=3), native("int4"))
    products = [each._product for each in model._base.modules() if isinstance(each, RouterLinear)]
    products += [] if model._apart is None else list(model._apart._matrices.values())
    assert len(products) >= 2
    for product in products:
        assert isinstance(product, Product)
        inputs, outputs = product._sizes
        assert outputs == 12
        one = torch.eye(inputs)[:4]
        found = product(one)
        stored = load_file(tmp_path / "model.safetensors")
        routers = [each for name, each in stored.items() if each.shape == (outputs, inputs)]
        assert any(torch.equal(found, each[:, :4].T) for each in routers)


def stack(folder: Path, target: Path) -> None:
    """Write a checkpoint with the experts of each layer in two tensors."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    blocks = {name.partition(".experts.")[0] for name in tensors if ".experts.0." in name}
    assert blocks
    for block in blocks:
        own = {
            part: [tensors.pop(f"{block}.experts.{i}.{part}_proj.weight") for i in range(12)]
            for part in ("gate", "up", "down")
        }
        pairs = [torch.cat(pair) for pair in zip(own["gate"], own["up"], strict=True)]
        tensors |= {f"{block}.experts.gate_up_proj": torch.stack(pairs)}
        tensors |= {f"{block}.experts.down_proj": torch.stack(own["down"])}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def test_experts_may_be_stored_one_by_one_or_stacked(tmp_path: Path) -> None:
    folder = write_tiny_causal_model(tmp_path / "one", "glm4_moe", seed=3)
    stack(folder, tmp_path / "stacked")
    found = [
        PagedDecoder(load_model(each, native("int8")), 1, 48).chunks(0, PROMPT, 45)
        for each in (folder, tmp_path / "stacked")
    ]
    assert torch.equal(*found)


def test_a_tensor_of_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_tiny_causal_model(tmp_path, "glm4_moe", seed=3)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        check_tensors(folder)


@pytest.mark.parametrize(
    ("kind", "overrides", "words"),
    [
        ("aria_text", {}, "its experts have matrices that are transposed"),
        ("minimax_m3_vl_text", {}, "its experts have a gate of their own"),
        ("glm4_moe", {"hidden_act": "relu"}, "its experts' activation is ReLU"),
        ("sarvam_moe", {}, "in a form that would have to be converted"),
        ("jetmoe", {}, "it reduces over rows"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(kind: str, overrides: dict[str, Any], words: str) -> None:
    config = tiny_causal_config(kind, **overrides).to_dict()
    with pytest.raises(ModelError) as error:
        find_architecture({**config, "architectures": None}).spec(config)
    assert words in str(error.value) or words in str(error.value).lower()


def test_a_row_that_is_sent_to_no_expert_has_no_numbers(tmp_path: Path) -> None:
    model = load_model(write_tiny_causal_model(tmp_path, "flex_olmo", seed=3), native("float32"))
    experts = next(each for each in model._base.modules() if isinstance(each, Experts))
    x, weights = torch.ones(3, 64), torch.full((3, 3), 0.3)
    found = experts(x, torch.tensor([[0, 1, 2], [3, 12, 4], [5, 6, 7]]), weights)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


# Functions of a few numbers of each row


def choose(x: Tensor, k: int) -> list[Tensor]:
    """What routers do with scores [rows, experts]."""
    probabilities = F.softmax(x, dim=-1)
    values, index = torch.topk(probabilities, k)
    some = torch.topk(x, k, sorted=False)[1]
    own = probabilities.gather(-1, index)
    return [
        probabilities, values, index, some, own / own.sum(-1, keepdim=True), own.sum(-1),
        torch.zeros_like(x).scatter_(1, index, 1.0), F.softmax(values, dim=-1), x.sort(-1)[1],
    ]  # fmt: skip


@pytest.mark.parametrize("experts", [2, 7, 12, 16, 60, 64, 128, 160, 256, 384])
def test_what_routers_do_keeps_rows_apart(experts: int) -> None:
    """Ties among scores, too: rows of few different numbers."""
    random = torch.Generator().manual_seed(experts)
    scores = torch.randn(37, experts, generator=random)
    for x in (scores, scores.round()):
        for k in {1, 2, min(8, experts)}:
            together = choose(x, k)
            for rows in (slice(0, 1), slice(5, 8), slice(20, 37)):
                for one, other in zip(choose(x[rows].clone(), k), together, strict=True):
                    assert torch.equal(one, other[rows])


@pytest.mark.parametrize("is_one_thread", [True, False])
def test_sigmoids_keep_rows_apart(is_one_thread: bool) -> None:
    mode = RowsApart({}, is_one_thread)
    for experts in (1, 5, 12, 16, 31, 40, 64):
        x = 3 * torch.randn(33, experts, generator=torch.Generator().manual_seed(experts))
        for function in (torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.silu):
            with mode:
                together = function(x)
                alone = torch.cat([function(x[i : i + 1].clone()) for i in range(33)])
            assert torch.equal(together, alone)
            assert torch.allclose(together, function(x), atol=1e-6)
    assert mode.was_asked
