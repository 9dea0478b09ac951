"""OPT (arXiv 2205.01068), all sizes but 350M: learned positions, LayerNorm, and an MLP with ReLU."""

from __future__ import annotations

from specserve.errors import ModelError
from specserve.models.classic import read_layer_norm, read_plain_mlp, refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec
from specserve.models.names import Names
from specserve.models.positions import LearnedPositions
from specserve.models.spec import DecoderSpec, LayerSpec

ARCHITECTURES = ("OPTForCausalLM",)
MODEL_TYPES = ("opt",)
NAMES = Names(
    base="model.decoder.",
    layers="layers",
    once={
        "model.embed_tokens": "embed_tokens",
        "model.embed_positions": "embed_positions",
        "model.norm": "final_layer_norm",
    },
    each={
        "input_layernorm": "self_attn_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "post_attention_layernorm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
)
_DEFAULTS = {"max_position_embeddings": 2048, "tie_word_embeddings": True, "activation_function": "relu"}


def spec(config: Config) -> DecoderSpec:
    config = standard(config, _DEFAULTS, intermediate_size="ffn_dim")
    refuse(config, "do_layer_norm_before", False, "norms after what joins the residual stream are not supported")
    refuse(config, "_remove_final_layer_norm", True, "a model without a final norm is not supported")
    refuse(config, "layer_norm_elementwise_affine", False, "norms without weights are not supported")
    if (width := config.get("word_embed_proj_dim")) not in (None, config.get("hidden_size")):
        raise ModelError(f"config.json sets word_embed_proj_dim to {width}; it must be hidden_size.")
    bias = bool(config.get("enable_bias", True))
    layer = LayerSpec(
        norm=read_layer_norm({}),
        position=None,
        attention=read_attention(config, qkv_bias=bias, out_bias=bias),
        mlp=read_plain_mlp(config, config["activation_function"], bias=bias),
    )
    positions = LearnedPositions(config["max_position_embeddings"], offset=2)
    return read_spec(config, [layer] * num_layers(config), positions=positions)


def rename(name: str) -> str | None:
    """Checkpoints of before 2022-06 call the decoder so without `model.`, and have a number of their layout."""
    if name.endswith("decoder.version"):
        return None
    return NAMES.rename(f"model.{name}" if name.startswith("decoder.") else name)
