"""GPT BigCode (SantaCoder, StarCoder; arXiv 2301.03988): GPT-2 with one head of keys and values for all of queries."""

from __future__ import annotations

from specserve.models.classic import read_layer_norm, read_plain_mlp, refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec, required
from specserve.models.names import Names
from specserve.models.positions import LearnedPositions
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("GPTBigCodeForCausalLM",)
MODEL_TYPES = ("gpt_bigcode",)
FUSED_BY_HEAD = ("self_attn.c_attn",)
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
_DEFAULTS = {"max_position_embeddings": 1024, "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = standard(
        config,
        _DEFAULTS,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        intermediate_size="n_inner",
    )
    refuse(config, "add_cross_attention", True, "attention to an encoder is not supported")
    own = {"scale": 1.0} if config.get("scale_attn_weights") is False else {}
    kv_heads = 1 if config.get("multi_query", True) else required(config, "num_attention_heads")
    layer = LayerSpec(
        norm=read_layer_norm(config),
        position=None,
        attention=read_attention(config, num_kv_heads=kv_heads, qkv_bias=True, out_bias=True, **own),
        mlp=read_plain_mlp(config, config["activation_function"]),
    )
    positions = LearnedPositions(config["max_position_embeddings"])
    return read_spec(config, [layer] * num_layers(config), positions=positions)
