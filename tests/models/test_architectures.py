"""Every native architecture against transformers on tiny random models, row invariance bit for bit, with the reference
kernels and the native ones, and what the loader refuses."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specserve.errors import CapacityError, ConfigError, ModelError
from specserve.kernels.reference import Kernels
from specserve.models import loader
from specserve.models.config import read_rope
from specserve.models.decoder import Decoder
from specserve.models.loader import check_memory, find_architecture, load_model, native_model_types, num_weight_bytes
from specserve.models.rotary import feature_order, rotary_tables
from specserve.models.spec import DecoderSpec, LayerSpec, RmsNorm, Rope, Sequential
from specserve.ops import AttentionRows, Ops
from specserve.testing import Feed, PagedDecoder, heads, llama_spec, tiny_config, unequal_rows, write_tiny_model

CPU = torch.device("cpu")
PROMPT = torch.randint(0, 293, (45,), generator=torch.Generator().manual_seed(5)).tolist()
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ODD = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 77}
LONG: dict[str, Any] = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 1.5, 3.0, 7.0, 20.0]},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-odd-biased": ("llama", {**ODD, "attention_bias": True, "mlp_bias": True, "vocab_size": 301}),
    "llama-tied-multihead": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": None, "head_dim": None}),
    "llama-llama3-rope": ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500.0}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}),
    "llama-modern-rope": (
        "llama",
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 700.0, **LLAMA3}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7, "num_key_value_heads": 1}),
    "mistral-no-window": ("mistral", {**ODD, "sliding_window": None, "head_dim": 20}),
    "qwen2": ("qwen2", {"num_key_value_heads": 4}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-biased-layer-types": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-odd-window-tied": ("mixtral", {**ODD, "sliding_window": 7, "tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": True}),
    "qwen2_moe-odd-some-dense-unbiased": (
        "qwen2_moe",
        {**ODD, "mlp_only_layers": [1], "qkv_bias": False, "moe_intermediate_size": 33},
    ),
    "qwen2_moe-every-second-window": (
        "qwen2_moe",
        {
            "decoder_sparse_step": 2,
            "num_experts_per_tok": 1,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-all-experts-window": (
        "qwen3_moe",
        {
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "num_experts_per_tok": 8,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "olmoe": ("olmoe", {}),
    "olmoe-odd-biased-normalised": (
        "olmoe",
        {
            **ODD,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": None,
            "attention_bias": True,
            "norm_topk_prob": True,
        },
    ),
    "ernie4_5": ("ernie4_5", {"num_key_value_heads": 1}),
    "ernie4_5-odd-biased-tied": ("ernie4_5", {**ODD, "use_bias": True, "tie_word_embeddings": True}),
    "helium-biased": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "glm": ("glm", {"rms_norm_eps": 1.5625e-7}),
    "glm-odd-unbiased": ("glm", {**ODD, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "phi3": ("phi3", {"sliding_window": None, "head_dim": None}),
    "phi3-window": ("phi3", {"sliding_window": 7, "head_dim": None, "partial_rotary_factor": 1.0}),
    "phi3-longrope": ("phi3", {"sliding_window": None, "head_dim": None, **LONG}),
    "granite": ("granite", {}),
    "granite-odd-biased-tied": (
        "granite",
        {**ODD, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 0.22},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-every-second": ("smollm3", {**ODD, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    "smollm3-window": ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 8}),
    "opt": ("opt", {}),
    "opt-odd-unbiased-untied": (
        "opt",
        {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "ffn_dim": 77,
            "enable_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "opt-350m": ("opt_350m", {}),
    "opt-350m-odd-untied": (
        "opt_350m",
        {
            "hidden_size": 60,
            "num_attention_heads": 5,
            "word_embed_proj_dim": 90,
            "enable_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "opt-projected": ("opt", {"word_embed_proj_dim": 36}),
    "opt-norms-after": ("opt", {"do_layer_norm_before": False, "_remove_final_layer_norm": True}),
    "gpt2": ("gpt2", {}),
    "gpt2-scaled-by-depth": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu"}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode-multihead": ("gpt_bigcode", {"multi_query": False, "n_embd": 60, "n_head": 5}),
    "gptj": ("gptj", {}),
    "gptj-whole-heads": ("gptj", {"rotary_dim": 16, "activation_function": "gelu_fast"}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500, "attention_bias": False},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 7}),
    "starcoder2-odd-unbiased": ("starcoder2", {**ODD, "use_bias": False, "tie_word_embeddings": False}),
    "falcon-7b": ("falcon", {"num_attention_heads": 8}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-11b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-multihead-sequential": ("falcon", {"multi_query": False, "parallel_attn": False}),
    "falcon-rw": ("falcon", {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    "bloom": ("bloom", {}),
    "bloom-odd-untied": ("bloom", {"hidden_size": 60, "n_head": 5, "tie_word_embeddings": False}),
    "mpt": ("mpt", {}),
    "mpt-odd": (
        "mpt",
        {"d_model": 60, "n_heads": 5, "attn_config": {"alibi": True, "softmax_scale": 0.4}},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-odd-biased-yarn": (
        "olmo2",
        {**ODD, "attention_bias": True, "rope_scaling": {"type": "yarn", "factor": 4.0}, "tie_word_embeddings": True},
    ),
    "olmo3": ("olmo3", {"sliding_window": 7, "num_hidden_layers": 4}),
    "olmo3-yarn": (
        "olmo3",
        {
            **ODD,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        },
    ),
    "gemma3": ("gemma3", {"sliding_window": 6, "query_pre_attn_scalar": 20, "rope_local_base_freq": 300.0}),
    "gemma3-pattern-softcap": (
        "gemma3",
        {**ODD, "layer_types": None, "sliding_window_pattern": 2, "sliding_window": 11, "final_logit_softcapping": 6.0},
    ),
    "gemma3-modern-rope": (
        "gemma3",
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9000.0},
            },
        },
    ),
}

NO_ROTARY_SETTINGS = ("opt", "opt_350m", "gpt2", "gpt_bigcode", "gptj", "bloom", "mpt")


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> None:
    torch.set_num_threads(1)


def make_ops(name: str) -> Ops:
    """Kernels by name: reference or native, then how they keep weights. Skips native ones that were not built; with
    SPECSERVE_REQUIRE_NATIVE=1 that fails."""
    backend, weights = name.split("-")
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    if backend == "reference":
        reference: Ops = Kernels(CPU, dtype)
        return reference
    required = os.environ.get("SPECSERVE_REQUIRE_NATIVE") == "1"
    if importlib.util.find_spec("specserve.kernels._native") is None and not required:
        pytest.skip("Built without native kernels.")
    module: Any = importlib.import_module("specserve.kernels.cpu")
    native: Ops = module.Kernels(dtype, weights if weights.startswith("int") else "none", threads=1)
    return native


FLOAT32 = ("reference-float32", "native-float32")
ALL_WEIGHTS = (*FLOAT32, "reference-bfloat16", "native-bfloat16", "native-int8", "native-int4")


def write(folder: Path, case: str, seed: int = 1) -> Path:
    """The case's folder; what it overrides with None is left out, except where null has a meaning of its own."""
    architecture, overrides = CASES[case]
    write_tiny_model(folder, architecture, seed, **overrides)
    config = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in config.items() if value is not None or name == "sliding_window"}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def transformers_logits(folder: Path, *prompts: list[int]) -> list[torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())
    # Its faster products of experts want strides of 16 bytes.
    own = {"experts_implementation": "eager"} if "num_experts_per_tok" in config else {}
    attention = "sdpa" if config["model_type"] == "falcon" else "eager"  # which adds ALiBi's biases twice in Falcon
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # transformers deprecates itself
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True, **own
        )
        model, info = loaded
        assert not any(info.values()), f"transformers did not read the folder whole: {info}"
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


