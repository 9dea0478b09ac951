"""OLMo 2 (arXiv 2501.00656): Llama's layout with norms after attention and after the MLP alone, and with one norm for
all queries of a token and one for all its keys."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.config import FULL, Config, num_layers, read_layer, read_norm, read_spec
from specserve.models.positions import Rope
from specserve.models.spec import DecoderSpec, LayerSpec, Sequential

ARCHITECTURES = ("Olmo2ForCausalLM",)
MODEL_TYPES = ("olmo2",)


def spec(config: Config) -> DecoderSpec:
    config = {"rms_norm_eps": 1e-5, **config}
    return read_spec(config, [layer(config)] * num_layers(config))


def layer(config: Config, kind: str = FULL, window: int | None = None, position: Rope | None = None) -> LayerSpec:
    """As read_layer has it. OLMo 3 has the same."""
    bias = bool(config.get("attention_bias"))
    norm = read_norm(config)
    plain = read_layer(config, kind, window, position=position, joint_norm=norm, qkv_bias=bias, out_bias=bias)
    return replace(plain, residual=Sequential(post_norms=True, pre_norms=False))
