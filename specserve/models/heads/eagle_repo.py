"""Reads EAGLE heads as they are published by their authors (github.com/SafeAILab/EAGLE) and by SpecForge
(github.com/sgl-project/SpecForge): a Llama configuration beside the tensors, and no word of the target but its sizes.

Version 1, for EAGLE-1 and 2: `fc`, `layers.0` without an input norm, perhaps `embed_tokens`. Version 3: `fc` over three
hidden states of the target, `midlayer` with a `hidden_norm`, `norm`, `lm_head`, and d2t and t2d.

Ids of the target's layers mean two things. In `eagle_config`, as SpecForge, SGLang and TensorRT-LLM have it, id i is
the output of layer i. At the top of the configuration, as vLLM has it, id i is the input of layer i, which is the
output of layer i - 1. Where there are none, EAGLE-3's code takes the inputs of layers 2, n/2 and n - 3 of n.
"""

from __future__ import annotations

from collections.abc import Mapping

from specserve.errors import ModelError
from specserve.models.config import Config, required
from specserve.models.heads.layers import read_layers
from specserve.models.heads.spec import EagleSpec, TargetShape
from specserve.models.heads.tensors import Found, Stored, canonical_names

_HIDDEN_NORM = "layers.0.hidden_norm.weight"


def canonical(stored: str) -> str:
    return stored.removeprefix("model.").replace("midlayer.", "layers.0.")


def is_head(names: set[str]) -> bool:
    """Whether tensors of these canonical names may be an EAGLE head."""
    return "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names


def read(config: Config, stored: Stored, num_target_layers: int) -> Found:
    """`num_target_layers` is 0 where the target is not known. Raises ModelError."""
    names = canonical_names(stored.infos, canonical)
    target = TargetShape(
        hidden_size=config.get("target_hidden_size") or required(config, "hidden_size"),
        num_layers=num_target_layers,
        vocab_size=required(config, "vocab_size"),
    )
    if _HIDDEN_NORM not in names:
        return Found(_read_1(config, names, target), names, "EAGLE")
    is_specforge = "eagle_config" in config or "LlamaForCausalLMEagle3" in (config.get("architectures") or ())
    spec = read_3(config, names, target, hidden_layers(config, num_target_layers))
    return Found(spec, names, "SpecForge" if is_specforge else "EAGLE")


def _read_1(config: Config, names: Mapping[str, str], target: TargetShape) -> EagleSpec:
    return EagleSpec(
        version=1,
        target=target,
        layers=read_layers(config, names, config.get("draft_vocab_size") or target.vocab_size),
        has_embedding="embed_tokens.weight" in names,
        has_head="lm_head.weight" in names,
        fc_bias="fc.bias" in names,
        first_input_norm="layers.0.input_layernorm.weight" in names,
        final_norm="norm.weight" in names,
    )


def read_3(config: Config, names: Mapping[str, str], target: TargetShape, taps: tuple[int, ...]) -> EagleSpec:
    """EAGLE-3 of a configuration that has its flags and its layers' settings in one place."""
    layers = read_layers(config, names, config.get("draft_vocab_size") or target.vocab_size)
    return EagleSpec(
        version=3,
        target=target,
        layers=layers,
        hidden_layers=taps,
        has_embedding="embed_tokens.weight" in names or layers.hidden_size != target.hidden_size,
        has_head="lm_head.weight" in names or layers.vocab_size != target.vocab_size,
        fc_bias="fc.bias" in names,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        fc_norms=bool(config.get("fc_norm")),
        norm_output=bool(config.get("norm_output")),
    )


def hidden_layers(config: Config, num_target_layers: int) -> tuple[int, ...]:
    """The target's layers whose outputs an EAGLE-3 head reads, counted from 0; see the top of this file. Raises
    ModelError where they depend on a target that is not known."""
    own = config.get("eagle_config") or {}
    if own.get("use_aux_hidden_state", config.get("use_aux_hidden_state", True)) is False:
        raise ModelError("use_aux_hidden_state is false: an EAGLE-3 head that reads one hidden state is not supported.")
    outputs = own.get("eagle_aux_hidden_state_layer_ids")
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    if outputs and inputs and tuple(outputs) != inputs_of(inputs):
        raise ModelError(
            f"eagle_aux_hidden_state_layer_ids is {list(inputs)}, inputs of layers, and in eagle_config "
            f"{list(outputs)}, outputs of layers: they contradict each other. Keep the right one."
        )
    if inputs:
        return inputs_of(inputs)
    if outputs:
        return tuple(outputs)
    if not num_target_layers:
        raise ModelError(
            "It is an EAGLE-3 head whose config.json has no eagle_aux_hidden_state_layer_ids. It then reads a target "
            "of n layers in front of layers 2, n/2 and n - 3, so the target must be known: name it, with --model on "
            "the command line."
        )
    if num_target_layers < 7:  # of fewer the three are not three
        raise ModelError(
            f"config.json has no eagle_aux_hidden_state_layer_ids, and EAGLE-3's own choice needs a target of at least "
            f"7 layers; this one has {num_target_layers}."
        )
    return inputs_of((2, num_target_layers // 2, num_target_layers - 3))


def inputs_of(ids: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """The layers whose outputs are the inputs of layers `ids`. Raises ModelError for the input of layer 0."""
    if wrong := [number for number in ids if not isinstance(number, int) or number < 1]:
        raise ModelError(
            f"The head reads the input of layer {wrong[0]!r} of the target; supported are inputs of layers from 1 on. "
            "That of layer 0 is the embedding."
        )
    return tuple(number - 1 for number in ids)
