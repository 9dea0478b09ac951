"""OLMoE: Llama's layout with experts in every layer, and norms of all query heads together and of all key heads."""

from __future__ import annotations

from dataclasses import replace

from specserve.errors import ModelError
from specserve.models.config import Config, num_layers, read_experts, read_layer, read_norm, read_spec, required
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("OlmoeForCausalLM",)
MODEL_TYPES = ("olmoe",)


def spec(config: Config) -> DecoderSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    if config.get("clip_qkv") is not None:
        raise ModelError(f"config.json sets clip_qkv to {config['clip_qkv']!r}; queries are not clipped here.")
    bias = bool(config.get("attention_bias"))
    layer = read_layer(config, joint_norm=read_norm(config), qkv_bias=bias, out_bias=bias)
    size, is_normalized = required(config, "intermediate_size"), bool(config.get("norm_topk_prob"))
    mlp = read_experts(config, size, is_normalized=is_normalized)
    return read_spec(config, [replace(layer, mlp=mlp)] * num_layers(config))
