"""Qwen 3: Qwen 2 with normalised queries and keys in place of biases, and a head size of its own."""

from __future__ import annotations

from specserve.models.qwen2 import layer_windows
from specserve.models.spec import Config, DecoderSpec, read_spec

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPES = ("qwen3",)


def spec(config: Config) -> DecoderSpec:
    types, window = layer_windows(config)
    bias = bool(config.get("attention_bias", False))
    head_dim = config.get("head_dim", 128)
    return read_spec(config, types, window, head_dim=head_dim, qk_norm=True, qkv_bias=bias, o_bias=bias)
