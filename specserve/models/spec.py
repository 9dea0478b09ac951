"""Describes a decoder-only transformer and reads that description from a Hugging Face config.json: the shapes and
names of all its tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.errors import ConfigError, ModelError

Config = Mapping[str, Any]
FULL = "full_attention"
SLIDING = "sliding_attention"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_LARGEST = 2**31 - 1  # ids and positions are int32


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (RoFormer, arXiv 2104.09864). `scaling` is "default", "linear" (positions divided by
    `factor`, arXiv 2306.15595) or "llama3" (low frequencies divided by it, the rest blended; Llama 3.1's own)."""

    theta: float = 10_000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0  # tokens of the first pre-training; llama3 only

    def __post_init__(self) -> None:
        for name in ("theta", "factor"):
            _check_number(f"rotary {name}", getattr(self, name))
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            _check_number(f"rotary {name}", getattr(self, name), positive=False)
        if self.scaling == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ModelError(f"low_freq_factor and high_freq_factor are both {self.low_freq_factor}; they must differ.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder. Sizes are features or counts, `max_len` and `windows` tokens; `ropes` and `windows` have one
    entry per layer, a window of None sees everything. Raises ModelError where the sizes contradict each other.

    `norm_offset` is added to every norm weight (Gemma stores w - 1). `post_norms`: attention and MLP outputs are
    normalised as well before they join the residual stream. `query_scale` multiplies query-key products.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_len: int
    norm_eps: float
    activation: str  # "silu" or "gelu_tanh", as ops.gated names them
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]
    query_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "max_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
                raise ModelError(
                    f"config.json gives {name} as {value!r}; it must be a whole number from 1 to {_LARGEST}."
                )
        _check_number("rms_norm_eps", self.norm_eps, positive=False)
        _check_number("query_scale", self.query_scale)
        if self.logit_softcap is not None:
            _check_number("final_logit_softcapping", self.logit_softcap)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly.")
        if self.head_dim % 4:
            # Rotary embedding needs halves; and GEMMs of narrower rests do not give every row the same bits.
            raise ModelError(f"head_dim is {self.head_dim}; it must be a multiple of 4.")
        for window in {each for each in self.windows if each is not None}:
            if not isinstance(window, int) or isinstance(window, bool) or window < 1:
                raise ModelError(f"sliding_window must be at least 1 token or null; it is {window!r}.")
        assert len(self.ropes) == len(self.windows) == self.num_layers

    @property
    def step_width(self) -> int:
        """Numbers that ops hold at most for each row of a step, but for its logits: what goes into a layer, what its
        products come to, and the residual."""
        heads = self.num_heads * self.head_dim
        return 5 * self.hidden_size + 4 * heads + 2 * self.num_kv_heads * self.head_dim + 3 * self.intermediate_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model needs, by its name in a Hugging Face Llama checkpoint, and its shape."""
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        return shapes if self.tied_embeddings else shapes | {"lm_head.weight": table}

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,) for name, size in self._norm_sizes().items()}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, hidden, self.qkv_bias),
            ("self_attn.o_proj", hidden, q, self.o_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        return shapes

    def _norm_sizes(self) -> dict[str, int]:
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        sizes = dict.fromkeys(names, self.hidden_size)
        if self.qk_norm:
            sizes |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        return sizes


def _check_number(name: str, value: Any, *, positive: bool = True) -> None:
    """Raise ModelError for what a configuration gives as something else, or that no calculation survives."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        kind = "positive number" if positive else "number of at least 0"
        raise ModelError(f"config.json gives {name} as {value!r}; it must be a {kind}.")


def read_spec(config: Config, types: tuple[str, ...] = (), window: int | None = None, **own: Any) -> DecoderSpec:
    """What all Llama-like configurations say the same way. `types` is each layer's attention (empty: all full),
    `window` that of the sliding ones, `own` the fields an architecture sets itself.

    Raises ModelError naming the missing or unsupported setting.
    """
    _refuse_unsupported(config)
    num_layers, num_heads = required(config, "num_hidden_layers"), required(config, "num_attention_heads")
    types = types or (FULL,) * num_layers
    head_dim = _first(own.get("head_dim"), config.get("head_dim"), required(config, "hidden_size") // num_heads)
    shared = {
        "vocab_size": required(config, "vocab_size"),
        "hidden_size": required(config, "hidden_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _first(config.get("num_key_value_heads"), num_heads),
        "head_dim": head_dim,
        "intermediate_size": required(config, "intermediate_size"),
        "max_len": required(config, "max_position_embeddings"),
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": read_activation(config.get("hidden_act", "silu")),
        "ropes": tuple(read_rope(config, kind) for kind in types),
        "windows": tuple(window if kind == SLIDING else None for kind in types),
        "query_scale": head_dim**-0.5,
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "logit_softcap": config.get("final_logit_softcapping"),
    }
    return DecoderSpec(**(shared | own))


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
    if len(types) != required(config, "num_hidden_layers"):
        raise ModelError(f"layer_types has {len(types)} entries for {config['num_hidden_layers']} layers.")
    return types


def read_activation(name: str) -> str:
    """The op contract's name of a Hugging Face activation. Raises ModelError for one that `gated` does not know."""
    if name not in _ACTIVATIONS:
        raise ModelError(f"The activation {name!r} is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]


def read_rope(config: Config, layer_type: str = FULL, theta: float = 10_000.0) -> Rope:
    """The rotary embedding of one kind of layer, in the old style (rope_theta beside rope_scaling) or that of
    transformers 5 (rope_parameters, one for all layers or one per layer type); `theta` is what an absent one means.

    Raises ModelError naming a scaling that is not default, linear or llama3, or a parameter it lacks.
    """
    modern = config.get("rope_parameters") or {}
    given = modern[layer_type] if layer_type in modern else config.get("rope_scaling") or modern
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json gives rotary settings as {given!r}; they must be an object.")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_FIELDS:
        known = ", ".join(sorted(_ROPE_FIELDS))
        raise ModelError(f"Rotary scaling of type {kind!r} is not supported; supported are {known}.")
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor is not 1: rotating a part of each head is not supported.")
    trained = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    values = {name: required({**trained, **config, **given}, name) for name in _ROPE_FIELDS[kind]}
    return Rope(float(_first(given.get("rope_theta"), config.get("rope_theta"), theta)), kind, **values)


def _refuse_unsupported(config: Config) -> None:
    """What would change the numbers and is not implemented must not be passed over in silence."""
    for key, why in (
        ("attn_logit_softcapping", "soft-capped attention scores"),
        ("use_bidirectional_attention", "bidirectional attention"),
        ("quantization_config", "weights quantized on disk"),
    ):
        if config.get(key):
            raise ModelError(f"config.json sets {key} to {config[key]!r}; {why} are not supported natively.")


def shorten(spec: DecoderSpec, max_len: int) -> DecoderSpec:
    """The same model for at most `max_len` tokens. Raises ConfigError above the model's own limit."""
    if not 1 <= max_len <= spec.max_len:
        raise ConfigError(f"max_model_len is {max_len}, but the model was made for at most {spec.max_len} tokens.")
    return dataclasses.replace(spec, max_len=max_len)
