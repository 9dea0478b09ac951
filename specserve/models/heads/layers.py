"""A draft head's own decoder layers as checkpoints describe them, and the description that is written of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from specserve.errors import ModelError
from specserve.models.config import (
    FULL,
    SLIDING,
    Config,
    num_layers,
    read_layer,
    read_layer_types,
    read_norm,
    read_spec,
    required,
)
from specserve.models.positions import ROPE_FIELDS, Rope
from specserve.models.spec import DecoderSpec, GatedMlp, RmsNorm, Sequential

# Those whose layers are Llama's, with or without biases and normalised queries and keys, which the tensors tell.
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # the op contract's name -> Hugging Face's


def read_layers(config: Config, names: Collection[str], vocab_size: int) -> DecoderSpec:
    """The layers that `config`, a Hugging Face configuration, and the canonical tensor `names` describe, over
    `vocab_size` draft ids. Raises ModelError naming the missing or unsupported setting."""
    kind = config.get("model_type")
    if kind is not None and kind not in _MODEL_TYPES:
        raise ModelError(
            f"config.json describes draft layers of type {kind!r}; supported are {', '.join(_MODEL_TYPES)}."
        )
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    if (count := num_layers(config)) > len(names):
        raise ModelError(f"config.json says {count} draft layers, and there are {len(names)} tensors.")
    types = read_layer_types(config, (FULL,) * count)
    window = required(config, "sliding_window") if SLIDING in types else None
    bias = bool(config.get("attention_bias"))
    if kind == "qwen3":
        config = {"head_dim": 128, **config}  # transformers' default, whatever the hidden size
    has_head_norms = kind == "qwen3" or f"{attention}.q_norm.weight" in names
    own: dict[str, Any] = {
        "qkv_bias": bias or f"{attention}.q_proj.bias" in names,
        "out_bias": bias or f"{attention}.o_proj.bias" in names,
        "mlp_bias": bool(config.get("mlp_bias")) or f"{mlp}.gate_proj.bias" in names,
        "head_norm": read_norm(config) if has_head_norms else None,
    }
    layers = [read_layer(config, each, window, **own) for each in types]
    return read_spec(config, layers, vocab_size=vocab_size)


def all_sliding(config: Config) -> bool:
    """Whether every layer has a sliding window. Raises ModelError where only some have: which rows of a block see each
    other then differs from layer to layer."""
    types = set(read_layer_types(config, (FULL,) * num_layers(config)))
    if types == {FULL, SLIDING}:
        raise ModelError(
            "layer_types has sliding and full attention: layers that are causal beside layers that are not are not "
            "supported."
        )
    return types == {SLIDING}


def write_layers(layers: DecoderSpec, vocab_size: int) -> dict[str, Any]:
    """What `read_layers` reads as `layers`: a Hugging Face configuration, with the target's `vocab_size`. Raises
    ModelError for what it has no key for."""
    first, windows = layers.layers[0], [each.attention.window for each in layers.layers]
    own, mlp, rope = first.attention, first.mlp, first.position
    alike = {replace(each, attention=replace(each.attention, window=None)) for each in layers.layers}
    if not isinstance(first.norm, RmsNorm) or not isinstance(mlp, GatedMlp):
        raise ModelError("These draft layers cannot be written: they have LayerNorms, or an MLP that is not gated.")
    scales = first.norm.offset, layers.embedding_scale, layers.logit_divisor
    plain = (*scales, first.residual) == (0.0, 1.0, 1.0, Sequential())
    plain = plain and own.scale == own.head_dim**-0.5
    if len(alike) > 1 or len(set(windows) - {None}) > 1 or not (isinstance(rope, Rope) and rope.is_plain and plain):
        raise ModelError(
            "These draft layers cannot be written: all must share one rotary embedding and one window, with the norms "
            "and scales of Llama."
        )
    return {
        "model_type": "llama" if own.head_norm is None else "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": mlp.size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_kv_heads,
        "head_dim": own.head_dim,
        "max_position_embeddings": layers.max_len,
        "rms_norm_eps": first.norm.eps,
        "hidden_act": _ACTIVATIONS[mlp.activation],
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(rope),
        "attention_bias": own.qkv_bias and own.out_bias,
        "mlp_bias": mlp.bias,
        "tie_word_embeddings": layers.tied_embeddings,
        "final_logit_softcapping": layers.logit_softcap,
        "sliding_window": max((window for window in windows if window is not None), default=None),
        "use_sliding_window": any(windows),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def _scaling(rope: Rope) -> dict[str, Any] | None:
    names = ROPE_FIELDS[rope.scaling]
    return {"rope_type": rope.scaling} | {name: getattr(rope, name) for name in names} if names else None
