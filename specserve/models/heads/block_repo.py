"""Reads block heads as they are published: DFlash (github.com/z-lab/dflash), DSpark (github.com/deepseek-ai/DeepSpec)
and both of SpecForge (github.com/sgl-project/SpecForge). A Qwen 3 configuration of the draft layers with `block_size`,
`mask_token_id` and `target_layer_ids`, at its top or in `dflash_config`; id i is the output of the target's layer i.

Row 0 of a block is the last committed token. Masks of z-lab's DFlash, known by `dflash_config`, propose the tokens in
their own places; DSpark's rows all propose the token behind them, unless `sample_from_anchor` says otherwise. DSpark's
tensors are
`markov_head.markov_w1` [target's ids, rank] and `markov_w2` [draft ids, rank], whose product is the bias on logits, and
`confidence_head.proj` over the hidden state and, mostly, the row of markov_w1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.errors import ModelError
from specserve.models.config import Config, required
from specserve.models.heads.layers import all_sliding, read_layers
from specserve.models.heads.spec import BlockSpec, TargetShape
from specserve.models.heads.tensors import Found, Stored, canonical_names

# Stored name -> canonical one.
NAMES = {
    "markov_head.markov_w1.weight": "bigram_in.weight",
    "markov_head.markov_w2.weight": "bigram_out.weight",
    "confidence_head.proj.weight": "confidence.weight",
    "confidence_head.proj.bias": "confidence.bias",
}
_UNSUPPORTED = {
    "use_swa": "sliding windows that are not in layer_types",
    "attention_sink_bias": "attention sinks",
    "add_swa_attention_sink_bias": "attention sinks",
    "shift_label": "rows trained on shifted labels",
    "enable_hidden_correction": "a corrected hidden state",
    "logit_scale": "scaled logits",
    "embedding_scale": "scaled embeddings",
}


def canonical(stored: str) -> str:
    name = stored.removeprefix("model.")
    return NAMES.get(name, name)


def is_head(config: Config) -> bool:
    """Whether the configuration is that of a block head. The ids of the target's layers alone are not: other heads
    have them too."""
    return "dflash_config" in config or {"block_size", "mask_token_id", "target_layer_ids"} <= set(config)


def read(config: Config, stored: Stored, num_target_layers: int) -> Found:
    """Raises ModelError."""
    settings = {**config, **(config.get("dflash_config") or {})}
    names = canonical_names(stored.infos, canonical)
    is_dspark = "bigram_in.weight" in names or "confidence.weight" in names or bool(settings.get("markov_rank"))
    if is_dspark or "dflash_config" in config:  # others were published both ways and must say it
        settings.setdefault("sample_from_anchor", is_dspark)
    if settings.get("model_type") == "dspark":  # SpecForge's name for a Qwen 3 configuration with DSpark's keys
        settings["model_type"] = "qwen3"
    spec = read_block(settings, stored, names, required(settings, "target_layer_ids"), num_target_layers)
    return Found(spec, names, "DSpark" if is_dspark else "DFlash")


def read_block(
    settings: dict[str, Any], stored: Stored, names: Mapping[str, str], taps: Any, num_target_layers: int
) -> BlockSpec:
    """The spec that `settings`, of head and layers in one dict, and the tensors describe. `taps`: the target's layers
    whose outputs it reads. Raises ModelError."""
    _refuse(settings, "bigram_in.weight" in names)
    vocab_size = required(settings, "vocab_size")
    layers = read_layers(settings, names, settings.get("draft_vocab_size") or vocab_size)
    target = TargetShape(
        hidden_size=settings.get("target_hidden_size") or layers.hidden_size,
        num_layers=settings.get("num_target_layers") or num_target_layers,
        vocab_size=vocab_size,
    )
    mask = required(settings, "mask_token_id")
    if not 0 <= mask < vocab_size:
        raise ModelError(f"mask_token_id is {mask}; the target's ids go from 0 to {vocab_size - 1}.")
    if (size := required(settings, "block_size")) < 2:
        raise ModelError(f"block_size is {size}; a block has the last token and at least 1 mask.")
    confidence, rank = _columns(stored, names, "confidence.weight"), _columns(stored, names, "bigram_in.weight")
    return BlockSpec(
        target=target,
        layers=layers,
        hidden_layers=tuple(taps),
        block_size=size,
        mask_token_id=mask,
        has_mask_embedding="mask_embedding" in names,
        has_embedding="embed_tokens.weight" in names or layers.hidden_size != target.hidden_size,
        has_head="lm_head.weight" in names or layers.vocab_size != vocab_size,
        is_causal=_is_causal(settings),
        samples_anchor=bool(required(settings, "sample_from_anchor")),
        bigram_rank=max(rank, settings.get("markov_rank") or 0),
        has_anchor_inputs="anchor_inputs.weight" in names,
        has_confidence=confidence > 0 or bool(settings.get("enable_confidence_head")),
        confidence_reads_bigram=confidence > layers.hidden_size,
    )


def _columns(stored: Stored, names: Mapping[str, str], name: str) -> int:
    """Of a matrix; 0 where there is none."""
    return stored.infos[names[name]].shape[-1] if name in names else 0


def _refuse(settings: Config, has_bigram: bool) -> None:
    """What would change the numbers must not be passed over."""
    for key, what in _UNSUPPORTED.items():
        if settings.get(key):
            raise ModelError(f"config.json sets {key} to {settings[key]!r}; {what} are not supported.")
    if settings.get("is_neox_style") is False:
        raise ModelError("config.json sets is_neox_style to false; interleaved rotary embedding is not supported.")
    if (projector := settings.get("projector_type")) not in (None, "dflash", "dspark"):
        raise ModelError(f"projector_type is {projector!r}; supported are dflash and dspark.")
    if has_bigram and (kind := settings.get("markov_head_type", "vanilla")) != "vanilla":
        raise ModelError(f"markov_head_type is {kind!r}; supported is vanilla.")


def _is_causal(settings: Config) -> bool:
    """As vLLM decides it: what the configuration says, else sliding layers are causal, and full ones not."""
    for key in ("is_causal", "causal"):
        if settings.get(key) is not None:
            return bool(settings[key])
    return all_sliding(settings) and not settings.get("sliding_window_non_causal")