PROMPTS = [PROMPT, PROMPT[3:20], PROMPT[::-1][:33]]


@pytest.fixture(scope="module", params=CASES)
def case_and_logits(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[torch.Tensor]]:
    """A case's folder, and what transformers says of PROMPTS."""
    folder = write(tmp_path_factory.mktemp("case"), request.param)
    return folder, transformers_logits(folder, *PROMPTS)


@pytest.mark.parametrize("kernels", FLOAT32)
def test_logits_equal_transformers(case_and_logits: tuple[Path, list[torch.Tensor]], kernels: str) -> None:
    folder, expected = case_and_logits
    paged = PagedDecoder(load_model(folder, make_ops(kernels)), num_seqs=5, capacity=48)
    whole = paged.step(*(Feed(seq, prompt) for seq, prompt in enumerate(PROMPTS)))
    by_size = [paged.chunks(seq, PROMPT, size) for seq, size in ((3, len(PROMPT)), (4, 10))]
    for actual, wanted in zip([*whole, *by_size], [*expected, *[expected[0]] * 2], strict=True):
        error = (actual - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-5, f"relative error {error:.1e}"
        assert torch.equal(actual.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_spec_survives_transformers_own_rewriting(case: str, tmp_path: Path) -> None:
    """Old-style settings, and the same as transformers 5 saves them, describe one model."""
    write(tmp_path, case)
    original = json.loads((tmp_path / "config.json").read_text())
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in rewritten or CASES[case][0] in NO_ROTARY_SETTINGS
    assert find_architecture(original).spec(original) == find_architecture(rewritten).spec(rewritten)


def with_attention(layer: LayerSpec, **changes: Any) -> LayerSpec:
    return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **changes))


