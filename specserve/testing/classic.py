"""Small configurations of classic decoder families, and their tensors as checkpoints of these have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specserve.models.fusing import QKV, rows_by_head
from specserve.models.loader import find_architecture

_GPT: Mapping[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "dtype": "float32"}
_LIKE_LLAMA: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}
CLASSIC: Mapping[str, Mapping[str, Any]] = {
    "opt": {"architectures": ["OPTForCausalLM"], **_LIKE_LLAMA, "ffn_dim": 96},
    "opt_350m": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        **_LIKE_LLAMA,
        "ffn_dim": 96,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "gpt2": {"architectures": ["GPT2LMHeadModel"], **_GPT, "n_inner": 96},
    "gpt_bigcode": {"architectures": ["GPTBigCodeForCausalLM"], **_GPT, "n_inner": 96},
    "gptj": {"architectures": ["GPTJForCausalLM"], **_GPT, "n_inner": 96, "rotary_dim": 8},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], **_LIKE_LLAMA, "intermediate_size": 96, "rotary_pct": 0.25},
    "starcoder2": {
        "architectures": ["Starcoder2ForCausalLM"],
        **_LIKE_LLAMA,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "sliding_window": 24,
    },
    "falcon": {"architectures": ["FalconForCausalLM"], **_LIKE_LLAMA, "ffn_hidden_size": 96},
    "bloom": {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 64,
        "n_layer": 3,
        "n_head": 4,
        "seq_length": 1024,
        "dtype": "float32",
    },
    "mpt": {
        "architectures": ["MptForCausalLM"],
        "d_model": 64,
        "n_layers": 3,
        "n_heads": 4,
        "max_seq_len": 1024,
        "no_bias": True,
        "attn_config": {"alibi": True, "alibi_bias_max": 8},
        "dtype": "float32",
    },
    "qwen": {
        "architectures": ["QWenLMHeadModel"],
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "kv_channels": 16,
        "intermediate_size": 192,  # of both halves
        "seq_length": 1024,
        "layer_norm_epsilon": 1e-6,
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "dtype": "float32",
    },
}


def as_stored(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the family's checkpoints hold, of tensors under the names that all models share."""
    family = find_architecture(config)
    spec = family.spec(config)
    for whole in getattr(family, "FUSED_BY_HEAD", ()):
        for name in [name for name in tensors if f".{QKV[0]}." in name]:
            parts = [tensors.pop(name.replace(QKV[0], part)) for part in QKV]
            order = torch.cat(rows_by_head(spec, name)).argsort()
            tensors[name.replace(QKV[0], whole)] = torch.cat(parts)[order].contiguous()
    if getattr(family, "IS_TRANSPOSED", False):
        for name in [name for name in tensors if name.startswith("model.layers.") and tensors[name].dim() == 2]:
            tensors[name] = tensors[name].T.contiguous()
    if (names := getattr(family, "NAMES", None)) is None:
        return tensors
    stored = {names.stored(name): tensor for name, tensor in tensors.items()}
    if config["model_type"] != "falcon" or not any(name.endswith("post_attention_layernorm.weight") for name in stored):
        return stored
    if not config.get("new_decoder_architecture"):
        return stored
    both = (("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp"))
    for ours, theirs in both:
        stored = {name.replace(ours, theirs): tensor for name, tensor in stored.items()}
    return stored
