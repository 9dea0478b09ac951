"""Reads and writes draft heads in the format of `speculators` (github.com/vllm-project/speculators): config.json with
`speculators_model_type` and, in `transformer_layer_config`, the draft layers; model.safetensors. Names, shapes and
settings of eagle3, dflash and dspark were compared with what its version 0.9.0 writes and loads.

Its ids of the target's layers are those of Hugging Face's hidden_states: id i is the input of layer i, the output of
layer i - 1. `speculators_config.verifier.name_or_path` names the target.

What is written beside the published keys, for heads that the format has no words for: `num_target_layers`, `is_causal`
of a block head, the verifier's `fingerprint`, and `shares_lm_head` of heads whose LM head is the verifier's at their
draft ids; the tensors `mask_embedding`, `anchor_inputs` and `anchor_norm` of a block head, `fc.bias` of EAGLE-3, and
`transformer.input_layernorm` or `pre_lm_head_layernorm` of EAGLE-1, each of which says by being there that the head has
it; further layers of EAGLE-1 as `layers.1.` and so on. Medusa heads are written as vLLM names them, with `lm_heads` of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specserve.errors import ModelError, unknown
from specserve.models.config import Config, required
from specserve.models.heads import block_repo, eagle_repo, int8, medusa_repo
from specserve.models.heads.layers import read_layers, write_layers
from specserve.models.heads.spec import BlockSpec, EagleSpec, HeadSpec, MedusaSpec, TargetShape
from specserve.models.heads.tensors import Found, Stored, canonical_names

_TYPES = ("eagle", "eagle3", "dflash", "dspark", "medusa")
# Stored prefix -> canonical one, of EAGLE-1.
_EAGLE_1 = {"fusion_fc.": "fc.", "transformer.": "layers.0.", "pre_lm_head_layernorm.": "norm."}
_STORED_BLOCK = {own: stored for stored, own in block_repo.NAMES.items()}
_NUM_EAGLE_TOKENS = 5  # a proposal's length that other engines take from here; ours decides by what pays


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target that a head is written for: its name, and its TargetOrigin.fingerprint or None."""

    name: str
    fingerprint: str | None = None


def is_head(config: Config) -> bool:
    return "speculators_model_type" in config or "speculators_config" in config