WRONG: dict[str, Callable[[LayerSpec], LayerSpec]] = {
    "theta": lambda layer: dataclasses.replace(layer, position=Rope(9_000.0)),
    "neighbours": lambda layer: dataclasses.replace(layer, position=Rope(interleaved=True)),
    "half a head": lambda layer: dataclasses.replace(layer, position=Rope(fraction=0.5)),
    "no rotation": lambda layer: dataclasses.replace(layer, position=None),
    "window": lambda layer: with_attention(layer, window=None),
    "scale": lambda layer: with_attention(layer, scale=0.3),
    "multiplier": lambda layer: dataclasses.replace(layer, residual=Sequential(multiplier=0.9)),
    "eps": lambda layer: dataclasses.replace(layer, norm=RmsNorm(1e-3)),
    "activation": lambda layer: dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, activation="gelu_tanh")),
}


@pytest.mark.each_choice
@pytest.mark.parametrize("kernels", FLOAT32)
@pytest.mark.parametrize("wrong", WRONG)
def test_comparison_notices_a_wrong_spec(wrong: str, kernels: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "mistral-window")
    (expected,) = transformers_logits(folder, PROMPT)
    model = load_model(folder, make_ops(kernels))
    layers = tuple(WRONG[wrong](layer) for layer in model.spec.layers)
    changed = dataclasses.replace(model.spec, layers=layers, final_norm=layers[0].norm)
    paged = PagedDecoder(type(model)(changed, load_file(folder / "model.safetensors"), model.ops), 1, 48)
    error = (paged.chunks(0, PROMPT, 45) - expected).abs().max() / expected.abs().max()
    assert error > 1e-4


@pytest.mark.parametrize("kernels", FLOAT32)
def test_gemma3_with_a_vision_tower_reads_its_text_tensors(kernels: str, tmp_path: Path) -> None:
    text = {
        key: value for key, value in tiny_config("gemma3").items() if key not in ("rope_theta", "rope_local_base_freq")
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    torch.manual_seed(2)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        config = transformers.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=3
        )
        config._attn_implementation = "eager"
        model = transformers.Gemma3ForConditionalGeneration(config).train(False)
        model.save_pretrained(tmp_path)
        prompt = [token for token in PROMPT if token != 3]
        expected = model(torch.tensor([prompt])).logits[0]
    paged = PagedDecoder(load_model(tmp_path, make_ops(kernels)), 1, 48)
    torch.testing.assert_close(paged.chunks(0, prompt, 48), expected, rtol=0, atol=float(expected.abs().max()) * 2e-5)


def test_both_layouts_of_multimodal_gemma3_names() -> None:
    rename = find_architecture({"model_type": "gemma3"}).rename
    for stored in ("language_model.model.norm.weight", "model.language_model.norm.weight", "model.norm.weight"):
        assert rename(stored) == "model.norm.weight"
    assert rename("language_model.lm_head.weight") == "lm_head.weight"
    for stored in ("vision_tower.vision_model.x", "model.vision_tower.x", "model.multi_modal_projector.y"):
        assert rename(stored) is None


def test_gemma3_defaults_are_transformers_own() -> None:
    published = {"model_type": "gemma3_text"}
    full = transformers.Gemma3TextConfig().to_dict()
    assert find_architecture(published).spec(published) == find_architecture(full).spec(full)


