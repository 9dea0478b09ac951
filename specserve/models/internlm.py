"""InternLM 1: Llama's layout with biases in attention."""

from __future__ import annotations

from specserve.models.config import Config, num_layers, read_layer, read_spec
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("InternLMForCausalLM",)
MODEL_TYPES = ("internlm",)


def spec(config: Config) -> DecoderSpec:
    bias = bool(config.get("bias", True))
    config = {**config, **_rotary(config)}
    return read_spec(config, [read_layer(config, qkv_bias=bias, out_bias=bias)] * num_layers(config))


def _rotary(config: Config) -> Config:
    """`rotary`, which later checkpoints have, in the usual terms: type "origin", or "dynamic", whose factor is 1 unless
    it is stated, so that it scales nothing up to the model's length."""
    given = config.get("rotary") or {}
    scaling = {"type": given.get("type", "origin"), "factor": given.get("scaling_factor", 1.0)}
    found = {} if scaling["type"] == "origin" else {"rope_scaling": scaling}
    return {"rope_theta": given["base"], **found} if "base" in given else found
