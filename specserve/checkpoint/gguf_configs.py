"""config.json of each architecture of GGUF files, in the style that every transformers version reads (rope_theta,
rope_scaling). What llama.cpp has in its code and not in files (ALiBi of Baichuan 13B, SmolLM 3's layers without rotary
embedding, whether weights of experts are normalised) stands here."""

from __future__ import annotations

from typing import Any

from specserve.checkpoint.gguf_file import GGUFFile
from specserve.checkpoint.gguf_metadata import (
    check_whole_heads,
    has,
    head_dim,
    num_kv_heads,
    num_layers,
    number,
    optional,
    positive,
    rope_scaling,
    rope_theta,
    rotated,
    whole,
)
from specserve.errors import ModelError

Config = dict[str, Any]


def _sizes(file: GGUFFile, **names: str) -> Config:
    """The numbers that all have, under Llama's names or, where `names` has another for one, under that."""
    sizes = {
        "hidden_size": whole(file, "embedding_length"),
        "intermediate_size": whole(file, "feed_forward_length"),
        "num_hidden_layers": num_layers(file),
        "num_attention_heads": whole(file, "attention.head_count"),
        "max_position_embeddings": whole(file, "context_length"),
    }
    return {names.get(name, name): value for name, value in sizes.items()}


def _like_llama(file: GGUFFile, *, in_part: bool = False) -> Config:
    """`in_part`: heads may be rotated in part."""
    if not in_part:
        check_whole_heads(file)
    return _sizes(file) | {
        "num_key_value_heads": num_kv_heads(file),
        "head_dim": head_dim(file),
        "hidden_act": "silu",
        "rms_norm_eps": number(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta(file),
        "rope_scaling": rope_scaling(file),
    }


def llama(file: GGUFFile) -> Config:
    """Mistral is "llama" in a GGUF; only the window tells them apart, and without one they are the same model."""
    biases = {"attention_bias": has(file, "attn_q.bias"), "mlp_bias": has(file, "ffn_gate.bias")}
    config = _like_llama(file) | biases
    if (window := positive(file, "attention.sliding_window")) is not None:
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def mixtral(file: GGUFFile) -> Config:
    return _like_llama(file) | {
        "num_local_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "sliding_window": positive(file, "attention.sliding_window"),
    }


def qwen2(file: GGUFFile) -> Config:
    return _like_llama(file) | {"use_sliding_window": False}


def qwen3(file: GGUFFile) -> Config:
    return _like_llama(file) | {"use_sliding_window": False, "attention_bias": False}


def qwen(file: GGUFFile) -> Config:
    """Qwen 1. Files state the length up to which published code changes theta and scales queries, which llama.cpp does
    not; what was trained without is 8,192 tokens, and all of it in the model of 80 layers. The epsilon has either
    name."""
    check_whole_heads(file)
    eps = "attention.layer_norm_rms_epsilon"
    if optional(file, eps) is None:
        eps = "attention.layer_norm_epsilon"
    sizes = _sizes(file, max_position_embeddings="seq_length")
    if sizes["num_hidden_layers"] != 80:
        sizes["seq_length"] = min(sizes["seq_length"], 8192)
    return sizes | {
        "kv_channels": head_dim(file),
        "layer_norm_epsilon": number(file, eps),
        "rotary_emb_base": rope_theta(file),
        "no_bias": True,
    }


def internlm2(file: GGUFFile) -> Config:
    return _like_llama(file) | {"bias": has(file, "attn_q.bias")}


def _experts(file: GGUFFile, part: str = "ffn_gate_exps", key: str = "expert_feed_forward_length") -> Config:
    """Files of before 2024-07 do not say how wide experts are: their tensors do."""
    tensor = file.tensors.get(f"blk.0.{part}.weight")
    if tensor is None:
        raise ModelError(f"{file.path} has no tensor 'blk.0.{part}.weight'.")
    return {
        "num_experts": whole(file, "expert_count"),
        "num_experts_per_tok": whole(file, "expert_used_count"),
        "moe_intermediate_size": whole(file, key, tensor.shape[-2]),
    }


def _is_normalized(file: GGUFFile, default: bool) -> dict[str, bool]:
    """Whether the weights of a token's experts are: llama.cpp knows by the architecture, unless the file says it."""
    return {"norm_topk_prob": bool(optional(file, "expert_weights_norm", default))}


def qwen2_moe(file: GGUFFile) -> Config:
    config = qwen2(file) | _experts(file) | _is_normalized(file, False)
    shared = _experts(file, "ffn_gate_shexp", "expert_shared_feed_forward_length")["moe_intermediate_size"]
    return config | {"shared_expert_intermediate_size": shared, "qkv_bias": has(file, "attn_q.bias")}


def qwen3_moe(file: GGUFFile) -> Config:
    return qwen3(file) | _experts(file) | _is_normalized(file, True)


def olmoe(file: GGUFFile) -> Config:
    config = _like_llama(file) | _experts(file) | _is_normalized(file, False)
    return config | {"intermediate_size": config.pop("moe_intermediate_size"), "attention_bias": False}


def gemma3(file: GGUFFile) -> Config:
    """Gemma 3 (arXiv 2503.19786): five local layers to a global one; the 27B model (62 layers) scales its queries by
    hidden / heads instead of the head size, which the file does not say."""
    layers, heads = num_layers(file), whole(file, "attention.head_count")
    global_every = 6
    return _like_llama(file) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": whole(file, "embedding_length") // heads if layers == 62 else head_dim(file),
        "sliding_window": whole(file, "attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % global_every else "full_attention" for layer in range(layers)
        ],
        "rope_local_base_freq": number(file, "rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": positive(file, "final_logit_softcapping"),
        "attn_logit_softcapping": positive(file, "attn_logit_softcapping"),
    }


def smollm3(file: GGUFFile) -> Config:
    """Every fourth layer has no rotary embedding."""
    rotates = [int((layer + 1) % 4 != 0) for layer in range(num_layers(file))]
    return _like_llama(file) | {"no_rope_layers": rotates, "no_rope_layer_interval": 4, "use_sliding_window": False}


def granite(file: GGUFFile) -> Config:
    settings = {
        "attention_multiplier": number(file, "attention.scale", head_dim(file) ** -0.5),
        "embedding_multiplier": number(file, "embedding_scale", 1.0),
        "residual_multiplier": number(file, "residual_scale", 1.0),
        "logits_scaling": number(file, "logit_scale", 1.0),
    }
    biases = {"attention_bias": has(file, "attn_q.bias"), "mlp_bias": has(file, "ffn_gate.bias")}
    return _like_llama(file) | settings | biases


def ernie4_5(file: GGUFFile) -> Config:
    return _like_llama(file) | {"use_bias": has(file, "attn_q.bias")}


def glm(file: GGUFFile) -> Config:
    return _like_llama(file, in_part=True) | {
        "partial_rotary_factor": rotated(file) / head_dim(file),
        "attention_bias": has(file, "attn_q.bias", "attn_qkv.bias"),
    }


def phi3(file: GGUFFile) -> Config:
    longest = whole(file, "context_length")
    return _like_llama(file, in_part=True) | {
        "partial_rotary_factor": rotated(file) / head_dim(file),
        "original_max_position_embeddings": whole(file, "rope.scaling.original_context_length", longest),
        "sliding_window": positive(file, "attention.sliding_window"),
    }


def olmo2(file: GGUFFile) -> Config:
    return _like_llama(file) | {"attention_bias": False}


def olmo3(file: GGUFFile) -> Config:
    """Where the file does not say which layers have a window, three of four do."""
    layers = num_layers(file)
    pattern = optional(file, "attention.sliding_window_pattern")
    slides = [(layer + 1) % 4 != 0 for layer in range(layers)] if pattern is None else list(pattern)
    if len(slides) != layers:
        raise ModelError(f"{file.path}: attention.sliding_window_pattern has {len(slides)} of {layers} layers.")
    return olmo2(file) | {
        "sliding_window": whole(file, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
    }


def baichuan(file: GGUFFile) -> Config:
    """7B has 32 layers and rotates, 13B has 40 and ALiBi: there is no other way to tell, there and here. config.json
    tells them by the name of their length."""
    config, layers = _like_llama(file), num_layers(file)
    if layers not in (32, 40):
        raise ModelError(
            f"{file.path}: a baichuan model of {layers} layers is not supported; its file does not say whether it "
            "rotates or has ALiBi. Known are 32 (7B) and 40 (13B)."
        )
    if layers == 40:
        config["model_max_length"] = config.pop("max_position_embeddings")
    return config


def starcoder2(file: GGUFFile) -> Config:
    check_whole_heads(file)
    return _sizes(file) | {
        "num_key_value_heads": num_kv_heads(file),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": number(file, "attention.layer_norm_epsilon"),
        "rope_theta": rope_theta(file),
        "rope_scaling": rope_scaling(file),
        "use_bias": has(file, "attn_output.bias"),
        "sliding_window": positive(file, "attention.sliding_window"),
    }


def gpt2(file: GGUFFile) -> Config:
    """n_ctx is what other configurations call n_positions."""
    sizes = _sizes(
        file,
        hidden_size="n_embd",
        intermediate_size="n_inner",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    return sizes | {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": number(file, "attention.layer_norm_epsilon"),
    }


def gpt_bigcode(file: GGUFFile) -> Config:
    if num_kv_heads(file) != 1:
        raise ModelError(f"{file.path}: a starcoder model with {num_kv_heads(file)} heads of keys is not supported.")
    return gpt2(file) | {"activation_function": "gelu_pytorch_tanh", "multi_query": True}


def gpt_neox(file: GGUFFile) -> Config:
    if num_kv_heads(file) != whole(file, "attention.head_count"):
        raise ModelError(f"{file.path}: a gptneox model has as many heads of keys as of queries.")
    return _sizes(file) | {
        "hidden_act": "gelu",
        "layer_norm_eps": number(file, "attention.layer_norm_epsilon"),
        "rotary_pct": rotated(file) / head_dim(file),
        "rotary_emb_base": rope_theta(file),
        "rope_scaling": rope_scaling(file),
        "use_parallel_residual": bool(optional(file, "use_parallel_residual", True)),
        "attention_bias": has(file, "attn_qkv.bias"),
    }


def falcon(file: GGUFFile) -> Config:
    """7B has one head of keys and values. With more of them, behind one norm, it is 11B: llama.cpp's converter drops
    the rope_theta that this one has of its own."""
    is_new = num_kv_heads(file) != 1
    if is_new:
        number(file, "rope.freq_base")
    return _falcon(file) | {"new_decoder_architecture": is_new, "num_ln_in_parallel_attn": 1 if is_new else None}


def falcon_of_two_norms(file: GGUFFile) -> Config:
    return _falcon(file) | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2}


def _falcon(file: GGUFFile) -> Config:
    check_whole_heads(file)
    return _sizes(file, intermediate_size="ffn_hidden_size") | {
        "num_kv_heads": num_kv_heads(file),
        "activation": "gelu",
        "layer_norm_epsilon": number(file, "attention.layer_norm_epsilon"),
        "rope_theta": rope_theta(file),
        "rope_scaling": rope_scaling(file),
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": has(file, "attn_output.bias"),
    }


def bloom(file: GGUFFile) -> Config:
    """All are four times as wide in between; config.json has no entry for that."""
    names = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "seq_length"}
    sizes = _sizes(file, **names)
    del sizes["intermediate_size"]
    return sizes | {"layer_norm_epsilon": number(file, "attention.layer_norm_epsilon")}


def mpt(file: GGUFFile) -> Config:
    """attn_config says what of MPT is not implemented, and is refused where it is read."""
    sizes = _sizes(
        file,
        hidden_size="d_model",
        num_hidden_layers="n_layers",
        num_attention_heads="n_heads",
        max_position_embeddings="max_seq_len",
    )
    width, heads = sizes.pop("intermediate_size"), sizes["n_heads"]
    if width % sizes["d_model"]:
        raise ModelError(f"{file.path}: an MLP of {width} is no multiple of {sizes['d_model']}.")
    bias = number(file, "attention.max_alibi_bias") if positive(file, "attention.max_alibi_bias") else None
    attention = {
        "alibi": bias is not None,
        "alibi_bias_max": 8 if bias is None else int(bias) if bias == int(bias) else bias,
        "clip_qkv": positive(file, "attention.clamp_kqv"),
        "attn_type": "multihead_attention" if num_kv_heads(file) == heads else "grouped_query_attention",
    }
    return sizes | {
        "expansion_ratio": width // sizes["d_model"],
        "layer_norm_epsilon": number(file, "attention.layer_norm_epsilon"),
        "no_bias": not has(file, "attn_qkv.bias", "attn_output.bias", "attn_norm.bias"),
        "attn_config": attention,
    }
