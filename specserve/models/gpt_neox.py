"""GPT-NeoX (arXiv 2204.06745; Pythia, StableLM Alpha, RedPajama): attention and an MLP side by side, each behind its
own norm, rotating a part of each head."""

from __future__ import annotations

from specserve.models.classic import read_layer_norm, read_plain_mlp, standard
from specserve.models.config import Config, num_layers, read_attention, read_rope, read_spec
from specserve.models.names import Names
from specserve.models.spec import DecoderSpec, LayerSpec, Parallel, Sequential

ARCHITECTURES = ("GPTNeoXForCausalLM",)
MODEL_TYPES = ("gpt_neox",)
FUSED_BY_HEAD = ("self_attn.query_key_value",)
NAMES = Names(
    base="gpt_neox.",
    layers="layers",
    once={"model.embed_tokens": "embed_in", "model.norm": "final_layer_norm", "lm_head": "embed_out"},
    each={
        "self_attn.query_key_value": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    unread=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
)
rename = NAMES.rename
_DEFAULTS = {"max_position_embeddings": 2048, "hidden_act": "gelu", "rotary_pct": 0.25}


def spec(config: Config) -> DecoderSpec:
    config = standard(config, _DEFAULTS, rope_theta="rotary_emb_base")
    bias = bool(config.get("attention_bias", True))
    layer = LayerSpec(
        norm=read_layer_norm(config, "layer_norm_eps"),
        position=read_rope(config, fraction=config["rotary_pct"]),
        attention=read_attention(config, qkv_bias=bias, out_bias=bias),
        mlp=read_plain_mlp(config, config["hidden_act"]),
        residual=Parallel(own_norms=True) if config.get("use_parallel_residual", True) else Sequential(),
    )
    return read_spec(config, [layer] * num_layers(config))
