"""Models of all families that llama.cpp knows, written as it writes them, against the folders that they come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.checkpoint.gguf import convert
from specserve.checkpoint.gguf_families import ARCHITECTURES
from specserve.checkpoint.gguf_file import GGUFFile, GGUFTensor
from specserve.checkpoint.gguf_tensors import Heads, experts
from specserve.checkpoint.gguf_tokenizer import SPLITTINGS
from specserve.checkpoint.weights import Weights
from specserve.errors import ModelError
from specserve.kernels.reference import Kernels
from specserve.models.loader import check_tensors, load_model
from specserve.testing import Feed, PagedDecoder, write_tiny_model
from tests.checkpoint.gguf_layouts import Tensors, fused_qkv, rounded, write_published

PROMPT = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(5)).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0625, 1.25, 1.5, 1.75, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.5, 9.25],
}
WIDE = {"n_inner": None}  # four times as wide in between, as the converter takes it for granted
# Of each family: what a tiny model of it is, and keys that the file has besides.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}, {}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, {}),
    "mistral": ("mistral", {}, {"attention__sliding_window": 24}),
    "aquila": ("aquila", {}, {}),
    "internlm": ("internlm", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "mimo": ("mimo", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen2-moe": ("qwen2_moe", {}, {}),
    "qwen2-moe-old": (
        "qwen2_moe",
        {},
        {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None},
    ),
    "qwen3-moe": ("qwen3_moe", {}, {}),
    "olmoe": ("olmoe", {}, {}),
    "gemma3": (
        "gemma3",
        {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 24, "head_dim": 24},
        {},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}, {}),
    "granite": ("granite", {}, {}),
    "ernie4_5": ("ernie4_5", {}, {}),
    "glm": ("glm", {}, {}),
    "phi3": ("phi3", {}, {}),
    "phi3-window": ("phi3", {"partial_rotary_factor": 1.0, "sliding_window": 24}, {}),
    "phi3-longrope": (
        "phi3",
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
        {"rope__scaling__attn_factor": float(np.sqrt(1 + np.log(2048 / 32) / np.log(32)))},
    ),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5}, {}),
    "olmo3-yarn": ("olmo3", {"num_hidden_layers": 5, "rope_scaling": {**YARN, "attention_factor": 1.25}}, {}),
    "internlm2": ("internlm2", {}, {}),
    "qwen1": ("qwen", {}, {}),
    "qwen1-rms": (
        "qwen",
        {"rotary_emb_base": 5000.0},
        {"attention__layer_norm_epsilon": None, "attention__layer_norm_rms_epsilon": 1e-6},
    ),
    "baichuan-7b": ("baichuan", {"num_hidden_layers": 32}, {}),
    "baichuan-13b": (
        "baichuan",
        {"num_hidden_layers": 40, "max_position_embeddings": None, "num_attention_heads": 6, "hidden_size": 96},
        {},
    ),
    "gpt2": ("gpt2", WIDE, {}),
    "gpt_bigcode": ("gpt_bigcode", WIDE, {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {}),
    "starcoder2-window": ("starcoder2", {}, {"attention__sliding_window": 24}),
    "gpt_neox": ("gpt_neox", {}, {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}, {}),
    "falcon-7b": ("falcon", {"ffn_hidden_size": 256, "max_position_embeddings": 2048}, {}),
    "falcon-40b": (
        "falcon",
        {
            "ffn_hidden_size": 256,
            "max_position_embeddings": 2048,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
        {},
    ),
    "falcon-11b": (
        "falcon",
        {
            "ffn_hidden_size": 256,
            "max_position_embeddings": 2048,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 2,
            "rope_theta": 500_042.0,
        },
        {"rope__freq_base": 500_042.0},
    ),
    "bloom": ("bloom", {"layer_norm_epsilon": 1e-5}, {}),
    "mpt": ("mpt", {}, {}),
}


def tiny(folder: Path, case: str) -> Path:
    """The folder of a case's model. Configurations of classic families say their epsilon, as published ones do."""
    family, overrides, _ = CASES[case]
    eps = {"layer_norm_epsilon": 1e-5} if family in ("gpt2", "gpt_bigcode", "falcon", "bloom") else {}
    eps |= {"layer_norm_eps": 1e-5} if family == "gpt_neox" else {}
    eps |= {"norm_epsilon": 1e-5} if family == "starcoder2" else {}
    return write_tiny_model(folder, family, 1, **{**eps, **overrides})


