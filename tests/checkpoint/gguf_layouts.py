"""Writes a model folder as a GGUF file in the layout that llama.cpp's converter publishes: its metadata keys, the names
of the gguf package's tensor map, and the order of rows, each written down from what the converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH
from numpy.typing import NDArray
from safetensors.numpy import load_file

from specserve.testing.models import SPECIAL_TOKENS

Config = Mapping[str, Any]
Tensor = NDArray[np.float32]
Tensors = dict[str, Tensor]

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "aquila": MODEL_ARCH.LLAMA,
    "internlm": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "mimo": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen2_moe": MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "olmoe": MODEL_ARCH.OLMOE,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "granite": MODEL_ARCH.GRANITE,
    "ernie4_5": MODEL_ARCH.ERNIE4_5,
    "glm": MODEL_ARCH.CHATGLM,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2,
    "baichuan": MODEL_ARCH.BAICHUAN,
    "internlm2": MODEL_ARCH.INTERNLM2,
    "qwen": MODEL_ARCH.QWEN,
    "gpt2": MODEL_ARCH.GPT2,
    "gpt_bigcode": MODEL_ARCH.STARCODER,
    "starcoder2": MODEL_ARCH.STARCODER2,
    "gpt_neox": MODEL_ARCH.GPTNEOX,
    "falcon": MODEL_ARCH.FALCON,
    "bloom": MODEL_ARCH.BLOOM,
    "mpt": MODEL_ARCH.MPT,
}
BY_PAIRS = ("llama", "mistral", "aquila", "internlm", "mixtral", "smollm3", "granite", "baichuan")


def first(config: Config, *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def head_size(config: Config) -> int:
    hidden, heads = first(config, "hidden_size", "n_embd", "d_model"), num_heads(config)
    return int(config.get("head_dim") or hidden // heads)


def num_heads(config: Config) -> int:
    return int(first(config, "num_attention_heads", "n_head", "n_heads"))


def num_kv_heads(config: Config) -> int:
    if config["model_type"] == "falcon":
        return int(config.get("num_kv_heads") or 1)
    return int(config.get("num_key_value_heads") or num_heads(config))


# --- metadata ---------------------------------------------------------------------------------------------------------


def common_keys(config: Config) -> dict[str, Any]:
    """What the converter writes of any text model; None is left out."""
    rope = config.get("rope_scaling") or {}
    keys: dict[str, Any] = {
        "block_count": first(config, "n_layers", "num_hidden_layers", "n_layer"),
        "context_length": first(config, "max_position_embeddings", "n_positions", "model_max_length", "seq_length"),
        "embedding_length": first(config, "hidden_size", "n_embd"),
        "feed_forward_length": first(config, "intermediate_size", "n_inner"),
        "attention.head_count": num_heads(config),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "rope.freq_base": first(config, "rope_theta", "rotary_emb_base"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        "expert_count": first(config, "num_local_experts", "num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
    }
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if rope.get("rope_type") == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for theirs, name in (
            ("beta_fast", "beta_fast"),
            ("beta_slow", "beta_slow"),
            ("attention_factor", "attn_factor"),
        ):
            keys[f"rope.scaling.yarn_{name}"] = rope.get(theirs)
    return keys


def own_keys(config: Config) -> dict[str, Any]:
    """What it writes of this kind, and None for what it does not write."""
    size, hidden = head_size(config), first(config, "hidden_size", "n_embd", "d_model")
    written: Mapping[str, Callable[[], dict[str, Any]]] = {
        "qwen2_moe": lambda: {
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        },
        "qwen3_moe": lambda: {"expert_feed_forward_length": config["moe_intermediate_size"]},
        "gemma3_text": lambda: {"attention.sliding_window": config["sliding_window"]},
        "granite": lambda: {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.dimension_count": size,
        },
        "glm": lambda: {
            "rope.dimension_count": int(size * config.get("partial_rotary_factor", 0.5)),
            "attention.key_length": None,
            "attention.value_length": None,
        },
        "phi3": lambda: {
            "rope.dimension_count": int(size * config.get("partial_rotary_factor", 1.0)),
            "rope.scaling.original_context_length": first(
                config, "original_max_position_embeddings", "max_position_embeddings"
            ),
            "attention.sliding_window": config.get("sliding_window") or 0,
            "attention.key_length": None,
            "attention.value_length": None,
        },
        "olmo3": lambda: {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": [(i + 1) % 4 != 0 for i in range(config["num_hidden_layers"])],
        },
        "baichuan": lambda: {
            "attention.head_count_kv": num_kv_heads(config),
            "rope.freq_base": None,
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.dimension_count": size,
        },
        "gpt2": lambda: {"feed_forward_length": 4 * hidden, "attention.head_count_kv": None},
        "gpt_bigcode": lambda: {"feed_forward_length": 4 * hidden, "attention.head_count_kv": 1},
        "gpt_neox": lambda: {
            "rope.dimension_count": int(config["rotary_pct"] * size),
            "use_parallel_residual": config.get("use_parallel_residual", True),
        },
        "falcon": lambda: {
            "context_length": 2048,
            "feed_forward_length": 4 * hidden,
            "attention.head_count_kv": num_kv_heads(config),
            "rope.freq_base": None,
        },
        "bloom": lambda: {
            "context_length": config["seq_length"],
            "feed_forward_length": 4 * hidden,
            "attention.head_count_kv": num_heads(config),
        },
        "mpt": lambda: {
            "context_length": config["max_seq_len"],
            "embedding_length": config["d_model"],
            "feed_forward_length": 4 * config["d_model"],
            "attention.layer_norm_epsilon": 1e-5,
            "attention.max_alibi_bias": float(config["attn_config"]["alibi_bias_max"]),
        },
    }
    own = written.get(config["model_type"], dict)()
    if ARCHITECTURES[config["model_type"]] is MODEL_ARCH.LLAMA or config["model_type"] == "smollm3":
        own["rope.dimension_count"] = size
    return own


def tokenizer_keys(vocab_size: int, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: int(item[1]))
    tokens = [token for token, _ in vocab] + list(SPECIAL_TOKENS)
    types = [1] * len(vocab) + [3] * len(SPECIAL_TOKENS)
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens[:vocab_size],
        "token_type": types[:vocab_size],
        "merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "eos_token_id": len(vocab) + 2,
    }


# --- tensors ----------------------------------------------------------------------------------------------------------


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Halves of each head become neighbours."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def regrouped(weight: Tensor, kv_heads: int, share: int, size: int) -> Tensor:
    """Rows by KV head (its queries, its key, its value) become all queries, all keys, all values."""
    grouped = weight.reshape(kv_heads, share + 2, size, *weight.shape[1:])
    parts = [grouped[:, :share], grouped[:, share], grouped[:, share + 1]]
    return np.concatenate([part.reshape(-1, *weight.shape[1:]) for part in parts])


def rearranged(config: Config, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What the converter makes of one tensor of the checkpoint, under names that the gguf package maps."""
    kind, heads, kv_heads = config["model_type"], num_heads(config), num_kv_heads(config)
    if kind == "baichuan" and "W_pack" in name:
        for part, own in zip("qkv", np.split(weight, 3), strict=True):
            yield name.replace("W_pack", f"{part}_proj"), own if part == "v" else permuted(own, heads)
    elif kind == "internlm2" and "wqkv" in name:
        rows = regrouped(weight, kv_heads, heads // kv_heads, head_size(config))
        starts = [heads * head_size(config), (heads + kv_heads) * head_size(config)]
        q, k, v = np.split(rows, starts)
        for part, own in (("q", permuted(q, heads)), ("k", permuted(k, kv_heads)), ("v", v)):
            yield name.replace("attention.wqkv", f"self_attn.{part}_proj"), own
    elif kind in BY_PAIRS and re.search(r"\.[qk]_proj\.", name):
        yield name, permuted(weight, heads if ".q_proj." in name else kv_heads)
    elif kind in ("bloom", "gpt_neox") and "query_key_value" in name:
        yield name, regrouped(weight, heads, 1, head_size(config))
    elif kind == "falcon" and "query_key_value" in name:
        yield name, regrouped(weight, kv_heads, heads // kv_heads, head_size(config))
    elif kind == "gpt2" and weight.ndim == 2 and ".h." in name:
        yield name, weight.T
    elif kind == "gemma3_text" and name.endswith("norm.weight"):
        yield name, weight + np.float32(1)
    elif name.endswith("shared_expert_gate.weight"):
        yield name, weight.reshape(-1)
    else:
        yield name, weight


def stacked(tensors: Tensors) -> Tensors:
    """Matrices of experts become one tensor, without the number in their name."""
    found: dict[str, list[Tensor]] = {}
    others: Tensors = {}
    for name, weight in tensors.items():
        numbered = re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name)
        if numbered is None:
            others[name] = weight
        else:
            merged = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe", r"\1.feed_forward", numbered[1]) + numbered[3]
            found.setdefault(merged, []).append(weight)
            assert len(found[merged]) == int(numbered[2]) + 1
    return others | {name: np.stack(weights) for name, weights in found.items()}


def fused_qkv(tensors: Tensors) -> Tensors:
    """Queries, keys and values as one tensor, as ChatGLM's own checkpoints have them."""
    fused = dict(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [fused.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        fused[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
    return fused


def published(config: Config, tensors: Tensors) -> Tensors:
    """The tensors of the GGUF file."""
    arch = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, common_keys(config)["block_count"])
    made: Tensors = {}
    ordered = sorted(tensors.items(), key=lambda item: [int(part) for part in re.findall(r"\d+", item[0])])
    renamed = {own: value for name, weight in ordered for own, value in rearranged(config, name, weight)}
    for name, weight in stacked(renamed).items():
        short = name.removeprefix("transformer.") if config["model_type"] == "bloom" else name
        found = names.get_name(short, try_suffixes=(".weight", ".bias"))
        if found is None and ".qkv_proj." in short:  # ChatGLM's own name
            found = re.sub(r"model\.layers\.(\d+)\.self_attn\.qkv_proj", r"blk.\1.attn_qkv", short)
        if found is None and "bias" in short:  # the published map has no such tensor: a test's mistake
            raise AssertionError(f"{short} is not mapped")
        assert found is not None, short
        made[found] = np.ascontiguousarray(weight)
    scaling = config.get("rope_scaling") or {}
    for kind in ("long", "short"):
        if f"{kind}_factor" in scaling:
            made[f"rope_factors_{kind}.weight"] = np.array(scaling[f"{kind}_factor"], np.float32)
    return made


def quantized(weight: Tensor, kind: str | None) -> tuple[NDArray[Any], str | None]:
    """Matrices whose rows are whole blocks; llama.cpp keeps others in a wider type."""
    if kind is None or weight.ndim < 2 or weight.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
        return weight, None
    return gguf.quantize(weight, gguf.GGMLQuantizationType[kind]), kind


def rounded(weight: Tensor, kind: str) -> Tensor:
    """As the file holds it."""
    data, used = quantized(weight, kind)
    if used is None:
        return weight
    values: Tensor = gguf.dequantize(data, gguf.GGMLQuantizationType[used]).reshape(weight.shape)
    return values


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def write_published(
    folder: Path,
    path: Path,
    kind: str | None = None,
    change: Callable[[Tensors], Tensors] = dict,
    **metadata: Any,
) -> Path:
    """`folder` as a GGUF file at `path`, matrices in the type `kind` (None: float32). `change` gets the tensors under
    the gguf package's names; `metadata` are more keys of the architecture, "__" for dots, None to leave one out."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    name = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]
    writer = gguf.GGUFWriter(path, name)
    own = common_keys(config) | own_keys(config) | {key.replace("__", "."): value for key, value in metadata.items()}
    keys = {f"{name}.{key}": value for key, value in own.items()}
    keys |= {f"tokenizer.ggml.{k}": v for k, v in tokenizer_keys(config["vocab_size"], tokenizer).items()}
    for key, value in keys.items():
        if value is not None:
            add_value(writer, key, value)
    for tensor, weight in change(published(config, load_file(folder / "model.safetensors"))).items():
        data, used = quantized(weight, kind)
        writer.add_tensor(tensor, data, raw_dtype=gguf.GGMLQuantizationType[used] if used else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
