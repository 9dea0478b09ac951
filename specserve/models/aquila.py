"""Aquila and Aquila 2 (BAAI): Llama's layout under another name."""

from __future__ import annotations

from specserve.models.config import Config, num_layers, read_layer, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("AquilaForCausalLM", "AquilaModel")
MODEL_TYPES = ("aquila",)


def spec(config: Config) -> DecoderSpec:
    return read_spec(config, [read_layer(config)] * num_layers(config))
