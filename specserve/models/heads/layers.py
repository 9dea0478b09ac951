"""A draft head's own decoder layers as checkpoints describe them, and the description that is written of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specserve.errors import ModelError
from specserve.models.spec import (
    FULL,
    SLIDING,
    Config,
    DecoderSpec,
    read_layer_types,
    read_spec,
    required,
)

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
    if (num_layers := required(config, "num_hidden_layers")) > len(names):
        raise ModelError(f"config.json says {num_layers} draft layers, and there are {len(names)} tensors.")
    types = read_layer_types(config, (FULL,) * num_layers)
    window = required(config, "sliding_window") if SLIDING in types else None
    bias = bool(config.get("attention_bias"))
    if kind == "qwen3":
        config = {"head_dim": 128, **config}  # transformers' default, whatever the hidden size
    return read_spec(
        config,
        types,
        window,
        vocab_size=vocab_size,
        qkv_bias=bias or f"{attention}.q_proj.bias" in names,
        o_bias=bias or f"{attention}.o_proj.bias" in names,
        mlp_bias=bool(config.get("mlp_bias")) or f"{mlp}.gate_proj.bias" in names,
        qk_norm=kind == "qwen3" or f"{attention}.q_norm.weight" in names,
    )


def all_sliding(config: Config) -> bool:
    """Whether every layer has a sliding window. Raises ModelError where only some have: which rows of a block see each
    other then differs from layer to layer."""
    types = set(read_layer_types(config, (FULL,) * required(config, "num_hidden_layers")))
    if types == {FULL, SLIDING}:
        raise ModelError(
            "layer_types has sliding and full attention: layers that are causal beside layers that are not are not "
            "supported."
        )
    return types == {SLIDING}


def write_layers(layers: DecoderSpec, vocab_size: int) -> dict[str, Any]:
    """What `read_layers` reads as `layers`: a Hugging Face configuration, with the target's `vocab_size`. Raises
    ModelError for what it has no key for."""
    ropes, windows = set(layers.ropes), {window for window in layers.windows if window is not None}
    plain = (layers.norm_offset, layers.embedding_scale, layers.post_norms) == (0.0, 1.0, False)
    if len(ropes) != 1 or len(windows) > 1 or not plain or layers.query_scale != layers.head_dim**-0.5:
        raise ModelError(
            "These draft layers cannot be written: all must share one rotary embedding and one window, with the norms "
            "and scales of Llama."
        )
    (rope,) = ropes
    scaling = None
    if rope.scaling != "default":
        names = ("factor",) if rope.scaling == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
        scaling = {"rope_type": rope.scaling} | {name: getattr(rope, name) for name in names}
    if scaling is not None and rope.scaling == "llama3":
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return {
        "model_type": "qwen3" if layers.qk_norm else "llama",
        "vocab_size": vocab_size,
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_layers,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "max_position_embeddings": layers.max_len,
        "rms_norm_eps": layers.norm_eps,
        "hidden_act": _ACTIVATIONS[layers.activation],
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "attention_bias": layers.qkv_bias and layers.o_bias,
        "mlp_bias": layers.mlp_bias,
        "tie_word_embeddings": layers.tied_embeddings,
        "final_logit_softcapping": layers.logit_softcap,
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
        "layer_types": [FULL if window is None else SLIDING for window in layers.windows],
    }
