"""What the configurations of classic decoders say alike: LayerNorm, MLPs that are not gated, and sizes under names of
their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specserve.errors import ModelError
from specserve.models.checks import check_number
from specserve.models.config import Config, required
from specserve.models.spec import LayerNorm, PlainMlp

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",  # the same number, multiplied in another order; gelu_new too
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


def standard(config: Config, defaults: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """The configuration with what it leaves out because it is the family's default, and its sizes under Llama's names:
    `names` has those of the family for each. The family's own name goes first."""
    found = {**defaults, **config}
    return found | {ours: config[theirs] for ours, theirs in names.items() if config.get(theirs) is not None}


def read_layer_norm(config: Config, key: str = "layer_norm_epsilon", *, bias: bool = True) -> LayerNorm:
    eps = config.get(key, 1e-5)
    check_number(key, eps, positive=False)
    return LayerNorm(float(eps), bias)


def read_plain_mlp(config: Config, activation: str, *, bias: bool = True) -> PlainMlp:
    """`activation` as Hugging Face names it. Without an intermediate_size it is four times as wide as the model. Raises
    ModelError for an activation that `activated` does not know."""
    if activation not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise ModelError(f"The activation {activation!r} is not supported; supported are {known}.")
    size = config.get("intermediate_size")
    return PlainMlp(
        size=4 * required(config, "hidden_size") if size is None else size,
        activation=_ACTIVATIONS[activation],
        bias=bias,
    )


def refuse(config: Config, key: str, value: Any, why: str) -> None:
    """Raise ModelError where a setting has this value."""
    if config.get(key) == value:
        raise ModelError(f"config.json sets {key} to {value!r}; {why}.")
