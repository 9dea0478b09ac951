"""The architectures of GGUF files in Hugging Face's terms: what config.json says, what tensors are called, and how rows
are arranged. Names of tensors are those of the gguf package's `constants.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specserve.checkpoint import gguf_configs as configs
from specserve.checkpoint.gguf_file import GGUFFile
from specserve.checkpoint.gguf_metadata import has, optional
from specserve.checkpoint.gguf_tensors import Arrange, by_head, experts, halves, plain, row, split_qkv, transposed
from specserve.errors import ModelError, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One kind of model. `once` and `each` have the file's tensors of the model and of each layer, without ".weight"
    and ".bias", and what they are in the checkpoint, whose layers are `layers`.N; `config` makes config.json of what is
    common to all models, and `reads` are the settings of gguf_metadata._NEUTRAL that it takes into account."""

    model_type: str
    class_name: str
    once: Mapping[str, str]
    layers: str = "model.layers"
    each: Mapping[str, str | Arrange]
    config: Callable[[GGUFFile], dict[str, Any]]
    reads: tuple[str, ...] = ()
    norm_offset: float = 0.0  # what the file adds to every norm weight

    def arrange(self, part: str) -> Arrange:
        """What becomes of a layer's tensor. Raises KeyError for one that is unknown."""
        found = self.each[part]
        return plain(found) if isinstance(found, str) else found


