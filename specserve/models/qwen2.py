"""Qwen 2 and 2.5: Llama's layout with biased q, k, v, and a sliding window in the upper layers if it is switched on."""

from __future__ import annotations

from specserve.models.config import FULL, SLIDING, Config, num_layers, read_layer, read_layer_types, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("Qwen2ForCausalLM",)
MODEL_TYPES = ("qwen2",)


def spec(config: Config) -> DecoderSpec:
    types, window = layer_windows(config)
    return read_spec(config, [read_layer(config, kind, window, qkv_bias=True) for kind in types])


def layer_windows(config: Config) -> tuple[tuple[str, ...], int | None]:
    """Each layer's attention and the window of the sliding ones: layers from max_window_layers on, if
    use_sliding_window is set. Qwen 3 writes the same settings."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    count = num_layers(config)
    first = config.get("max_window_layers", 28) if window else count
    default = tuple(SLIDING if layer >= first else FULL for layer in range(count))
    return read_layer_types(config, default), window
