"""Families that transformers 5 does not have, against references in plain torch, written from their published
architectures: Aquila, Baichuan, InternLM 1 and 2, Qwen 1."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from specserve.errors import ConfigError, ModelError
from specserve.kernels.reference import Kernels
from specserve.models.heads.origin import TargetOrigin
from specserve.models.loader import find_architecture, load_model
from specserve.models.positions import Alibi
from specserve.models.spec import shorten
from specserve.ops import Ops
from specserve.testing import PagedDecoder, tiny_config, unequal_rows, write_tiny_model

PROMPT = torch.randint(0, 293, (45,), generator=torch.Generator().manual_seed(5)).tolist()
FLOAT32 = ("reference-float32", "native-float32")
ALL_WEIGHTS = (*FLOAT32, "reference-bfloat16", "native-bfloat16", "native-int8", "native-int4")
BAICHUAN_2 = 125_696  # its vocabulary tells it from the first
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "aquila": ("aquila", {}),
    "aquila-linear-rope": ("aquila", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "baichuan-7b": ("baichuan", {"architectures": ["BaiChuanForCausalLM"]}),
    "baichuan-13b": ("baichuan", {"max_position_embeddings": None, "num_attention_heads": 6, "hidden_size": 96}),
    "baichuan2-7b": ("baichuan", {"vocab_size": BAICHUAN_2, "hidden_size": 32, "head_dim": 8}),
    "internlm": ("internlm", {"bias": True}),
    "internlm-dynamic": ("internlm", {"bias": False, "rotary": {"base": 5000, "type": "dynamic"}}),
    "internlm2": ("internlm2", {}),
    "internlm2-biased-multihead": ("internlm2", {"bias": True, "num_key_value_heads": None}),
    "internlm2-dynamic": (
        "internlm2",
        {"num_key_value_heads": 1, "rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.5}},
    ),
    "qwen": ("qwen", {}),
    "qwen-biased-half-rotated": (
        "qwen",
        {"no_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 500, "intermediate_size": 154},
    ),
}


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


def write(folder: Path, case: str) -> Path:
    family, overrides = CASES[case]
    return write_tiny_model(folder, family, 1, **overrides)


# References, over tensors as the family's checkpoints have them


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, theta: float, factor: float = 1.0) -> Tensor:
    """x [rows, heads, d], by halves."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)) / factor, theta ** -(torch.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of one sequence: q [rows, heads, d], k and v [rows, kv_heads, d], bias [heads, rows, rows] -> [rows, heads d]."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("rhd,chd->hrc", q, k) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hrc,chd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def like_llama(weights: dict[str, Tensor], config: dict[str, Any], attention: Any, head: Tensor) -> Tensor:
    """Logits of PROMPT. `attention` makes of what a layer's attention reads, and its name, what it adds."""
    eps, x = config["rms_norm_eps"], weights["model.embed_tokens.weight"][PROMPT]
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}"
        x = x + attention(rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps), f"{name}.self_attn")
        y = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = linear(weights, f"{name}.mlp.gate_proj", y), linear(weights, f"{name}.mlp.up_proj", y)
        x = x + linear(weights, f"{name}.mlp.down_proj", F.silu(gate) * up)
    return rms_norm(x, weights["model.norm.weight"], eps) @ head.T


