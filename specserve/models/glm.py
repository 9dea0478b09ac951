"""GLM 4 as of 2024 (glm-4-9b-chat-hf, GLM-Edge): Llama's layout, rotating neighbours in a half of each head."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.config import Config, num_layers, read_layer, read_rope, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("GlmForCausalLM",)
MODEL_TYPES = ("glm",)
FUSED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True}


def spec(config: Config) -> DecoderSpec:
    config = {**_DEFAULTS, **config}
    position = replace(read_rope(config, fraction=0.5), interleaved=True)
    layer = read_layer(config, position=position, qkv_bias=bool(config["attention_bias"]))
    return read_spec(config, [layer] * num_layers(config))
