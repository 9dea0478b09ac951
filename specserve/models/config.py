"""Reads the description of a decoder from a Hugging Face config.json: what all Llama-like configurations say the same
way. What would change the numbers and has no implementation is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specserve.errors import ModelError
from specserve.models.checks import check_number, check_size
from specserve.models.positions import ROPE_FIELDS, Alibi, Rope
from specserve.models.spec import AttentionSpec, DecoderSpec, ExpertsMlp, GatedMlp, LayerSpec, RmsNorm

Config = Mapping[str, Any]
FULL = "full_attention"
SLIDING = "sliding_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_spec(config: Config, layers: Sequence[LayerSpec] = (), **own: Any) -> DecoderSpec:
    """A decoder of these layers (none: all Llama's), whose norm is also the final one. `own` are the fields of
    DecoderSpec that an architecture sets itself.

    Raises ModelError naming the missing or unsupported setting.
    """
    _refuse_unsupported(config)
    layers = layers or [read_layer(config)] * num_layers(config)
    shared = {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": required(config, "hidden_size"),
        "max_len": _max_len(config, layers),
        "layers": tuple(layers),
        "final_norm": layers[-1].norm,
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "logit_softcap": config.get("final_logit_softcapping"),
    }
    return DecoderSpec(**(shared | own))


def _max_len(config: Config, layers: Sequence[LayerSpec]) -> int:
    """Tokens. Configurations that ask for YaRN give max_position_embeddings as it is without, or as it is with it."""
    stated: int = required(config, "max_position_embeddings")
    check_size("max_position_embeddings", stated)
    ropes = [layer.position for layer in layers if isinstance(layer.position, Rope)]
    return max([stated, *(rope.stretched_len for rope in ropes if rope.scaling == "yarn")])


def read_layer(
    config: Config,
    kind: str = FULL,
    window: int | None = None,
    *,
    position: Rope | Alibi | None = None,
    mlp_bias: bool = False,
    **own: Any,
) -> LayerSpec:
    """Llama's layer with the attention `kind`, of which the sliding one has the `window`. `own` are the fields of
    AttentionSpec that an architecture sets itself, `position` how it tells positions where that is not read_rope's."""
    return LayerSpec(
        norm=read_norm(config),
        position=position or read_rope(config, kind),
        attention=read_attention(config, window=window if kind == SLIDING else None, **own),
        mlp=read_mlp(config, bias=mlp_bias),
    )


def read_norm(config: Config) -> RmsNorm:
    return RmsNorm(float(config.get("rms_norm_eps", 1e-6)))


def read_attention(config: Config, **own: Any) -> AttentionSpec:
    """`own` are the fields that an architecture sets itself."""
    num_heads = required(config, "num_attention_heads")
    check_size("num_heads", num_heads)
    head_dim = _first(own.get("head_dim"), config.get("head_dim"), required(config, "hidden_size") // num_heads)
    check_size("head_dim", head_dim)
    shared = {
        "num_heads": num_heads,
        "num_kv_heads": _first(config.get("num_key_value_heads"), num_heads),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
    }
    return AttentionSpec(**(shared | own))


def read_mlp(config: Config, *, bias: bool = False, activation: str | None = None) -> GatedMlp:
    """`activation` as Hugging Face names it, where it is not hidden_act."""
    return GatedMlp(
        size=required(config, "intermediate_size"),
        activation=read_activation(activation or config.get("hidden_act", "silu")),
        bias=bias,
    )


def read_experts(config: Config, size: int, *, is_normalized: bool, shared: GatedMlp | None = None) -> ExpertsMlp:
    """`size` is that of each expert, and `shared` a shared one that has a gate."""
    number = config.get("num_local_experts")  # as transformers 5 also calls it
    return ExpertsMlp(
        num_experts=required(config, "num_experts") if number is None else number,
        per_token=required(config, "num_experts_per_tok"),
        size=size,
        activation=read_activation(config.get("hidden_act", "silu")),
        is_normalized=is_normalized,
        shared=shared,
        has_shared_gate=shared is not None,
    )


def num_layers(config: Config) -> int:
    """Raises ModelError for what is no number of layers."""
    number: int = required(config, "num_hidden_layers")
    check_size("num_layers", number)
    return number


def _first(*values: Any) -> Any:
    """The first that is given: null is as good as nothing, and 0 is not."""
    return next(value for value in values if value is not None)


def required(config: Config, key: str) -> Any:
    """config[key]. Raises ModelError naming the key."""
    if config.get(key) is None:
        raise ModelError(f"config.json has no {key}; a model of type {config.get('model_type')!r} needs it.")
    return config[key]


def read_layer_types(config: Config, default: tuple[str, ...]) -> tuple[str, ...]:
    """Each layer's attention, "full_attention" or "sliding_attention": config.json's own list, or else `default`.

    Raises ModelError for any other kind, or a list that does not match the number of layers.
    """
    types = tuple(config.get("layer_types") or default)
    if strange := sorted(set(types) - {FULL, SLIDING}):
        raise ModelError(f"layer_types has {', '.join(strange)}; supported are {FULL} and {SLIDING}.")
    if len(types) != num_layers(config):
        raise ModelError(f"layer_types has {len(types)} entries for {config['num_hidden_layers']} layers.")
    return types


def read_activation(name: str) -> str:
    """The op contract's name of a Hugging Face activation. Raises ModelError for one that `gated` does not know."""
    if name not in _ACTIVATIONS:
        raise ModelError(f"The activation {name!r} is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


def read_rope(config: Config, layer_type: str = FULL, theta: float = 10_000.0, fraction: float | None = None) -> Rope:
    """The rotary embedding of one kind of layer, in the old style (rope_theta beside rope_scaling) or that of
    transformers 5 (rope_parameters, one for all layers or one per layer type). `theta` is what an absent one means, and
    `fraction` an absent partial_rotary_factor; None: the architecture has none.

    Raises ModelError naming a scaling that is none of ROPE_FIELDS, or a parameter it lacks.
    """
    modern = config.get("rope_parameters") or {}
    given = modern[layer_type] if layer_type in modern else config.get("rope_scaling") or modern
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json gives rotary settings as {given!r}; they must be an object.")
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # as Phi 3's first configurations had it
    if kind not in ROPE_FIELDS:
        known = ", ".join(sorted(ROPE_FIELDS))
        raise ModelError(f"Rotary scaling of type {kind!r} is not supported; supported are {known}.")
    partial = _first(given.get("partial_rotary_factor"), config.get("partial_rotary_factor"), fraction, 1.0)
    if partial != 1.0 and fraction is None:
        raise ModelError(f"partial_rotary_factor is {partial}; layers of this architecture rotate whole heads.")
    base = float(_first(given.get("rope_theta"), config.get("rope_theta"), theta))
    return Rope(base, kind, fraction=partial, **_read_scaling(config, given, kind))


def _read_scaling(config: Config, given: Config, kind: str) -> dict[str, Any]:
    """The fields of Rope that a scaling has, `given` as its settings. What may be left out follows from the others as
    in transformers' modeling_rope_utils."""
    longest = config.get("max_position_embeddings")
    original = _first(config.get("original_max_position_embeddings"), given.get("original_max_position_embeddings"), 0)
    settings = {**config, **given, "original_max_position_embeddings": original or longest}
    if kind in ("yarn", "longrope"):
        for name in ("max_position_embeddings", "original_max_position_embeddings"):
            check_size(name, required(settings, name))
        if settings.get("factor") is None:
            settings["factor"] = longest / settings["original_max_position_embeddings"]
        check_number("rotary factor", settings["factor"])
        if settings.get("attention_factor") is None:
            settings["attention_factor"] = (_yarn_factor if kind == "yarn" else _longrope_factor)(settings)
    if kind == "yarn":
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0}
        settings |= {name: settings.get(name) or value for name, value in defaults.items()}
        settings["truncate"] = settings.get("truncate", True)
    values = {name: required(settings, name) for name in ROPE_FIELDS[kind]}
    for name in {"short_factor", "long_factor"} & set(values):
        if not isinstance(values[name], list | tuple):
            raise ModelError(f"config.json gives rotary {name} as {values[name]!r}; it must be a list of numbers.")
        values[name] = tuple(values[name])
    return values


def _yarn_factor(settings: Config) -> float:
    """What queries and keys are multiplied by (arXiv 2309.00071, section 3.4; with DeepSeek's mscale)."""

    def size(weight: float) -> float:
        return 1.0 if settings["factor"] <= 1 else 0.1 * weight * math.log(settings["factor"]) + 1.0

    above, below = settings.get("mscale"), settings.get("mscale_all_dim")
    if not (above and below):
        return size(1.0)
    check_number("rotary mscale", above)
    check_number("rotary mscale_all_dim", below)
    return size(above) / size(below)


def _longrope_factor(settings: Config) -> float:
    """Likewise (arXiv 2402.13753)."""
    factor, original = settings["factor"], settings["original_max_position_embeddings"]
    return 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _refuse_unsupported(config: Config) -> None:
    """What would change the numbers and is not implemented must not be passed over in silence."""
    for key, why in (
        ("attn_logit_softcapping", "soft-capped attention scores"),
        ("use_bidirectional_attention", "bidirectional attention"),
        ("quantization_config", "weights quantized on disk"),
    ):
        if config.get(key):
            raise ModelError(f"config.json sets {key} to {config[key]!r}; {why} are not supported natively.")
