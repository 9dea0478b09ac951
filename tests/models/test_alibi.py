"""ALiBi: slopes against transformers', layers that have it, and that their rows have the same bits in any company."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch

from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.models.decoder import Decoder
from specserve.models.positions import Alibi, Rope
from specserve.models.spec import DecoderSpec
from specserve.ops import Ops
from specserve.testing import PagedDecoder, heads, llama_spec, unequal_rows
from specserve.train.heads import layers_spec

PROMPT = torch.randint(0, 293, (45,), generator=torch.Generator().manual_seed(5)).tolist()
KERNELS = ("reference-float32", "reference-bfloat16", "native-float32", "native-bfloat16", "native-int8", "native-int4")


def make_ops(name: str) -> Ops:
    backend, weights = name.split("-")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    if backend == "reference":
        reference: Ops = Kernels(torch.device("cpu"), dtype)
        return reference
    pytest.importorskip("specserve.kernels._native", reason="Built without native kernels.")
    module: Any = importlib.import_module("specserve.kernels.cpu")
    native: Ops = module.Kernels(dtype, weights if weights.startswith("int") else "none", threads=1)
    return native


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 6, 8, 12, 16, 25, 40, 64, 71])
def test_slopes_are_those_of_bloom_and_mpt(num_heads: int) -> None:
    bloom = importlib.import_module("transformers.models.bloom.modeling_bloom").build_alibi_tensor
    mpt = importlib.import_module("transformers.models.mpt.modeling_mpt").build_mpt_alibi_tensor
    last = torch.tensor(Alibi.of_heads(num_heads).slopes)  # times 1, the position after the first
    torch.testing.assert_close(last, bloom(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1])
    for most in (8, 4, 16):
        found = torch.tensor(Alibi.of_heads(num_heads, most).slopes)
        torch.testing.assert_close(found, -mpt(num_heads, 2, most)[:, 0, 0])


def test_a_layer_has_a_slope_for_each_query_head() -> None:
    (layer,) = spec().layers[:1]
    with pytest.raises(ModelError, match="3 slopes for 6 query heads"):
        dataclasses.replace(layer, position=Alibi.of_heads(3))
    with pytest.raises(ModelError, match="at least 0"):
        Alibi((0.5, -1.0))


def spec() -> DecoderSpec:
    """Layers with ALiBi, one in a window and with other slopes, beside one that rotates and one that does not."""
    plain = llama_spec(
        vocab_size=293, hidden_size=64, num_heads=6, num_kv_heads=2, head_dim=12, intermediate_size=96, max_len=64
    )
    (first,) = plain.layers
    biased = dataclasses.replace(first, position=Alibi.of_heads(6))
    near = dataclasses.replace(biased, position=Alibi.of_heads(6, 3.0))
    near = dataclasses.replace(near, attention=dataclasses.replace(near.attention, window=9))
    layers = (biased, first, near, dataclasses.replace(first, position=None), biased)
    return dataclasses.replace(plain, layers=layers)


def in_torch(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Logits float32 [tokens, vocab]; the window is a mask."""
    residual = weights["model.embed_tokens.weight"][tokens]
    sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for i, layer in enumerate(spec().layers):
        name, window = f"model.layers.{i}", layer.attention.window
        x = heads.norm(residual, weights[f"{name}.input_layernorm.weight"], layer.norm.eps)
        mask = sees if window is None else sees & ~sees.tril(-window)
        q, k, v = heads.projected(layer, weights, name, x, 0)
        attended = heads.attend(layer.attention, q, k, v, mask, layer.position)
        residual = heads.mlp(layer, weights, name, residual + attended @ weights[f"{name}.self_attn.o_proj.weight"].T)
    return heads.norm(residual, weights["model.norm.weight"], 1e-5) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("kernels", ["reference-float32", "native-float32"])
def test_layers_with_alibi_equal_plain_torch(kernels: str) -> None:
    weights = heads.random_weights(spec().shapes())
    paged, expected = PagedDecoder(Decoder(spec(), weights, make_ops(kernels)), 2, 48), in_torch(weights, PROMPT)
    for found in (paged.chunks(0, PROMPT, 45), paged.chunks(1, PROMPT, 7)):
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_with_alibi_has_the_same_bits_in_any_company(kernels: str) -> None:
    model = Decoder(spec(), heads.random_weights(spec().shapes()), make_ops(kernels))
    assert unequal_rows(model) == []


def test_draft_layers_for_a_model_with_alibi_rotate() -> None:
    biased = dataclasses.replace(spec(), layers=spec().layers[:1])
    assert [layer.position for layer in layers_spec(biased, 2, 293, False).layers] == [Rope()] * 2
