"""ERNIE 4.5, dense: Llama's layout, rotating neighbours."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.config import Config, num_layers, read_layer, read_rope, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")  # the latter as Baidu published it first
MODEL_TYPES = ("ernie4_5",)
_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = {**_DEFAULTS, **config}
    bias = bool(config.get("use_bias"))
    position = replace(read_rope(config), interleaved=True)
    layer = read_layer(config, position=position, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    return read_spec(config, [layer] * num_layers(config))