# Layers that differ


def unlike_layers() -> DecoderSpec:
    """Heads, widths, positions, windows and biases are each layer's own."""
    plain = llama_spec(
        vocab_size=293, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, max_len=64
    )
    (first,) = plain.layers
    others = (
        with_attention(dataclasses.replace(first, position=None), num_heads=6, num_kv_heads=6, head_dim=8, scale=0.4),
        with_attention(first, num_heads=3, num_kv_heads=1, head_dim=32, qkv_bias=True, head_norm=first.norm),
        dataclasses.replace(first, position=Rope(500.0), mlp=dataclasses.replace(first.mlp, size=40)),
        with_attention(dataclasses.replace(first, position=Rope(fraction=0.25)), head_norm=first.norm, qkv_bias=True),
        dataclasses.replace(first, position=Rope(70.0, interleaved=True, fraction=0.75)),
        with_attention(dataclasses.replace(first, position=Rope(interleaved=True)), head_norm=first.norm),
    )
    return dataclasses.replace(plain, layers=(first, *others))


def reference_logits(spec: DecoderSpec, weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """In plain torch, float32 [tokens, vocab]."""
    residual = weights["model.embed_tokens.weight"][tokens]
    for i, layer in enumerate(spec.layers):
        name = f"model.layers.{i}"
        x = heads.norm(residual, weights[f"{name}.input_layernorm.weight"], layer.norm.eps)
        residual = heads.layer(layer, weights, name, x, residual)
    return heads.norm(residual, weights["model.norm.weight"], spec.final_norm.eps) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("kernels", FLOAT32)
def test_layers_may_differ_from_each_other(kernels: str) -> None:
    spec = unlike_layers()
    weights = heads.random_weights(spec.shapes())
    assert spec.shapes()["model.layers.1.self_attn.k_proj.weight"] == (48, 64)
    assert [tuple(shape) for shape in spec.kv_shapes] == [(2, 16), (6, 8), (1, 32), *[(2, 16)] * 4]
    model = Decoder(spec, weights, make_ops(kernels))
    paged = PagedDecoder(model, 2, 48)
    expected = reference_logits(spec, weights, PROMPT)
    for found in (paged.chunks(0, PROMPT, 45), paged.chunks(1, PROMPT, 7)):
        assert (found - expected).abs().max() / expected.abs().max() < 2e-5
    assert unequal_rows(model) == []


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [True, False])
def test_heads_in_order_rotate_as_transformers_rotates_them(interleaved: bool, fraction: float) -> None:
    """Up to the order of features, which queries and keys share. GLM rotates neighbours, GPT-NeoX halves."""
    name = "glm" if interleaved else "gpt_neox"
    theirs = importlib.import_module(f"transformers.models.{name}.modeling_{name}").apply_rotary_pos_emb
    x, positions, d = torch.randn(2, 20, 16), torch.arange(20), int(16 * fraction)  # [heads, rows, head_dim]
    angles = torch.outer(positions.float(), 1.0 / 10_000.0 ** (torch.arange(0, d, 2) / d)).repeat(1, 2)[None]
    wanted, _ = theirs(x[None], x[None], angles.cos(), angles.sin())
    rope = Rope(interleaved=interleaved, fraction=fraction)
    order, (cos, sin) = feature_order(rope, 16), rotary_tables(rope, 16, 20, CPU)
    own = x if order is None else x[..., order]
    found = own * cos + own.roll(8, -1) * sin
    assert (order is None) == (not interleaved and fraction == 1)
    torch.testing.assert_close(found, wanted[0] if order is None else wanted[0][..., order])


def test_rotary_settings_are_checked() -> None:
    for fraction, words in ((0.0, "positive"), (1.5, "at most 1")):
        with pytest.raises(ModelError, match=words):
            Rope(fraction=fraction)
    for fraction, words in ((0.32, "5 features of each head rotate"), (0.01, "0 features")):
        with pytest.raises(ModelError, match=words):
            dataclasses.replace(unlike_layers().layers[0], position=Rope(fraction=fraction))


def test_norms_of_different_eps_are_refused() -> None:
    spec = unlike_layers()
    with pytest.raises(ModelError, match=r"differ in eps, \[1e-05, 0\.001\]"):
        dataclasses.replace(spec, layers=(dataclasses.replace(spec.layers[0], norm=RmsNorm(1e-3)), *spec.layers[1:]))
    with pytest.raises(ModelError, match="differ in eps"):
        dataclasses.replace(spec, final_norm=RmsNorm(1e-3))


