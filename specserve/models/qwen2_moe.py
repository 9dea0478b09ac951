"""Qwen 1.5 and 2 MoE: Qwen 2's layout with experts, and a shared one that has a gate, in some layers or all."""

from __future__ import annotations

from dataclasses import replace

from specserve.errors import ModelError
from specserve.models.config import (
    FULL,
    SLIDING,
    Config,
    num_layers,
    read_experts,
    read_layer,
    read_layer_types,
    read_mlp,
    read_spec,
    required,
)
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("Qwen2MoeForCausalLM",)
MODEL_TYPES = ("qwen2_moe",)


def spec(config: Config) -> DecoderSpec:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    last = config.get("max_window_layers", 28) if window else 0
    default = tuple(FULL if i % 2 or i >= last else SLIDING for i in range(num_layers(config)))
    types, bias = read_layer_types(config, default), bool(config.get("qkv_bias", True))
    layers = [read_layer(config, kind, window, qkv_bias=bias) for kind in types]
    if not any(sparse := are_sparse(config)):
        return read_spec(config, layers)
    shared = replace(read_mlp(config), size=required(config, "shared_expert_intermediate_size"))
    size, is_normalized = required(config, "moe_intermediate_size"), bool(config.get("norm_topk_prob"))
    mlp = read_experts(config, size, is_normalized=is_normalized, shared=shared)
    parts = zip(layers, sparse, strict=True)
    return read_spec(config, [replace(layer, mlp=mlp) if each else layer for layer, each in parts])


def are_sparse(config: Config) -> list[bool]:
    """Whether each layer has experts: every `decoder_sparse_step`th one, but for `mlp_only_layers`. Qwen 3 writes the
    same settings."""
    every, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(every, int) or every < 1 or not isinstance(dense, list):
        raise ModelError(f"decoder_sparse_step is {every!r}, mlp_only_layers {dense!r}; a number and a list are read.")
    return [layer not in dense and (layer + 1) % every == 0 for layer in range(num_layers(config))]
