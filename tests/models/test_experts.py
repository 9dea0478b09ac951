"""Models with experts: the layouts of their checkpoints, and what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.models.decoder import Decoder
from specserve.models.loader import find_architecture, load_model, num_packed_bytes, num_weight_bytes
from specserve.models.spec import ExpertsMlp, GatedMlp, Parallel, Sequential
from specserve.testing import PagedDecoder, llama_spec, tiny_config, write_tiny_model
from specserve.train.heads import layers_spec
from tests.checkpoint.layouts import Awq, Compressed, Float8, Gptq, Layout, write_quantized

CPU = torch.device("cpu")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
PROMPT = torch.randint(0, 293, (45,), generator=torch.Generator().manual_seed(5)).tolist()

needs_native = pytest.mark.skipif(
    importlib.util.find_spec("specserve.kernels._native") is None, reason="built without native kernels"
)


def logits(folder: Path) -> torch.Tensor:
    return PagedDecoder(load_model(folder, Kernels(CPU, torch.float32)), 1, 48).chunks(0, PROMPT, 45)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_layouts_of_a_checkpoint_are_one_model(family: str, tmp_path: Path) -> None:
    """An expert's matrices each by itself, as published; and all experts' in one, as transformers 5 may write them."""
    published = write_tiny_model(tmp_path / "published", family, seed=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(published)
    for original in (True, False):
        folder = tmp_path / str(original)
        shutil.copytree(published, folder)
        model.save_pretrained(folder, save_original_format=original)
        names = set(load_file(folder / "model.safetensors"))
        assert ("model.layers.0.mlp.experts.gate_up_proj" in names) != original
        assert torch.equal(logits(folder), logits(published))


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_normalized": False},
        {"per_token": 2},
        {"per_token": 4},
        {"has_shared_gate": False},
        {"activation": "gelu_tanh"},
    ],
    ids=str,
)
def test_another_description_is_another_model(wrong: dict[str, Any], tmp_path: Path) -> None:
    """What the tests against transformers would notice."""
    folder = write_tiny_model(tmp_path, "qwen2_moe", norm_topk_prob=True)
    model = load_model(folder, Kernels(CPU, torch.float32))
    layers = []
    for layer in model.spec.layers:
        assert isinstance(layer.mlp, ExpertsMlp)
        layers.append(replace(layer, mlp=replace(layer.mlp, **wrong)))
    changed = Decoder(replace(model.spec, layers=tuple(layers)), load_file(folder / "model.safetensors"), model.ops)
    expected = logits(folder)
    error = (PagedDecoder(changed, 1, 48).chunks(0, PROMPT, 45) - expected).abs().max() / expected.abs().max()
    assert error > 1e-2


def stacked(tmp_path: Path, change: dict[str, torch.Tensor | None]) -> Path:
    folder = write_tiny_model(tmp_path / "stacked", "qwen3_moe", seed=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(folder, save_original_format=False)
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    return folder


def load_refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_model(folder, Kernels(CPU, torch.float32))
    return str(error.value)


def test_stacked_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    missing = load_refusal(stacked(tmp_path, {name: None}))
    assert "lacks model.layers.1.mlp.experts.0.gate_proj.weight" in missing
    for shape in ((7, 96, 64), (8, 95, 64), (8, 96, 63)):
        message = load_refusal(stacked(tmp_path, {name: torch.zeros(shape)}))
        assert all(word in message for word in (name, str(shape), "(8, 96, 64)")), message
    twice = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert "a part of it" in load_refusal(stacked(tmp_path, {twice: torch.zeros(48, 64)}))
    spoiled = torch.zeros(8, 96, 64)
    spoiled[5, 90, 3] = torch.nan
    assert f"{name} holds NaN" in load_refusal(stacked(tmp_path, {name: spoiled}))
    strange = "model.layers.9.mlp.experts.gate_up_proj"
    assert strange in load_refusal(stacked(tmp_path, {strange: torch.zeros(8, 96, 64)}))


def test_missing_experts_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    own = "model.layers.2.mlp.experts.4.up_proj.weight"
    del tensors["model.layers.2.block_sparse_moe.experts.4.w3.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert f"lacks {own}" in load_refusal(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 4}))
    assert "experts.4.w1.weight" in load_refusal(folder)


QUANTISED: dict[str, Layout] = {"gptq": Gptq(), "awq": Awq(), "w4a16": Compressed(symmetric=False), "fp8": Float8()}


@pytest.mark.parametrize("layout", QUANTISED)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_quantised_experts_are_their_numbers(family: str, layout: str, tmp_path: Path) -> None:
    """Every expert's own matrices, by their published names; the router is not quantised."""
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 96, "head_dim": 16}
    names = ("_proj", ".w1", ".w2", ".w3")
    numbers = write_quantized(
        tmp_path / "quantised", QUANTISED[layout], family, modules=lambda module: module.endswith(names), **sizes
    )
    write_tiny_model(tmp_path / "plain", family, seed=1, num_hidden_layers=1, **sizes)
    save_file(numbers, tmp_path / "plain" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "quantised"), logits(tmp_path / "plain"))


