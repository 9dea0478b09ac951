"""BLOOM (arXiv 2211.05100): ALiBi, LayerNorm of the embedding and of what layers read, and a tied LM head."""

from __future__ import annotations

from specserve.models.classic import read_layer_norm, read_plain_mlp, refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec
from specserve.models.names import Names
from specserve.models.positions import Alibi
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("BloomForCausalLM",)
MODEL_TYPES = ("bloom",)
FUSED_BY_HEAD = ("self_attn.query_key_value",)
NAMES = Names(
    base="transformer.",
    layers="h",
    once={
        "model.embed_tokens": "word_embeddings",
        "model.embed_norm": "word_embeddings_layernorm",
        "model.norm": "ln_f",
    },
    each={
        "self_attn.query_key_value": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
)
rename = NAMES.rename
# ALiBi itself knows no longest text: this is what the models were trained with.
_DEFAULTS = {"max_position_embeddings": 2048, "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = standard(
        config,
        _DEFAULTS,
        hidden_size="n_embed",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="seq_length",
    )
    why = "residuals that begin behind a norm are not supported"
    refuse(config, "apply_residual_connection_post_layernorm", True, why)
    norm, attention = read_layer_norm(config), read_attention(config, qkv_bias=True, out_bias=True)
    layer = LayerSpec(
        norm=norm,
        position=Alibi.of_heads(attention.num_heads),
        attention=attention,
        mlp=read_plain_mlp(config, "gelu_new"),
    )
    return read_spec(config, [layer] * num_layers(config), embedding_norm=norm)