# Row invariance


def split_by_rows(ops: Any) -> Callable[..., torch.Tensor]:
    """A planted fault: with more than 8 rows the products are summed in two halves, as a GEMM may well choose to."""
    linear = ops.linear

    def split(x: Any, weight: Any, adapters: object = None) -> torch.Tensor:
        whole: torch.Tensor = linear(x, weight)
        if len(whole) <= 8:
            return whole
        numbers = x if isinstance(x, torch.Tensor) else x.parts[0][:, : x.width]
        left = numbers.clone()
        left[:, numbers.shape[1] // 2 :] = 0
        return whole.copy_(
            linear(ops.quantize_activation(left), weight) + linear(ops.quantize_activation(numbers - left), weight)
        )

    return split


def blind_to_trees(ops: Ops) -> Callable[[Any, int], Any]:
    """A planted fault: a tree's rows see every row before them."""
    plan = ops.plan

    def blind(rows: AttentionRows, block_size: int) -> Any:
        chains = np.concatenate([np.arange(-1, n - 1, dtype=np.int32) for n in np.diff(rows.query_starts)])
        return plan(dataclasses.replace(rows, parents=chains), block_size)

    return blind


def with_each_weights(*cases: str) -> list[Any]:
    """Every case with float32 and one other kind of weights each time, with all of them where --thorough is given."""
    found = []
    for i, case in enumerate(cases):
        now = (*FLOAT32, ALL_WEIGHTS[len(FLOAT32) + i % (len(ALL_WEIGHTS) - len(FLOAT32))])
        marks = {each: () if each in now else pytest.mark.thorough for each in ALL_WEIGHTS}
        found += [pytest.param(case, each, marks=marks[each]) for each in ALL_WEIGHTS]
    return found


ODD = ("llama-odd-biased", "gemma3-pattern-softcap", "olmo2-odd-biased-yarn", "mixtral-odd-window-tied")
INVARIANCE = (  # how weights are kept is the products' affair: the odd shapes tell, and one with windows
    *itertools.product(ODD, ALL_WEIGHTS),
    *itertools.product(
        ("llama", "mistral-window", "qwen2-window", "qwen3", "smollm3", "granite", "phi3", "glm", "gemma3", "olmo3"),
        FLOAT32,
    ),
    *with_each_weights("qwen2_moe", "qwen3_moe", "olmoe", "opt", "gpt2", "gptj", "gpt_neox", "falcon-40b", "bloom"),
    *with_each_weights("gpt_bigcode", "starcoder2", "falcon-7b", "falcon-rw", "mpt"),
)


@pytest.mark.parametrize(("case", "kernels"), INVARIANCE)
def test_a_row_has_the_same_bits_in_any_company(case: str, kernels: str, tmp_path: Path) -> None:
    assert unequal_rows(load_model(write(tmp_path, case), make_ops(kernels))) == []


@pytest.mark.parametrize("kernels", FLOAT32)
def test_row_dependent_kernels_are_noticed(kernels: str, tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "llama"), make_ops(kernels))
    with mock.patch.object(model.ops, "linear", split_by_rows(model.ops)):
        assert {"chunks of 9", "chunks of 40", "last of a batch"} <= set(unequal_rows(model))
    with mock.patch.object(model.ops, "plan", blind_to_trees(model.ops)):
        assert set(unequal_rows(model)) == {"tree", "tree in a batch"}


def forward(model: Any, rows: list[int]) -> tuple[torch.Tensor, ...]:
    """PROMPT[:8] in one step -> hidden states, logits and best tokens of the rows asked for."""
    spec, ops = model.spec, model.ops
    kv = [torch.zeros(2, 32, *shape, dtype=ops.dtype) for shape in spec.kv_shapes]
    layout = AttentionRows.pack([0, 8], [0], [[1]], range(-1, 7), 8)
    ids, positions = torch.tensor(PROMPT[:8]), torch.arange(8)
    with torch.inference_mode():
        outputs = model.forward(ids, positions, torch.tensor(rows), kv, ops.plan(layout, 16))
        return tuple(output.clone() for output in outputs[:3])


