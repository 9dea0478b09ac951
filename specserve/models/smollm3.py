"""SmolLM 3: Llama's layout with layers without rotary embedding, one in four; those have a sliding window if it is
switched on."""

from __future__ import annotations

from dataclasses import replace

from specserve.errors import ModelError
from specserve.models.config import FULL, SLIDING, Config, num_layers, read_layer, read_layer_types, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("SmolLM3ForCausalLM",)
MODEL_TYPES = ("smollm3",)


def spec(config: Config) -> DecoderSpec:
    config = {"rope_theta": 2e6, "tie_word_embeddings": True, **config}
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    rotates = _rotates(config)
    types = read_layer_types(config, tuple(FULL if each or window is None else SLIDING for each in rotates))
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    layers = [read_layer(config, kind, window, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias) for kind in types]
    return read_spec(
        config,
        [layer if each else replace(layer, position=None) for layer, each in zip(layers, rotates, strict=True)],
    )


def _rotates(config: Config) -> list[bool]:
    """Whether each layer has rotary embedding: `no_rope_layers` has 1 where it does."""
    count, every = num_layers(config), config.get("no_rope_layer_interval", 4)
    listed = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(count)]
    if len(listed) < count:
        raise ModelError(f"no_rope_layers has {len(listed)} entries for {count} layers.")
    return [bool(each) for each in listed[:count]]