def logits(folder: Path) -> torch.Tensor:
    """float32 [rows, vocab] of PROMPT."""
    model: Any = load_model(folder, Kernels(torch.device("cpu"), torch.float32))
    return PagedDecoder(model, num_seqs=1, capacity=48).step(Feed(0, PROMPT))[0]


def assert_equal(found: Path, meant: Path, case: str) -> None:
    """The same model: description, tensors by their own names, and what it says."""
    ours, theirs = check_tensors(found), check_tensors(meant)
    assert ours.spec == theirs.spec
    for name in theirs:
        value, expected = ours[name], theirs[name]
        if case == "gemma3" and name.endswith("norm.weight"):
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)  # one more and one less is rounded
        else:
            assert torch.equal(value, expected), name
    said, expected_logits = logits(found), logits(meant)
    torch.testing.assert_close(said, expected_logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(said.argmax(-1), expected_logits.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_that_of_its_folder(tmp_path: Path, case: str) -> None:
    folder = tiny(tmp_path / "meant", case)
    convert(write_published(folder, tmp_path / "m.gguf", **CASES[case][2]), tmp_path / "out")
    assert_equal(tmp_path / "out", folder, case)
    if case != "internlm2" and not case.startswith("baichuan"):  # which have q, k and v as tensors of their own here
        assert set(Weights(tmp_path / "out")) == set(Weights(folder))


@pytest.mark.parametrize("case", CASES)
def test_a_quantised_model_is_that_of_its_rounded_folder(tmp_path: Path, case: str) -> None:
    kind = "Q4_0"
    folder = tiny(tmp_path / "meant", case)
    convert(write_published(folder, tmp_path / "m.gguf", kind, **CASES[case][2]), tmp_path / "out")
    stored = load_file(folder / "model.safetensors")
    for name, value in stored.items():
        is_transposed = case == "gpt2" and ".h." in name and value.dim() == 2
        if name.endswith("shared_expert_gate.weight"):
            continue  # a vector in the file
        own = (value.T if is_transposed else value).contiguous().numpy()
        own = torch.from_numpy(np.array(rounded(own, kind)))
        stored[name] = (own.T if is_transposed else own).contiguous()
    save_file(stored, folder / "model.safetensors")
    assert_equal(tmp_path / "out", folder, case)


def test_chatglm_with_one_matrix_for_queries_keys_and_values(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "meant", "glm")

    def fuse(tensors: Tensors) -> Tensors:
        renamed = {name.replace(".attn_q.", ".q_proj."): value for name, value in tensors.items()}
        for part in "kv":
            renamed = {name.replace(f".attn_{part}.", f".{part}_proj."): value for name, value in renamed.items()}
        return {name.replace(".qkv_proj.", ".attn_qkv."): value for name, value in fused_qkv(renamed).items()}

    convert(write_published(folder, tmp_path / "m.gguf", "Q8_0", fuse), tmp_path / "fused")
    convert(write_published(folder, tmp_path / "m.gguf", "Q8_0"), tmp_path / "out")
    assert_equal(tmp_path / "fused", tmp_path / "out", "glm")


def test_experts_of_blocks_are_taken_without_the_others() -> None:
    """Any type of block, here one that the gguf package only reads."""
    kind = gguf.GGMLQuantizationType.Q6_K
    raw = np.random.default_rng(7).integers(0, 256, (3 * 5, 2 * 210), np.uint8)
    raw.reshape(3 * 5, 2, 210)[..., 208:] = np.float16(0.03125).view(np.uint16).astype("<u2").reshape(1).view(np.uint8)
    tensor = GGUFTensor("blk.0.ffn_up_exps.weight", "Q6_K", (3, 5, 512), raw)
    made = experts("mlp.experts.{}.up_proj")(GGUFFile(Path("m.gguf"), {}, {}), Heads(1, 1, 1), tensor)
    assert [each.name for each in made] == [f"mlp.experts.{i}.up_proj" for i in range(3)]
    for i, each in enumerate(made):
        assert each.shape == (5, 512)
        written = np.frombuffer(b"".join(each.pieces()), np.float32).reshape(5, 512)
        np.testing.assert_array_equal(written, gguf.dequantize(raw[5 * i : 5 * i + 5], kind))


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def extra(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: np.zeros(shape, np.float32)}


@pytest.mark.parametrize(
    ("case", "change", "keys", "message"),
    [
        ("granite", without("blk.1.attn_k.weight"), {}, r"no tensor 'blk\.1\.attn_k\.weight'"),
        ("qwen3-moe", without("blk.0.ffn_gate_exps.weight"), {}, r"no tensor 'blk\.0\.ffn_gate_exps\.weight'"),
        ("falcon-7b", extra("blk.0.ffn_norm.weight", 64), {}, "blk.0.ffn_norm.weight.*unknown in a falcon"),
        ("mpt", extra("position_embd.weight", 8, 64), {}, "position_embd.weight.*unknown in a mpt"),
        ("phi3-longrope", without("rope_factors_long.weight"), {}, "rope_factors_long"),
        ("falcon-11b", dict, {"rope__freq_base": None}, "falcon.rope.freq_base"),
        ("gpt_neox", dict, {"attention__layer_norm_epsilon": None}, "gptneox.attention.layer_norm_epsilon"),
        ("bloom", dict, {"block_count": None}, "bloom.block_count"),
        ("olmoe", dict, {"expert_used_count": None}, "olmoe.expert_used_count"),
        ("qwen2", dict, {"attn_logit_softcapping": 50.0}, "qwen2.attn_logit_softcapping is 50"),
        ("qwen3", dict, {"final_logit_softcapping": 30.0}, "qwen3.final_logit_softcapping is 30"),
        ("starcoder2", dict, {"attention__clamp_kqv": 8.0}, "starcoder2.attention.clamp_kqv is 8"),
        ("olmoe", dict, {"attention__clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv is 8"),
        ("qwen3-moe", dict, {"expert_gating_func": 2}, "qwen3moe.expert_gating_func is 2"),
        ("llama", dict, {"logit_scale": 0.5}, "llama.logit_scale is 0.5"),
        ("qwen2", dict, {"rope__dimension_sections": [1, 2, 3, 0]}, "qwen2.rope.dimension_sections"),
        ("qwen3", dict, {"attention__causal": False}, "qwen3.attention.causal is False"),
        ("gpt_bigcode", dict, {"attention__head_count_kv": 4}, "starcoder model with 4 heads"),
        ("falcon-40b", dict, {"attention__head_count_kv": 4}, "'blk.0.attn_qkv.weight' has 128 rows.*have 192"),
        ("olmo3", dict, {"attention__sliding_window_pattern": [True]}, "sliding_window_pattern has 1 of 5"),
        ("ernie4_5", dict, {"rope__dimension_count": 8}, "8 of 16"),
        ("baichuan-7b", dict, {"block_count": 33}, "baichuan model of 33 layers"),
        ("qwen3", dict, {"attention__value_length": 16}, "values of another size"),
        ("glm", dict, {"rope__scaling__type": "dynamic"}, "'dynamic'.*yarn"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    tmp_path: Path, case: str, change: Callable[[Tensors], Tensors], keys: dict[str, Any], message: str
) -> None:
    folder = tiny(tmp_path / "meant", case)
    path = write_published(folder, tmp_path / "m.gguf", None, change, **{**CASES[case][2], **keys})
    with pytest.raises(ModelError, match=message):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention__clamp_kqv": 8.0}, "clip_qkv"),
        ({"attention__max_alibi_bias": 0.0}, "ALiBi"),
        ({"attention__head_count_kv": 2}, "grouped_query_attention"),
    ],
)
def test_settings_that_the_family_refuses_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    convert(write_published(tiny(tmp_path / "meant", "mpt"), tmp_path / "m.gguf", **keys), tmp_path / "out")
    with pytest.raises(ModelError, match=message):
        check_tensors(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"), [("gptj", "no published layout"), ("glm4", "Glm4ForCausalLM"), ("gpt3", "gpt2")]
)
def test_an_architecture_without_a_reader_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    path = write_published(tiny(tmp_path / "meant", "gpt2"), tmp_path / "m.gguf")
    path.write_bytes(
        path.read_bytes().replace(b"\4\0\0\0\0\0\0\0gpt2", bytes([len(name)]) + bytes(7) + name.encode(), 1)
    )
    with pytest.raises(ModelError, match=rf"architecture '{name}'.*{message}"):
        convert(path, tmp_path / "out")


def test_the_documentation_names_them_all() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    names = {name for name in ARCHITECTURES if name not in ("mixtral", "olmo3", "falcon of two norms")}
    assert [name for name in (*names, *SPLITTINGS) if f"`{name}`" not in text] == []