@pytest.mark.parametrize("kernels", ALL_WEIGHTS)
def test_only_the_rows_asked_for_are_returned(kernels: str, tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "gemma3-pattern-softcap"), make_ops(kernels))
    rows = [5, 2, 2, 0]
    for few, every in zip(forward(model, rows), forward(model, list(range(8))), strict=True):
        assert torch.equal(few, every[rows])


@pytest.mark.parametrize("kernels", [*FLOAT32, "reference-bfloat16", "native-bfloat16"])
def test_hidden_is_what_the_head_reads(kernels: str, tmp_path: Path) -> None:
    """In the reference's bfloat16 the float32 hidden states carry bfloat16 values: nothing is lost between hidden and
    logits. The native kernels round them for the head alone."""
    folder = write(tmp_path, "llama")
    model = load_model(folder, make_ops(kernels))
    hidden, logits, best = forward(model, list(range(8)))
    assert hidden.dtype == logits.dtype == torch.float32
    read = hidden.to(model.ops.dtype).float()
    assert torch.equal(hidden, read) or kernels == "native-bfloat16"
    head = load_file(folder / "model.safetensors")["lm_head.weight"].to(model.ops.dtype)
    right = read.double() @ head.double().T
    tolerance = 1e-5 if model.ops.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(logits.double(), right, rtol=tolerance, atol=tolerance)
    assert torch.equal(best, logits.argmax(-1))


# What is refused


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ModelError) as error:
        find_architecture(config).spec(config)
    return str(error.value)


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["mrope", "proportional"])
def test_unsupported_rotary_scaling_is_named(kind: str, style: str) -> None:
    message = refusal(tiny_config("llama", **{style: {"rope_type": kind, "factor": 2.0}}))
    assert all(word in message for word in (repr(kind), "llama3", "yarn")), message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_act": "relu2"}, ["'relu2'", "gelu_pytorch_tanh"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3 KV heads"]),
        ({"head_dim": 10}, ["10", "multiple of 4"]),
        ({"intermediate_size": None}, ["no intermediate_size", "'llama'"]),
        ({"num_hidden_layers": 0}, ["num_layers", "0"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["no factor"]),
    ],
)
def test_unsupported_settings_are_named(overrides: dict[str, Any], words: list[str]) -> None:
    message = refusal(tiny_config("llama", **overrides))
    assert all(word in message for word in words), message


def test_multipliers_are_checked() -> None:
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        for value in (0, -1.0, "1", float("nan")):
            assert "positive number" in refusal(tiny_config("granite", **{name: value}))
    with pytest.raises(ModelError, match="residual_multiplier"):
        Sequential(post_norms=True, multiplier=0.5)


def test_layer_types_are_checked() -> None:
    assert "2 entries for 3" in refusal(tiny_config("smollm3", no_rope_layers=[1, 0]))
    assert "linear_attention" in refusal(tiny_config("qwen3", layer_types=["full_attention", "linear_attention"]))
    assert "2 entries for 3" in refusal(tiny_config("qwen3", layer_types=["full_attention"] * 2))
    assert "sliding_window" in refusal(tiny_config("mistral", sliding_window=0))
    assert "bidirectional" in refusal(tiny_config("gemma3", use_bidirectional_attention=True))


def test_llama3_falls_back_on_the_models_own_length() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = read_rope({"max_position_embeddings": 4096, "rope_scaling": scaling})
    assert rope.original_max_position_embeddings == 4096


def test_unknown_model_type_lists_near_misses() -> None:
    message = refusal({"model_type": "qwen3_more"})
    assert all(word in message for word in ("'qwen3_more'", "Did you mean", "'qwen3_moe'", "mistral")), message
    assert set(native_model_types()) == {
        "llama",
        "mistral",
        "mixtral",
        "qwen",
        "internlm2",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "mimo",
        "smollm3",
        "granite",
        "ernie4_5",
        "helium",
        "glm",
        "phi3",
        "olmo2",
        "olmo3",
        "olmoe",
        "aquila",
        "baichuan",
        "internlm",
        "gemma3",
        "gemma3_text",
        "opt",
        "gpt2",
        "gpt_bigcode",
        "gptj",
        "gpt_neox",
        "starcoder2",
        "falcon",
        "RefinedWeb",
        "RefinedWebModel",
        "bloom",
        "mpt",
    }