def aquila(weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    factor = (config.get("rope_scaling") or {"factor": 1.0})["factor"]

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (linear(weights, f"{name}.{each}_proj", x).view(len(x), -1, config["head_dim"]) for each in "qkv")
        attended = attend(rotated(q, config["rope_theta"], factor), rotated(k, config["rope_theta"], factor), v)
        return linear(weights, f"{name}.o_proj", attended)

    return like_llama(weights, config, attention, weights["lm_head.weight"])


def baichuan(weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """W_pack is q, k and v one after the other; 13B has biases of key minus query position times slopes, with those of
    the interleaved rule for other counts of heads than powers of two."""
    heads, has_alibi = config["num_attention_heads"], config["max_position_embeddings"] is None
    slopes = torch.tensor([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0])  # of 6 heads
    at = torch.arange(len(PROMPT))
    bias = slopes[:, None, None] * (at - at[:, None]) if has_alibi else None

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (each.reshape(len(x), heads, -1) for each in linear(weights, f"{name}.W_pack", x).chunk(3, -1))
        if not has_alibi:
            q, k = rotated(q, 10_000.0), rotated(k, 10_000.0)
        return linear(weights, f"{name}.o_proj", attend(q, k, v, bias))

    head = weights["lm_head.weight"]
    if config["vocab_size"] == BAICHUAN_2:
        head = head / head.pow(2).sum(-1, keepdim=True).sqrt()
    return like_llama(weights, config, attention, head)


def internlm(weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    theta = config.get("rotary", {"base": 10_000})["base"]  # dynamic is plain within the model's length

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (linear(weights, f"{name}.{each}_proj", x).view(len(x), -1, config["head_dim"]) for each in "qkv")
        return linear(weights, f"{name}.o_proj", attend(rotated(q, theta), rotated(k, theta), v))

    return like_llama(weights, config, attention, weights["lm_head.weight"])


def internlm2(weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """The rows of wqkv are those of each KV head in turn: its query heads, its key, its value. The MLP is
    w2(silu(w1 x) * w3 x)."""
    d, eps = config["head_dim"], config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"] or config["num_attention_heads"]
    x = weights["model.tok_embeddings.weight"][PROMPT]
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}"
        y = rms_norm(x, weights[f"{name}.attention_norm.weight"], eps)
        qkv = linear(weights, f"{name}.attention.wqkv", y).view(len(y), kv_heads, heads // kv_heads + 2, d)
        q, k, v = qkv[:, :, :-2].reshape(len(y), heads, d), qkv[:, :, -2], qkv[:, :, -1]
        attended = attend(rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"]), v)
        x = x + linear(weights, f"{name}.attention.wo", attended)
        y = rms_norm(x, weights[f"{name}.ffn_norm.weight"], eps)
        gate, up = linear(weights, f"{name}.feed_forward.w1", y), linear(weights, f"{name}.feed_forward.w3", y)
        x = x + linear(weights, f"{name}.feed_forward.w2", F.silu(gate) * up)
    return rms_norm(x, weights["model.norm.weight"], eps) @ weights["output.weight"].T


def qwen(weights: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """c_attn is q, k and v one after the other. The first features of each head rotate, by halves. The MLP is
    c_proj(w1 x * silu(w2 x))."""
    heads, eps, theta = config["num_attention_heads"], config["layer_norm_epsilon"], config.get("rotary_emb_base", 1e4)
    count = int(config["kv_channels"] * config.get("rotary_pct", 1.0))

    def partly(x: Tensor) -> Tensor:
        return torch.cat((rotated(x[..., :count], theta), x[..., count:]), -1)

    x = weights["transformer.wte.weight"][PROMPT]
    for i in range(config["num_hidden_layers"]):
        name = f"transformer.h.{i}"
        y = rms_norm(x, weights[f"{name}.ln_1.weight"], eps)
        q, k, v = linear(weights, f"{name}.attn.c_attn", y).view(len(y), 3, heads, -1).unbind(1)
        x = x + linear(weights, f"{name}.attn.c_proj", attend(partly(q), partly(k), v))
        y = rms_norm(x, weights[f"{name}.ln_2.weight"], eps)
        gated = linear(weights, f"{name}.mlp.w1", y) * F.silu(linear(weights, f"{name}.mlp.w2", y))
        x = x + linear(weights, f"{name}.mlp.c_proj", gated)
    return rms_norm(x, weights["transformer.ln_f.weight"], eps) @ weights["lm_head.weight"].T


REFERENCES = {"aquila": aquila, "baichuan": baichuan, "internlm": internlm, "internlm2": internlm2, "qwen": qwen}


@pytest.fixture(scope="module", params=CASES)
def case_and_logits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A case's folder, and what the reference says of PROMPT."""
    folder = write(tmp_path_factory.mktemp("case"), request.param)
    config = json.loads((folder / "config.json").read_text())
    return folder, REFERENCES[config["model_type"]](load_file(folder / "model.safetensors"), config)


@pytest.mark.parametrize("kernels", FLOAT32)
def test_logits_equal_the_reference(case_and_logits: tuple[Path, Tensor], kernels: str) -> None:
    folder, expected = case_and_logits
    paged = PagedDecoder(load_model(folder, make_ops(kernels)), num_seqs=2, capacity=48)
    for found in (paged.chunks(0, PROMPT, 45), paged.chunks(1, PROMPT, 10)):
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.each_choice(rounds=2)
@pytest.mark.parametrize("case", [case for case in CASES if case != "baichuan2-7b"])
@pytest.mark.parametrize("kernels", ALL_WEIGHTS)
def test_a_row_has_the_same_bits_in_any_company(case: str, kernels: str, tmp_path: Path) -> None:
    assert unequal_rows(load_model(write(tmp_path, case), make_ops(kernels))) == []


# What configurations say, and what is refused


def spec_of(case: str, **overrides: Any) -> Any:
    family, own = CASES[case]
    config = tiny_config(family, **{**own, **overrides})
    return find_architecture(config).spec(config)


def test_baichuan_13b_is_told_by_its_length() -> None:
    large, small = spec_of("baichuan-13b"), spec_of("baichuan-7b")
    assert large.max_len == small.max_len == 2048
    assert {layer.position for layer in large.layers} == {Alibi.of_heads(6)}
    with pytest.raises(ModelError, match="no model_max_length"):
        spec_of("baichuan-13b", model_max_length=None)


def test_the_head_of_baichuan_2_is_that_of_drafters_too(tmp_path: Path) -> None:
    assert not spec_of("baichuan-7b").normed_head
    assert spec_of("baichuan2-7b").normed_head
    found = TargetOrigin(write(tmp_path, "baichuan2-7b")).head()
    torch.testing.assert_close(found.norm(dim=1), torch.ones(BAICHUAN_2))


def test_w_pack_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "baichuan-7b")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.W_pack.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"W_pack.* \(191, 64\); config.json implies \(192, 64\)"):
        load_model(folder, make_ops("reference-float32"))


def test_internlm_is_not_stretched_without_a_factor(tmp_path: Path) -> None:
    folder = write(tmp_path, "internlm-dynamic")
    with pytest.raises(ConfigError, match="at most 2048"):
        load_model(folder, make_ops("reference-float32"), 2049)
    stretched = spec_of("internlm-dynamic", rotary={"base": 5000, "type": "dynamic", "scaling_factor": 2.0})
    assert (stretched.max_len, stretched.longest_len) == (2048, 4096)
    with pytest.raises(ModelError, match="'other' is not supported"):
        spec_of("internlm-dynamic", rotary={"base": 5000, "type": "other"})


def test_internlm_2_is_stretched_by_its_factor() -> None:
    plain, dynamic = spec_of("internlm2"), spec_of("internlm2-dynamic")
    assert (plain.longest_len, dynamic.max_len, dynamic.longest_len) == (2048, 2048, 5120)
    assert "unscaled" in dynamic.note
    assert "fixed for max_model_len 4096" in shorten(dynamic, 4096).note
    assert not [name for name in plain.shapes() if name.endswith("bias")]
    config = tiny_config("internlm2")
    del config["bias"]  # which published code takes for true
    assert "model.layers.0.self_attn.o_proj.bias" in find_architecture(config).spec(config).shapes()


def test_qwen_goes_up_to_its_seq_length(tmp_path: Path) -> None:
    assert spec_of("qwen", seq_length=512, max_position_embeddings=8192).longest_len == 512
    with pytest.raises(ConfigError, match="at most 1024"):
        load_model(write(tmp_path, "qwen"), make_ops("reference-float32"), 1025)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_length": None}, "no seq_length"),
        ({"kv_channels": 12}, "kv_channels is 12; times num_attention_heads it must be hidden_size"),
        ({"scale_attn_weights": False}, "scale_attn_weights to False"),
        ({"visual": {"layers": 48}}, "Qwen-VL is not supported"),
        ({"rotary_pct": 1.5}, "must be at most 1"),
        ({"rotary_emb_base": "10000"}, "rotary theta as '10000'"),
        ({"intermediate_size": "big"}, "intermediate_size as 'big'"),
        ({"layer_norm_epsilon": -1.0}, "rms_norm_eps as -1"),
    ],
)
def test_what_qwen_may_not_ask_for_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as error:
        spec_of("qwen", **changes)
    assert words in str(error.value)
