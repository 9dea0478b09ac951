"""Mistral: Llama's layout with a sliding window in every layer (null: none)."""

from __future__ import annotations

from specserve.models.config import SLIDING, Config, num_layers, read_layer, read_layer_types, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("MistralForCausalLM",)
MODEL_TYPES = ("mistral",)


def spec(config: Config) -> DecoderSpec:
    types, window = read_layer_types(config, (SLIDING,) * num_layers(config)), config.get("sliding_window", 4096)
    return read_spec(config, [read_layer(config, kind, window) for kind in types])