_ONCE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION: Mapping[str, str | Arrange] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_NORMS, **_ATTENTION, **_MLP}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
# q and k by pairs, as those have them whose rotary embedding llama.cpp computes for neighbours.
_BY_PAIRS = {"attn_q": halves("self_attn.q_proj"), "attn_k": halves("self_attn.k_proj", of_keys=True)}
_EXPERTS: Mapping[str, str | Arrange] = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": experts(f"mlp.experts.{{}}.{part}_proj") for part in ("gate", "up", "down")},
}
_SHARED: Mapping[str, str | Arrange] = {
    "ffn_gate_inp_shexp": row("mlp.shared_expert_gate"),
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_MIXTRAL: Mapping[str, str | Arrange] = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{
        f"ffn_{part}_exps": experts(f"block_sparse_moe.experts.{{}}.{name}")
        for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
_GPT2_ONCE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_NORMS = {"attn_norm": "ln_1", "ffn_norm": "ln_2"}
_GPT2_MATRICES = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM: Mapping[str, str | Arrange] = {
    "attn_qkv": by_head("self_attention.query_key_value"),
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_ONCE = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}

ARCHITECTURES = {
    "llama": Architecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        once=_ONCE,
        each=_LLAMA | _BY_PAIRS,
        config=configs.llama,
    ),
    "mixtral": Architecture(
        model_type="mixtral",
        class_name="MixtralForCausalLM",
        once=_ONCE,
        each={**_NORMS, **_ATTENTION, **_BY_PAIRS, **_MIXTRAL},
        config=configs.mixtral,
        reads=("expert_count",),
    ),
    "qwen2": Architecture(
        model_type="qwen2", class_name="Qwen2ForCausalLM", once=_ONCE, each=_LLAMA, config=configs.qwen2
    ),
    "qwen3": Architecture(
        model_type="qwen3", class_name="Qwen3ForCausalLM", once=_ONCE, each=_LLAMA | _QK_NORM, config=configs.qwen3
    ),
    "qwen": Architecture(
        model_type="qwen",
        class_name="QWenLMHeadModel",
        once=_GPT2_ONCE,
        layers="transformer.h",
        each={
            **_GPT2_NORMS,
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_gate": "mlp.w2",
            "ffn_up": "mlp.w1",
            "ffn_down": "mlp.c_proj",
        },
        config=configs.qwen,
    ),
    "internlm2": Architecture(
        model_type="internlm2",
        class_name="InternLM2ForCausalLM",
        once=_ONCE,
        each=_LLAMA | _BY_PAIRS,
        config=configs.internlm2,
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe",
        class_name="Qwen2MoeForCausalLM",
        once=_ONCE,
        each={**_NORMS, **_ATTENTION, **_EXPERTS, **_SHARED},
        config=configs.qwen2_moe,
        reads=("expert_count",),
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        once=_ONCE,
        each={**_NORMS, **_ATTENTION, **_QK_NORM, **_EXPERTS},
        config=configs.qwen3_moe,
        reads=("expert_count",),
    ),
    "olmoe": Architecture(
        model_type="olmoe",
        class_name="OlmoeForCausalLM",
        once=_ONCE,
        each={**_NORMS, **_ATTENTION, **_QK_NORM, **_EXPERTS},
        config=configs.olmoe,
        reads=("expert_count",),
    ),
    "gemma3": Architecture(
        model_type="gemma3_text",
        class_name="Gemma3ForCausalLM",
        once=_ONCE,
        each={**_LLAMA, **_QK_NORM, **_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
        config=configs.gemma3,
        reads=("final_logit_softcapping", "attn_logit_softcapping"),
        norm_offset=1.0,
    ),
    "smollm3": Architecture(
        model_type="smollm3",
        class_name="SmolLM3ForCausalLM",
        once=_ONCE,
        each=_LLAMA | _BY_PAIRS,
        config=configs.smollm3,
    ),
    "granite": Architecture(
        model_type="granite",
        class_name="GraniteForCausalLM",
        once=_ONCE,
        each=_LLAMA | _BY_PAIRS,
        config=configs.granite,
        reads=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5", class_name="Ernie4_5ForCausalLM", once=_ONCE, each=_LLAMA, config=configs.ernie4_5
    ),
    "chatglm": Architecture(
        model_type="glm",
        class_name="GlmForCausalLM",
        once=_ONCE,
        each={
            **_NORMS,
            **_ATTENTION,
            "attn_qkv": split_qkv("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        config=configs.glm,
    ),
    "phi3": Architecture(
        model_type="phi3",
        class_name="Phi3ForCausalLM",
        once=_ONCE,
        each={
            **_NORMS,
            **_ATTENTION,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        config=configs.phi3,
    ),
    "olmo2": Architecture(
        model_type="olmo2",
        class_name="Olmo2ForCausalLM",
        once=_ONCE,
        each={**_ATTENTION, **_QK_NORM, **_AFTER, **_MLP},
        config=configs.olmo2,
    ),
    "olmo3": Architecture(
        model_type="olmo3",
        class_name="Olmo3ForCausalLM",
        once=_ONCE,
        each={**_ATTENTION, **_QK_NORM, **_AFTER, **_MLP},
        config=configs.olmo3,
    ),
    "baichuan": Architecture(
        model_type="baichuan",
        class_name="BaichuanForCausalLM",
        once=_ONCE,
        each=_LLAMA | _BY_PAIRS,
        config=configs.baichuan,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2",
        class_name="Starcoder2ForCausalLM",
        once=_ONCE,
        each={**_NORMS, **_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        config=configs.starcoder2,
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        once=_GPT2_ONCE,
        layers="transformer.h",
        each={**_GPT2_NORMS, **{part: transposed(name) for part, name in _GPT2_MATRICES.items()}},
        config=configs.gpt2,
    ),
    "starcoder": Architecture(
        model_type="gpt_bigcode",
        class_name="GPTBigCodeForCausalLM",
        once=_GPT2_ONCE,
        layers="transformer.h",
        each={**_GPT2_NORMS, **_GPT2_MATRICES},
        config=configs.gpt_bigcode,
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        class_name="GPTNeoXForCausalLM",
        once={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        layers="gpt_neox.layers",
        each={
            **_NORMS,
            **_BLOOM,
            "attn_qkv": by_head("attention.query_key_value"),
            "attn_output": "attention.dense",
        },
        config=configs.gpt_neox,
        reads=("use_parallel_residual",),
    ),
    "falcon": Architecture(
        model_type="falcon",
        class_name="FalconForCausalLM",
        once=_FALCON_ONCE,
        layers="transformer.h",
        each={**_BLOOM, "attn_norm": "input_layernorm"},
        config=configs.falcon,
    ),
    "falcon of two norms": Architecture(
        model_type="falcon",
        class_name="FalconForCausalLM",
        once=_FALCON_ONCE,
        layers="transformer.h",
        each={**_BLOOM, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
        config=configs.falcon_of_two_norms,
    ),
    "bloom": Architecture(
        model_type="bloom",
        class_name="BloomForCausalLM",
        once=_FALCON_ONCE | {"token_embd_norm": "transformer.word_embeddings_layernorm"},
        layers="transformer.h",
        each={**_NORMS, **_BLOOM},
        config=configs.bloom,
    ),
    "mpt": Architecture(
        model_type="mpt",
        class_name="MptForCausalLM",
        once={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        layers="transformer.blocks",
        each={
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        config=configs.mpt,
        reads=("attention.clamp_kqv", "attention.max_alibi_bias"),
    ),
}
# One name in a file for two kinds of model, the other one and how it is told.
_OTHERS: Mapping[str, tuple[str, Callable[[GGUFFile], bool]]] = {
    "llama": ("mixtral", lambda file: optional(file, "expert_count", 0) != 0),
    "olmo2": ("olmo3", lambda file: optional(file, "attention.sliding_window", 0) != 0),
    "falcon": ("falcon of two norms", lambda file: has(file, "attn_norm_2.weight")),
}
_WHY = {
    "gptj": "GPT-J has no published layout there, since llama.cpp runs none: use its Hugging Face folder.",
    "glm4": "GLM 4 of 2025 (Glm4ForCausalLM) does not run natively: use its Hugging Face folder.",
}


def find_architecture(file: GGUFFile) -> Architecture:
    """Raises ModelError for an architecture that is unknown, near misses first."""
    name = str(file.require("general.architecture"))
    names = set(ARCHITECTURES) - {other for other, _ in _OTHERS.values()}
    if name in _WHY:
        raise ModelError(f"{file.path}: GGUF architecture {name!r} is not supported. {_WHY[name]}")
    if name not in names:
        raise ModelError(f"{file.path}: " + unknown("GGUF architecture", name, sorted(names)))
    other, is_other = _OTHERS.get(name, ("", lambda file: False))
    return ARCHITECTURES[other if is_other(file) else name]
