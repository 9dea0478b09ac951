"""Llama 1 to 3.3 and what copies its layout (SmolLM2, TinyLlama, Yi): the plain decoder."""

from __future__ import annotations

from specserve.models.config import Config, num_layers, read_layer, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)


def spec(config: Config) -> DecoderSpec:
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    layer = read_layer(config, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    return read_spec(config, [layer] * num_layers(config))
