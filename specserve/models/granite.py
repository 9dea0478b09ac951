"""Granite 3, dense: Llama's layout with multipliers of embeddings, of query-key products and of what joins the residual
stream, and a divisor of logits."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.config import Config, num_layers, read_layer, read_spec
from specserve.models.spec import DecoderSpec, Sequential

ARCHITECTURES = ("GraniteForCausalLM",)
MODEL_TYPES = ("granite",)


def spec(config: Config) -> DecoderSpec:
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    scale = config.get("attention_multiplier", 1.0)
    layer = read_layer(config, scale=scale, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    layer = replace(layer, residual=Sequential(multiplier=config.get("residual_multiplier", 1.0)))
    return read_spec(
        config,
        [layer] * num_layers(config),
        embedding_scale=config.get("embedding_multiplier", 1.0),
        logit_divisor=config.get("logits_scaling", 1.0),
    )
