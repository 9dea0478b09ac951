"""GPT-J (Wang and Komatsuzaki 2021): attention and an MLP side by side behind one norm, rotating neighbours in a part
of each head; the LM head has a bias."""

from __future__ import annotations

import math

from specserve.errors import ModelError
from specserve.models.checks import check_size
from specserve.models.classic import read_layer_norm, read_plain_mlp, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec
from specserve.models.gpt2 import SIZES
from specserve.models.names import Names
from specserve.models.positions import Rope
from specserve.models.spec import DecoderSpec, LayerSpec, Parallel

ARCHITECTURES = ("GPTJForCausalLM",)
MODEL_TYPES = ("gptj",)
NAMES = Names(
    base="transformer.",
    layers="h",
    once={"model.embed_tokens": "wte", "model.norm": "ln_f"},
    each={
        "input_layernorm": "ln_1",
        **{f"self_attn.{part}_proj": f"attn.{part}_proj" for part in "qkv"},
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
    },
    unread=("attn.bias", "attn.masked_bias"),
)
rename = NAMES.rename
_DEFAULTS = {"max_position_embeddings": 2048, "activation_function": "gelu_new", "rotary_dim": 64}


def spec(config: Config) -> DecoderSpec:
    config = standard(config, _DEFAULTS, **SIZES)
    attention, rotated = read_attention(config), config["rotary_dim"]
    check_size("rotary_dim", rotated)
    if rotated > attention.head_dim:
        raise ModelError(f"rotary_dim is {rotated}, and heads have {attention.head_dim} features.")
    fraction = min(1.0, math.nextafter(rotated / attention.head_dim, 2.0))  # so much, and not rounded down
    layer = LayerSpec(
        norm=read_layer_norm(config),
        position=Rope(interleaved=True, fraction=fraction),
        attention=attention,
        mlp=read_plain_mlp(config, config["activation_function"]),
        residual=Parallel(),
    )
    return read_spec(config, [layer] * num_layers(config), head_bias=True)
