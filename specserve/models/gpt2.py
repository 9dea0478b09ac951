"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, and matrices that are stored as they are multiplied from
the right, [in, out]."""

from __future__ import annotations

from dataclasses import replace

from specserve.models.classic import read_layer_norm, read_plain_mlp, refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec
from specserve.models.names import Names
from specserve.models.positions import LearnedPositions
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("GPT2LMHeadModel",)
MODEL_TYPES = ("gpt2",)
FUSED = {"self_attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
IS_TRANSPOSED = True
NAMES = Names(
    base="transformer.",
    layers="h",
    once={"model.embed_tokens": "wte", "model.embed_positions": "wpe", "model.norm": "ln_f"},
    each={
        "input_layernorm": "ln_1",
        "self_attn.c_attn": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": "mlp.c_fc",
        "mlp.down_proj": "mlp.c_proj",
    },
    unread=("attn.bias", "attn.masked_bias"),
)
rename = NAMES.rename
SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_DEFAULTS = {"max_position_embeddings": 1024, "activation_function": "gelu_new", "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = standard(config, _DEFAULTS, **SIZES)
    refuse(config, "add_cross_attention", True, "attention to an encoder is not supported")
    attention = read_attention(config, qkv_bias=True, out_bias=True)
    scale = 1.0 if config.get("scale_attn_weights") is False else attention.scale
    by_depth = bool(config.get("scale_attn_by_inverse_layer_idx"))
    layers = [
        LayerSpec(
            norm=read_layer_norm(config),
            position=None,
            attention=replace(attention, scale=scale / (layer + 1) if by_depth else scale),
            mlp=read_plain_mlp(config, config["activation_function"]),
        )
        for layer in range(num_layers(config))
    ]
    return read_spec(config, layers, positions=LearnedPositions(config["max_position_embeddings"]))
