"""Mistral: Llama's layout with a sliding window in every layer (null: none)."""

from __future__ import annotations

from specserve.models.spec import SLIDING, Config, DecoderSpec, read_layer_types, read_spec, required

ARCHITECTURES = ("MistralForCausalLM",)
MODEL_TYPES = ("mistral",)


def spec(config: Config) -> DecoderSpec:
    types = read_layer_types(config, (SLIDING,) * required(config, "num_hidden_layers"))
    return read_spec(config, types, config.get("sliding_window", 4096))
