"""Reads the next-token layers (multi-token prediction, MTP) that a checkpoint brings beside its model, in the layout of
Xiaomi's MiMo (arXiv 2505.07608; github.com/XiaomiMiMo/MiMo, modeling_mimo.py).

Layer 0 reads input_proj([hidden_layernorm(hidden state after the final norm), token_layernorm(embedding of the next
token)]), goes through one layer of the model's own kind, and what follows its final norm goes to the model's LM head,
and stands for the next hidden state. Layers beyond the first, for tokens further ahead, are not used: the first one
reads its own output again, as EAGLE heads do.
"""

from __future__ import annotations

from specserve.errors import ModelError
from specserve.models.config import Config, required
from specserve.models.heads.layers import read_layers
from specserve.models.heads.spec import EagleSpec, TargetShape
from specserve.models.heads.tensors import Found, Stored

PREFIX = "model.mtp_layers."
_FIRST = f"{PREFIX}0."
_OWN = {
    "input_proj": "fc",
    "hidden_layernorm": "hidden_norm",
    "token_layernorm": "embed_norm",
    "final_layernorm": "norm",
}


def is_head(stored: Stored) -> bool:
    """Whether these tensors of a model include next-token layers."""
    return any(name.startswith(_FIRST) for name in stored.infos)


def read(config: Config, stored: Stored) -> Found:
    """The first next-token layer of a checkpoint. Raises ModelError where there is none, or one of another form."""
    if not is_head(stored):
        raise ModelError(
            f"The checkpoint has no next-token layers (tensors {_FIRST}...). Draft with another drafter, such as auto, "
            "or name a checkpoint of the same model that has them with --drafter-options.head."
        )
    names = {_canonical(name.removeprefix(_FIRST)): name for name in stored.infos if name.startswith(_FIRST)}
    count = required(config, "num_hidden_layers")
    own = {**config, "model_type": "qwen2", "num_hidden_layers": 1, "layer_types": None}
    vocab_size = required(config, "vocab_size")
    spec = EagleSpec(
        version=1,
        target=TargetShape(hidden_size=required(config, "hidden_size"), num_layers=count, vocab_size=vocab_size),
        layers=read_layers(own, names, vocab_size),
        fc_bias="fc.bias" in names,
        first_input_norm=True,
        final_norm=True,
        fc_input_norms=True,
        norm_output=True,
    )
    return Found(spec, names, "MTP")


def _canonical(name: str) -> str:
    module, _, rest = name.partition(".")
    return f"{_OWN[module]}.{rest}" if module in _OWN else f"layers.0.{name}"
