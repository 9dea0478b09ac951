"""Llama 1 to 3.3 and what copies its layout (SmolLM2, TinyLlama, Yi): the plain decoder."""

from __future__ import annotations

from specserve.models.spec import Config, DecoderSpec, read_spec

ARCHITECTURES = ("LlamaForCausalLM",)
MODEL_TYPES = ("llama",)


def spec(config: Config) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    return read_spec(config, qkv_bias=bias, o_bias=bias, mlp_bias=bool(config.get("mlp_bias", False)))
