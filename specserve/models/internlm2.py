"""InternLM 2 and 2.5 (arXiv 2403.17297): Llama's layers under names of their own, with one matrix for queries, keys and
values in which those of each KV head lie together."""

from __future__ import annotations

from specserve.models.config import Config, num_layers, read_layer, read_spec
from specserve.models.names import Names
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("InternLM2ForCausalLM",)
MODEL_TYPES = ("internlm2",)
FUSED_BY_HEAD = ("self_attn.wqkv",)
NAMES = Names(
    base="model.",
    layers="layers",
    once={"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"},
    each={
        "input_layernorm": "attention_norm",
        "self_attn.wqkv": "attention.wqkv",
        "self_attn.o_proj": "attention.wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
    unread=("attention.rotary_emb.inv_freq",),
)
rename = NAMES.rename


def spec(config: Config) -> DecoderSpec:
    bias = bool(config.get("bias", True))
    layer = read_layer(config, qkv_bias=bias, out_bias=bias)
    return read_spec(config, [layer] * num_layers(config))