def read(config: Config, stored: Stored, num_target_layers: int) -> Found:
    """Raises ModelError."""
    kind = str(required(config, "speculators_model_type"))
    if kind not in _TYPES:
        raise ModelError(unknown("speculators_model_type", kind, _TYPES))
    verifier = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if verifier is not None and not isinstance(verifier, str):
        raise ModelError(f"config.json names the verifier {verifier!r}; it must be a text.")
    num_layers = config.get("num_target_layers") or num_target_layers
    if (config.get("quantization_config") or {}).get("format") == int8.FORMAT:  # another is refused
        config = {key: value for key, value in config.items() if key != "quantization_config"}
    if kind == "medusa":
        found = medusa_repo.read(config, stored, num_layers)
        return Found(found.spec, found.names, "speculators", verifier)
    # One dict of the layers' settings and the head's; of both that are named alike the head's count.
    layers = dict(required(config, "transformer_layer_config"))
    settings = layers | {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    rename = {"eagle": _canonical_1, "eagle3": eagle_repo.canonical}.get(kind, block_repo.canonical)
    names = canonical_names(stored.infos, rename)
    spec: EagleSpec | BlockSpec
    if kind == "eagle":
        spec = _read_eagle_1(settings, names, num_layers)
    elif kind == "eagle3":
        required(config, "norm_before_residual")  # speculators and vLLM disagree on what an absent one means
        spec = eagle_repo.read_3(
            settings, names, _target(settings, num_layers), eagle_repo.hidden_layers(config, num_layers)
        )
    else:
        settings.setdefault("sample_from_anchor", kind == "dspark")
        taps = eagle_repo.inputs_of(required(config, "aux_hidden_state_layer_ids"))
        spec = block_repo.read_block(settings, stored, names, taps, num_layers)
    if settings.get("shares_lm_head"):
        spec = replace(spec, has_head=False, shares_head=True)
    return Found(spec, names, "speculators", verifier)


def _target(settings: Config, num_layers: int) -> TargetShape:
    return TargetShape(
        hidden_size=settings.get("target_hidden_size") or required(settings, "hidden_size"),
        num_layers=num_layers,
        vocab_size=required(settings, "vocab_size"),
    )


def _canonical_1(stored: str) -> str:
    for prefix, own in _EAGLE_1.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def _read_eagle_1(settings: Config, names: Mapping[str, str], num_layers: int) -> EagleSpec:
    if settings.get("layernorms"):
        raise ModelError("layernorms is true: an EAGLE head that norms its embeddings is not supported.")
    target = _target(settings, num_layers)
    return EagleSpec(
        version=1,
        target=target,
        layers=read_layers(settings, names, settings.get("draft_vocab_size") or target.vocab_size),
        has_embedding="embed_tokens.weight" in names,
        has_head="lm_head.weight" in names,
        fc_bias=bool(settings.get("fusion_bias")) or "fc.bias" in names,
        first_input_norm="layers.0.input_layernorm.weight" in names,
        final_norm="norm.weight" in names,
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def stored_name(spec: HeadSpec, name: str) -> str:
    """Under which name the tensor with this canonical name is written."""
    if isinstance(spec, BlockSpec):
        return _STORED_BLOCK.get(name, name)
    if isinstance(spec, MedusaSpec):
        head, layer, *rest = name.split(".")
        return f"blocks.{head}.layers.{layer}.{rest[-1]}" if rest[0] == "linear" else f"lm_heads.{head}.weight"
    for prefix, own in _EAGLE_1.items():
        if spec.version == 1 and name.startswith(own):
            return prefix + name.removeprefix(own)
    return name


def config_of(spec: HeadSpec, verifier: Verifier) -> dict[str, Any]:
    """config.json of a head for the target `verifier`. Raises ModelError for what it cannot say."""
    if isinstance(spec, MedusaSpec):
        kind, num_tokens, own = "medusa", spec.num_heads, _medusa(spec)
    elif isinstance(spec, BlockSpec):
        kind = "dspark" if spec.bigram_rank or spec.has_confidence else "dflash"
        num_tokens, own = spec.num_proposed, _block(spec)
    else:
        kind, num_tokens = ("eagle3" if spec.version == 3 else "eagle"), _NUM_EAGLE_TOKENS
        own = _eagle_3(spec) if spec.version == 3 else _eagle_1(spec)
    architecture = {
        "eagle": "EagleSpeculator",
        "eagle3": "Eagle3Speculator",
        "dflash": "DFlashSpeculator",
        "dspark": "DSparkSpeculator",
        "medusa": "MedusaModel",
    }
    return {
        "architectures": [architecture[kind]],
        "model_type": "speculator_model",
        "speculators_model_type": kind,
        **own,
        "num_target_layers": spec.target.num_layers,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": verifier.name, "architectures": [], "fingerprint": verifier.fingerprint},
        },
    }


def _shared(spec: EagleSpec | BlockSpec) -> dict[str, Any]:
    return {
        "transformer_layer_config": write_layers(spec.layers, spec.target.vocab_size),
        "draft_vocab_size": spec.layers.vocab_size,
        "target_hidden_size": spec.target.hidden_size,
        "shares_lm_head": spec.shares_head,
    }


def _eagle_1(spec: EagleSpec) -> dict[str, Any]:
    if spec.fc_input_norms:
        raise ModelError("A next-token layer is written in its model's checkpoint, not as a head of its own.")
    own = {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False, "fusion_bias": spec.fc_bias}
    return _shared(spec) | own


def _eagle_3(spec: EagleSpec) -> dict[str, Any]:
    return _shared(spec) | {
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in spec.hidden_layers],
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norms,
        "norm_output": spec.norm_output,
    }


def _block(spec: BlockSpec) -> dict[str, Any]:
    own = {
        "aux_hidden_state_layer_ids": [layer + 1 for layer in spec.hidden_layers],
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.samples_anchor,
        "sliding_window_non_causal": not spec.is_causal and any(each.attention.window for each in spec.layers.layers),
        "is_causal": spec.is_causal,
    }
    if spec.bigram_rank or spec.has_confidence:
        own |= {
            "markov_rank": spec.bigram_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": spec.has_confidence,
            "confidence_head_with_markov": spec.confidence_reads_bigram,
        }
    return _shared(spec) | own


def _medusa(spec: MedusaSpec) -> dict[str, Any]:
    return {
        "num_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "medusa_hidden_size": spec.target.hidden_size,
        "medusa_vocab_size": spec.target.vocab_size,
        "truncated_vocab_size": spec.draft_vocab_size if spec.has_draft_vocab else 0,
        "original_lm_head": False,
        "medusa_fc_bias": True,
    }
