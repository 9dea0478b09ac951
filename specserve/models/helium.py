"""Helium 1: Llama's layout, rotating neighbours."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.config import Config, num_layers, read_layer, read_rope, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("HeliumForCausalLM",)
MODEL_TYPES = ("helium",)
_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}


def spec(config: Config) -> DecoderSpec:
    config = {**_DEFAULTS, **config}
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    position = replace(read_rope(config), interleaved=True)
    layer = read_layer(config, position=position, qkv_bias=bias, mlp_bias=mlp_bias)
    return read_spec(config, [layer] * num_layers(config))
