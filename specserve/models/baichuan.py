"""Baichuan 1 and 2 (arXiv 2309.10305): Llama's layout with one matrix for queries, keys and values. Those of 7B rotate,
those of 13B have ALiBi; the LM head of Baichuan 2 has rows of length 1."""

from __future__ import annotations

from specserve.models.config import Config, num_layers, read_layer, read_spec, required
from specserve.models.positions import Alibi
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("BaichuanForCausalLM", "BaiChuanForCausalLM")  # the latter is the first 7B's
MODEL_TYPES = ("baichuan",)
FUSED = {"self_attn.W_pack": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_SECOND_VOCAB = 125_696  # tokens of Baichuan 2: its configuration says in no other way that it is not the first


def spec(config: Config) -> DecoderSpec:
    """13B is told by its length, which its configuration gives as model_max_length alone."""
    has_alibi = config.get("max_position_embeddings") is None
    position = Alibi.of_heads(required(config, "num_attention_heads")) if has_alibi else None
    layer = read_layer(config, position=position)
    if has_alibi:
        config = {**config, "max_position_embeddings": required(config, "model_max_length")}
    is_second = config.get("vocab_size") == _SECOND_VOCAB
    return read_spec(config, [layer] * num_layers(config), normed_head=is_second)
