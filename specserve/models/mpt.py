"""MPT (MosaicML 2023): ALiBi and LayerNorm without any bias, and a tied LM head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.errors import ModelError
from specserve.models.classic import read_layer_norm, read_plain_mlp, refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec, required
from specserve.models.names import Names
from specserve.models.positions import Alibi
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("MptForCausalLM", "MPTForCausalLM")
MODEL_TYPES = ("mpt",)
FUSED = {"self_attn.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
NAMES = Names(
    base="transformer.",
    layers="blocks",
    once={"model.embed_tokens": "wte", "model.norm": "norm_f"},
    each={
        "input_layernorm": "norm_1",
        "self_attn.Wqkv": "attn.Wqkv",
        "self_attn.o_proj": "attn.out_proj",
        "post_attention_layernorm": "norm_2",
        "mlp.up_proj": "ffn.up_proj",
        "mlp.down_proj": "ffn.down_proj",
    },
)
rename = NAMES.rename
_DEFAULTS = {"max_position_embeddings": 2048, "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = standard(
        config,
        _DEFAULTS,
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )
    refuse(config, "no_bias", False, "MPT with biases is not supported")
    if config.get("logit_scale") is not None:
        raise ModelError("config.json sets logit_scale; MPT with scaled logits is not supported.")
    own = _attention(config.get("attn_config") or {})
    size = config.get("expansion_ratio", 4) * required(config, "hidden_size")
    scale = own.get("softmax_scale")
    attention = read_attention(config, **({} if scale is None else {"scale": scale}))
    layer = LayerSpec(
        norm=read_layer_norm(config, bias=False),
        position=Alibi.of_heads(attention.num_heads, own.get("alibi_bias_max", 8)),
        attention=attention,
        mlp=read_plain_mlp({**config, "intermediate_size": size}, "gelu", bias=False),
    )
    return read_spec(config, [layer] * num_layers(config))


def _attention(own: Any) -> Config:
    """What attn_config says. Raises ModelError for what would change the numbers and is not implemented."""
    if not isinstance(own, Mapping):
        raise ModelError(f"config.json gives attn_config as {own!r}; it must be an object.")
    refuse(own, "alibi", False, "MPT without ALiBi is not supported")
    for key in ("clip_qkv", "qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        if own.get(key):
            raise ModelError(f"attn_config sets {key} to {own[key]!r}, which is not supported.")
    if own.get("attn_type", "multihead_attention") != "multihead_attention":
        raise ModelError(f"attn_config sets attn_type to {own['attn_type']!r}; supported is multihead_attention.")
    return own
