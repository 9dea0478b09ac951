"""Gemma 3, text only: four norms a layer, two rotary settings, one global layer in six."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specserve.models.config import (
    FULL,
    SLIDING,
    Config,
    num_layers,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_rope,
    read_spec,
)
from specserve.models.spec import DecoderSpec, LayerSpec, Rope, Sequential

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
MODEL_TYPES = ("gemma3", "gemma3_text")

# What a published configuration leaves out because it is the family's default.
_DEFAULTS: Mapping[str, object] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def spec(config: Config) -> DecoderSpec:
    config = {**_DEFAULTS, **config}
    norm = replace(read_norm(config), offset=1.0)
    mlp = read_mlp(config, activation=config.get("hidden_activation", "gelu_pytorch_tanh"))

    def layer(kind: str) -> LayerSpec:
        bias = bool(config.get("attention_bias"))
        attention = read_attention(
            config,
            scale=config["query_pre_attn_scalar"] ** -0.5,
            window=config["sliding_window"] if kind == SLIDING else None,
            head_norm=norm,
            qkv_bias=bias,
            out_bias=bias,
        )
        residual = Sequential(post_norms=True)
        return LayerSpec(norm=norm, position=_rope(config, kind), attention=attention, mlp=mlp, residual=residual)

    layers = [layer(kind) for kind in _layer_types(config)]
    return read_spec(config, layers, embedding_scale=config["hidden_size"] ** 0.5)


def rename(name: str) -> str | None:
    """A tensor's name in a text-only checkpoint; None for what only pictures need. Both layouts of the multimodal
    files are known: `language_model.model.*`, and transformers 5's `model.language_model.*`."""
    if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
        return None
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)


def _layer_types(config: Config) -> tuple[str, ...]:
    pattern = config.get("sliding_window_pattern") or 6
    layers = range(num_layers(config))
    return read_layer_types(config, tuple(SLIDING if (layer + 1) % pattern else FULL for layer in layers))


def _rope(config: Config, layer_type: str) -> Rope:
    """Old style: rope_theta and rope_scaling are the global layers', rope_local_base_freq the sliding ones'."""
    if layer_type == FULL or layer_type in (config.get("rope_parameters") or {}):
        return read_rope(config, layer_type, theta=1e6 if layer_type == FULL else 1e4)
    return Rope(theta=float(config.get("rope_local_base_freq", 1e4)))
