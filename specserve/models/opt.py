"""OPT (arXiv 2205.01068): learned positions, LayerNorm, and an MLP with ReLU. In 350M norms follow what they norm, and
embeddings are narrower than layers."""

from __future__ import annotations

from specserve.models.classic import read_layer_norm, read_plain_mlp, refuse, standard
from specserve.models.config import Config, num_layers, read_attention, read_spec
from specserve.models.names import Names
from specserve.models.positions import LearnedPositions
from specserve.models.spec import DecoderSpec, LayerSpec, PostNorm, Sequential

ARCHITECTURES = ("OPTForCausalLM",)
MODEL_TYPES = ("opt",)
NAMES = Names(
    base="model.decoder.",
    layers="layers",
    once={
        "model.embed_tokens": "embed_tokens",
        "model.embed_positions": "embed_positions",
        "model.norm": "final_layer_norm",
        "model.project_in": "project_in",
        "model.project_out": "project_out",
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
    is_before = bool(config.get("do_layer_norm_before", True))
    if is_before:
        refuse(config, "_remove_final_layer_norm", True, "a model without a final norm is not supported")
    refuse(config, "layer_norm_elementwise_affine", False, "norms without weights are not supported")
    width = config.get("word_embed_proj_dim")
    bias = bool(config.get("enable_bias", True))
    layer = LayerSpec(
        norm=read_layer_norm({}),
        position=None,
        attention=read_attention(config, qkv_bias=bias, out_bias=bias),
        mlp=read_plain_mlp(config, config["activation_function"], bias=bias),
        residual=Sequential() if is_before else PostNorm(),
    )
    positions = LearnedPositions(config["max_position_embeddings"], offset=2)
    size = None if width == config.get("hidden_size") else width
    return read_spec(config, [layer] * num_layers(config), positions=positions, embedding_size=size)


def rename(name: str) -> str | None:
    """Checkpoints of before 2022-06 call the decoder so without `model.`, and have a number of their layout."""
    if name.endswith("decoder.version"):
        return None
    return NAMES.rename(f"model.{name}" if name.startswith("decoder.") else name)