def edit(folder: Path, changes: dict[str, torch.Tensor], remove: str = "") -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(remove, None)
    save_file(tensors | changes, folder / "model.safetensors")
    return folder


def load_refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load_model(folder, Kernels(CPU, torch.float32))
    return str(error.value)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    assert name in load_refusal(edit(write(tmp_path / "missing", "llama"), {}, remove=name))
    shape = load_refusal(edit(write(tmp_path / "shape", "llama"), {name: torch.zeros(64, 128)}))
    assert all(word in shape for word in (name, "(64, 128)", "(128, 64)")), shape
    strange = edit(write(tmp_path / "strange", "llama"), {"model.layers.1.mlp.gate.weight": torch.zeros(2)})
    assert "model.layers.1.mlp.gate.weight" in load_refusal(strange)
    integers = edit(write(tmp_path / "int", "llama"), {name: torch.zeros(128, 64, dtype=torch.int8)})
    assert f"{name} holds I8" in load_refusal(integers)


def test_fused_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.qkv_proj.weight"
    missing = load_refusal(edit(write(tmp_path / "missing", "phi3"), {}, remove=name))
    assert "model.layers.1.self_attn.q_proj.weight" in missing
    shape = load_refusal(edit(write(tmp_path / "shape", "phi3"), {name: torch.zeros(64, 64)}))
    assert all(word in shape for word in (name, "(64, 64)", "(128, 64)")), shape
    bias = "model.layers.0.mlp.gate_up_proj.bias"
    assert bias in load_refusal(edit(write(tmp_path / "bias", "phi3"), {bias: torch.zeros(256)}))
    twice = "model.layers.2.self_attn.k_proj.weight"
    assert "a part of it" in load_refusal(edit(write(tmp_path / "twice", "phi3"), {twice: torch.zeros(32, 64)}))


def test_a_folder_that_claims_more_layers_than_it_has_is_refused(tmp_path: Path) -> None:
    config = json.loads((write_tiny_model(tmp_path, "qwen3", num_hidden_layers=1) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    message = load_refusal(tmp_path)
    assert "model.layers.1.input_layernorm.weight" in message
    assert "more tensors" in message


def test_harmless_tensors_are_passed_over(tmp_path: Path) -> None:
    folder = edit(write(tmp_path, "llama"), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load_model(folder, Kernels(CPU, torch.float32))


def test_a_tied_head_stored_twice_must_be_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama-tied-multihead")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    load_model(edit(folder, {"lm_head.weight": table}), Kernels(CPU, torch.float32))
    assert "tie_word_embeddings" in load_refusal(edit(folder, {"lm_head.weight": table + 1}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    """One in a matrix is enough: packed it would be some number, and the answers wrong without a word."""
    write_tiny_model(tmp_path, "llama")
    weights = {name: tensor.to(dtype) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    weights["model.layers.2.mlp.up_proj.weight"][-1, -1] = value
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert "layers.2.mlp.up_proj.weight holds NaN or infinite numbers" in load_refusal(tmp_path)


def test_memory_is_checked_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, "qwen3")
    ops = Kernels(CPU, torch.float32)
    spec = load_model(folder, ops).spec
    needed = num_weight_bytes(spec, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    assert spec.tied_embeddings
    packed_head = tensors["model.embed_tokens.weight"].nbytes  # does not share the table's memory
    assert needed == sum(t.nbytes for t in tensors.values()) + packed_head + 2 * 2048 * 24 * 4  # and cosines and sines
    check_memory(spec, ops, needed)
    with pytest.raises(CapacityError, match=r"need 0\.00 GiB in float32 .* bfloat16"):
        check_memory(spec, ops, needed - 1)
    monkeypatch.setattr(loader, "free_memory", lambda device: 0)
    monkeypatch.setattr(loader, "Decoder", lambda *args: pytest.fail("weights were read before the check"))
    with pytest.raises(CapacityError):
        load_model(folder, ops)


def test_max_len_can_only_be_lowered(tmp_path: Path) -> None:
    folder = write(tmp_path, "llama")
    assert load_model(folder, Kernels(CPU, torch.float32), max_len=64).spec.max_len == 64
    with pytest.raises(ConfigError, match=r"4096.*2048"):
        load_model(folder, Kernels(CPU, torch.float32), max_len=4096)
