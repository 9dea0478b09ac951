"""OLMo 3: OLMo 2's layers, three of four with a sliding window, whose rotary embedding is never scaled."""

from __future__ import annotations

from specserve.models.config import FULL, SLIDING, Config, num_layers, read_layer_types, read_rope, read_spec
from specserve.models.olmo2 import layer
from specserve.models.positions import Rope
from specserve.models.spec import DecoderSpec

ARCHITECTURES = ("Olmo3ForCausalLM",)
MODEL_TYPES = ("olmo3",)
_THETA = 500_000.0


def spec(config: Config) -> DecoderSpec:
    config = {"rms_norm_eps": 1e-5, "sliding_window": 4096, **config}
    types = read_layer_types(config, tuple(SLIDING if (i + 1) % 4 else FULL for i in range(num_layers(config))))
    return read_spec(config, [layer(config, kind, config["sliding_window"], _rope(config, kind)) for kind in types])


def _rope(config: Config, kind: str) -> Rope:
    """Old style: rope_scaling is that of the layers without a window."""
    if kind == FULL or kind in (config.get("rope_parameters") or {}):
        return read_rope(config, kind, theta=_THETA)
    return Rope(theta=float(config.get("rope_theta") or _THETA))
