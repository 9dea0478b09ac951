"""Mixtral: Mistral's layout with experts in every layer, a token's weights normalised."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.config import (
    SLIDING,
    Config,
    num_layers,
    read_experts,
    read_layer,
    read_rope,
    read_spec,
    required,
)
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("MixtralForCausalLM",)
MODEL_TYPES = ("mixtral",)
RENAMED = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


def spec(config: Config) -> DecoderSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    layer = read_layer(config, SLIDING, config.get("sliding_window"), position=read_rope(config, theta=1e6))
    mlp = read_experts(config, required(config, "intermediate_size"), is_normalized=True)
    return read_spec(config, [replace(layer, mlp=mlp)] * num_layers(config))


def rename(name: str) -> str:
    for stored, own in RENAMED.items():
        name = name.replace(stored, own)
    return name
