"""Qwen 3: Qwen 2 with normalised queries and keys in place of biases, and a head size of its own."""

from __future__ import annotations

from specserve.models.config import Config, read_layer, read_norm, read_spec
from specserve.models.qwen2 import layer_windows
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPES = ("qwen3",)


def spec(config: Config) -> DecoderSpec:
    types, window = layer_windows(config)
    bias = bool(config.get("attention_bias"))
    own = {"head_dim": config.get("head_dim", 128), "head_norm": read_norm(config), "qkv_bias": bias, "out_bias": bias}
    return read_spec(config, [read_layer(config, kind, window, **own) for kind in types])
