"""GPT BigCode (SantaCoder, StarCoder; arXiv 2301.03988): GPT-2 with one head of keys and values for all of queries."""

from __future__ import annotations

from specserve.models.classic import read_layer_norm, read_plain_mlp, refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec, required
from specserve.models.gpt2 import NAMES, SIZES
from specserve.models.positions import LearnedPositions
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("GPTBigCodeForCausalLM",)
MODEL_TYPES = ("gpt_bigcode",)
FUSED_BY_HEAD = ("self_attn.c_attn",)
rename = NAMES.rename
_DEFAULTS = {"max_position_embeddings": 1024, "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def spec(config: Config) -> DecoderSpec:
    config = standard(config, _DEFAULTS, **SIZES)
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
