"""Phi 3 and 4: Llama's layout, perhaps with a sliding window in every layer, and rotating a part of each head."""

from __future__ import annotations

from specserve.models.config import SLIDING, Config, num_layers, read_layer, read_rope, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("Phi3ForCausalLM",)
MODEL_TYPES = ("phi3",)
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def spec(config: Config) -> DecoderSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    layer = read_layer(config, SLIDING, config.get("sliding_window"), position=read_rope(config, fraction=1.0))
    return read_spec(config, [layer] * num_layers(config))
