"""Qwen 1 (arXiv 2309.16609): Llama's layers with biases of queries, keys and values, under names of their own."""

from __future__ import annotations

from specserve.errors import ModelError
from specserve.models.checks import check_size
from specserve.models.classic import refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_mlp, read_norm, read_spec, required
from specserve.models.names import Names
from specserve.models.positions import Rope
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("QWenLMHeadModel",)
MODEL_TYPES = ("qwen",)
FUSED = {"self_attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
NAMES = Names(
    base="transformer.",
    layers="h",
    once={"model.embed_tokens": "wte", "model.norm": "ln_f"},
    each={
        "input_layernorm": "ln_1",
        "self_attn.c_attn": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.w2",
        "mlp.up_proj": "mlp.w1",
        "mlp.down_proj": "mlp.c_proj",
    },
)
rename = NAMES.rename
_DEFAULTS = {"no_bias": True, "rotary_pct": 1.0, "rotary_emb_base": 10_000.0, "kv_channels": 128}


def spec(config: Config) -> DecoderSpec:
    """`seq_length` is the longest text: beyond it published code changes theta with each length (use_dynamic_ntk) and
    scales queries by their positions (use_logn_attn); up to it neither does anything."""
    required(config, "seq_length")
    config = standard(config, _DEFAULTS, max_position_embeddings="seq_length", rms_norm_eps="layer_norm_epsilon")
    refuse(config, "scale_attn_weights", False, "attention scores that are not scaled are not supported")
    if config.get("visual"):
        raise ModelError("config.json has a vision tower (visual): Qwen-VL is not supported; Qwen 1 of text alone is.")
    bias, size = not config["no_bias"], required(config, "intermediate_size")
    check_size("intermediate_size", size)
    attention = read_attention({**config, "head_dim": config["kv_channels"]}, qkv_bias=True, out_bias=bias)
    if attention.q_size != required(config, "hidden_size"):
        raise ModelError(f"kv_channels is {attention.head_dim}; times num_attention_heads it must be hidden_size.")
    layer = LayerSpec(
        norm=read_norm(config),
        position=Rope(config["rotary_emb_base"], fraction=config["rotary_pct"]),
        attention=attention,
        mlp=read_mlp({**config, "intermediate_size": size // 2}, bias=bias, activation="silu"),
    )
    return read_spec(config, [layer] * num_layers(config))
