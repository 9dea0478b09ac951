"""Falcon (arXiv 2311.16867): attention and an MLP side by side, behind one norm (7B, 11B) or each behind its own (40B,
180B), and few heads of keys and values; or one after the other, with ALiBi (the models of RefinedWeb)."""

from __future__ import annotations

from typing import Any

from specserve.errors import ModelError
from specserve.models.classic import read_layer_norm, read_plain_mlp, standard
from specserve.models.config import Config, num_layers, read_attention, read_rope, read_spec, required
from specserve.models.names import Names
from specserve.models.positions import Alibi
from specserve.models.spec import AttentionSpec, DecoderSpec, LayerSpec, Parallel, Sequential

ARCHITECTURES = ("FalconForCausalLM", "RWForCausalLM")
MODEL_TYPES = ("falcon", "RefinedWeb", "RefinedWebModel")
FUSED_BY_HEAD = ("self_attn.query_key_value",)
NAMES = Names(
    base="transformer.",
    layers="h",
    once={"model.embed_tokens": "word_embeddings", "model.norm": "ln_f"},
    each={
        "self_attn.query_key_value": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    unread=("self_attention.maybe_rotary.inv_freq", "self_attention.rotary_emb.inv_freq"),
)
_DEFAULTS = {"max_position_embeddings": 2048, "activation": "gelu", "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = standard(
        config,
        _DEFAULTS,
        hidden_size="n_embed",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        intermediate_size="ffn_hidden_size",
    )
    bias = bool(config.get("bias"))
    attention = read_attention(config, num_kv_heads=_kv_heads(config), qkv_bias=bias, out_bias=bias)
    layer = LayerSpec(
        norm=read_layer_norm(config),
        position=_alibi(attention) if config.get("alibi") else read_rope(config),
        attention=attention,
        mlp=read_plain_mlp(config, config["activation"], bias=bias),
        residual=_residual(config),
    )
    return read_spec(config, [layer] * num_layers(config))


def _kv_heads(config: Config) -> Any:
    if config.get("new_decoder_architecture"):
        named = (config.get(key) for key in ("num_kv_heads", "n_head_kv", "num_attention_heads"))
        return next((number for number in named if number is not None), None)
    return 1 if config.get("multi_query", True) else required(config, "num_attention_heads")


def _alibi(attention: AttentionSpec) -> Alibi:
    """Published code adds the biases before it scales."""
    slopes = Alibi.of_heads(attention.num_heads).slopes
    return Alibi(tuple(attention.scale * slope for slope in slopes))


def _residual(config: Config) -> Sequential | Parallel:
    is_new, norms = bool(config.get("new_decoder_architecture")), config.get("num_ln_in_parallel_attn")
    if is_new:
        return Parallel(own_norms=norms in (None, 2))
    if norms == 2:
        raise ModelError("num_ln_in_parallel_attn is 2 without new_decoder_architecture; no published code reads both.")
    return Parallel() if config.get("parallel_attn", True) else Sequential()


def rename(name: str) -> str | None:
    """Two norms side by side have names of their own."""
    renamed = NAMES.rename(name)
    if renamed is None:
        return None
    return renamed.replace(".ln_attn.", ".input_layernorm.").replace(".ln_mlp.", ".post_attention_layernorm.")
