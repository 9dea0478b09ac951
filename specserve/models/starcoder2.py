"""StarCoder 2 (arXiv 2402.19173): Llama's attention with biases and perhaps a sliding window, LayerNorm, and an MLP
that is not gated."""

from __future__ import annotations

from specserve.models.classic import read_layer_norm, read_plain_mlp, standard
from specserve.models.config import Config, num_layers, read_attention, read_rope, read_spec
from specserve.models.names import Names
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("Starcoder2ForCausalLM",)
MODEL_TYPES = ("starcoder2",)
NAMES = Names(
    base="model.",
    layers="layers",
    once={"model.embed_tokens": "embed_tokens", "model.norm": "norm"},
    each={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
)
rename = NAMES.rename
_DEFAULTS = {
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def spec(config: Config) -> DecoderSpec:
    config = standard(config, _DEFAULTS)
    bias = bool(config.get("use_bias", True))
    layer = LayerSpec(
        norm=read_layer_norm(config, "norm_epsilon"),
        position=read_rope(config),
        attention=read_attention(config, window=config.get("sliding_window"), qkv_bias=bias, out_bias=bias),
        mlp=read_plain_mlp(config, config["hidden_act"], bias=bias),
    )
    return read_spec(config, [layer] * num_layers(config))
