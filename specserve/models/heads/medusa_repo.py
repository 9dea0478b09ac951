"""Reads Medusa heads: medusa_lm_head.pt as its authors publish it (github.com/FasterDecoding/Medusa) and the same as
vLLM names it. Heads and layers are counted in the tensors: published configurations miscount them."""

from __future__ import annotations

import re

from specserve.errors import ModelError
from specserve.models.config import Config
from specserve.models.heads.spec import MedusaSpec, TargetShape
from specserve.models.heads.tensors import Found, Stored, canonical_names

_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
_FILES = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")


def is_head(config: Config, file_names: set[str]) -> bool:
    return "medusa_num_heads" in config or config.get("model_type") == "medusa" or bool(file_names & set(_FILES))


def read(config: Config, stored: Stored, num_target_layers: int) -> Found:
    """Raises ModelError."""
    plain = canonical_names(stored.infos, lambda name: name.removeprefix("medusa_head."))
    layers = [match.groups() for name in plain if (match := _LAYER.fullmatch(name) or _BLOCK.fullmatch(name))]
    if not layers:
        raise ModelError(
            "No tensor is named 0.0.linear.weight or blocks.0.layers.0.weight, as those of Medusa heads are. Heads "
            "without layers of their own are not supported."
        )
    num_heads = 1 + max(int(head) for head, *_ in layers)
    num_layers = 1 + max(int(layer) for _, layer, *_ in layers)
    if num_heads * num_layers > 2 * len(layers):  # of numbers far apart, which no list of missing tensors would end
        raise ModelError(
            f"Heads are numbered up to {num_heads - 1} and their layers up to {num_layers - 1}, and there are "
            f"{len(layers)} layers."
        )
    names = {canonical(name, num_layers): stored_name for name, stored_name in plain.items()}
    table = stored.infos.get(names.get(f"0.{num_layers}.weight", ""))
    if table is None or len(table.shape) != 2:
        raise ModelError(
            "The LM head of Medusa head 0 is missing: heads that share the target's (original_lm_head) are not "
            "supported."
        )
    if "0.0.linear.bias" not in names:
        raise ModelError("The heads' linear layers have no bias (medusa_fc_bias false), which is not supported.")
    draft, hidden = table.shape
    vocab_size = config.get("medusa_vocab_size") or config.get("vocab_size") or draft
    spec = MedusaSpec(
        target=TargetShape(
            hidden_size=hidden,
            num_layers=num_target_layers,
            vocab_size=vocab_size,
        ),
        num_heads=num_heads,
        num_layers=num_layers,
        draft_vocab_size=draft,
    )
    base = config.get("base_model_name_or_path")
    return Found(spec, names, "Medusa", base if isinstance(base, str) else None)


def canonical(name: str, num_layers: int) -> str:
    """medusa_lm_head.pt's name for vLLM's; others stay."""
    if match := _BLOCK.fullmatch(name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := _HEAD.fullmatch(name):
        return f"{match[1]}.{num_layers}.weight"
    return name