def refusal(family: str, **overrides: Any) -> str:
    config = tiny_config(family, **overrides)
    with pytest.raises(ModelError) as error:
        find_architecture(config).spec(config)
    return str(error.value)


def test_settings_of_experts_are_checked() -> None:
    assert "num_experts_per_tok is 9, and there are 8" in refusal("qwen3_moe", num_experts_per_tok=9)
    assert "at most 1024" in refusal("mixtral", num_local_experts=2**31 - 1)
    assert "num_experts as 0" in refusal("mixtral", num_local_experts=0)
    assert "no num_experts" in refusal("qwen3_moe", num_experts=None)
    assert "no moe_intermediate_size" in refusal("qwen2_moe", moe_intermediate_size=None)
    assert "no shared_expert_intermediate_size" in refusal("qwen2_moe", shared_expert_intermediate_size=None)
    assert "moe_intermediate_size as 1.5" in refusal("qwen2_moe", moe_intermediate_size=1.5)
    assert "clip_qkv" in refusal("olmoe", clip_qkv=8.0)
    assert "decoder_sparse_step is 0" in refusal("qwen3_moe", decoder_sparse_step=0)
    assert "mlp_only_layers 3" in refusal("qwen2_moe", mlp_only_layers=3)
    dense = llama_spec(
        vocab_size=40, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=32
    )
    experts = ExpertsMlp(num_experts=4, per_token=2, size=8, activation="silu", is_normalized=True)
    for residual in (Parallel(), Parallel(own_norms=True), Sequential(post_norms=True, pre_norms=False)):
        with pytest.raises(ModelError, match="without a norm before them"):
            replace(dense.layers[0], mlp=experts, residual=residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_counted(dtype: torch.dtype, tmp_path: Path) -> None:
    """At most so much: a router is kept in float32, and nothing else of experts is wider than it says."""
    folder = write_tiny_model(tmp_path, "qwen2_moe")
    model = load_model(folder, Kernels(CPU, dtype))
    tensors = load_file(folder / "model.safetensors")
    routers = [tensor for name, tensor in tensors.items() if name.endswith((".gate.weight", "expert_gate.weight"))]
    assert sum(len(router) for router in routers) == 3 * 7
    wide = sum(router.numel() for router in routers)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    tables = 2 * 2048 * 16 * 4
    assert num_weight_bytes(model.spec, dtype) == (numbers - wide) * dtype.itemsize + wide * 4 + tables


@needs_native
@pytest.mark.parametrize("weights", ["none", "int8", "int4"])
def test_packed_memory_is_counted(weights: str, tmp_path: Path) -> None:
    module: Any = importlib.import_module("specserve.kernels.cpu")
    folder = write_tiny_model(tmp_path, "qwen2_moe")
    ops = module.Kernels(torch.float32, weights, 1)
    found: list[int] = []

    def count(name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Any) -> torch.Tensor:
        tensor: torch.Tensor = pack()
        found.append(tensor.nbytes)
        return tensor

    spec = load_model(folder, ops).spec
    tensors = load_file(folder / "model.safetensors")
    Decoder(spec, tensors, ops, count)
    assert num_packed_bytes(spec, ops) == sum(found) + 2 * 2048 * 16 * 4


def test_heads_of_a_target_with_experts_have_none() -> None:
    """Their MLP is as wide as what a token goes through."""
    config = tiny_config("qwen2_moe")
    target = find_architecture(config).spec(config)
    head = layers_spec(target, 1, 40, qk_norm=False)
    assert head.layers[0].mlp == GatedMlp(size=3 * 40 + 72, activation="silu")
