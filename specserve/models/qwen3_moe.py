"""Qwen 3 MoE: Qwen 3's layout with experts in some layers or all."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.config import SLIDING, Config, read_experts, read_layer, read_norm, read_spec, required
from specserve.models.qwen2_moe import are_sparse
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
MODEL_TYPES = ("qwen3_moe",)


def spec(config: Config) -> DecoderSpec:
    bias = bool(config.get("attention_bias"))
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    layer = read_layer(config, SLIDING, window, head_norm=read_norm(config), qkv_bias=bias, out_bias=bias)
    sparse = are_sparse(config)
    if not any(sparse):
        return read_spec(config, [layer] * len(sparse))
    size, is_normalized = required(config, "moe_intermediate_size"), bool(config.get("norm_topk_prob"))
    routed = replace(layer, mlp=read_experts(config, size, is_normalized=is_normalized))
    return read_spec(config, [routed if each else layer for each in sparse])
