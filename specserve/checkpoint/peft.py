"""Reads LoRA adapters that PEFT saved: a folder with adapter_config.json and adapter_model.safetensors.

Settings and names are those of PEFT's LoraConfig (https://github.com/huggingface/peft). What would change the answer
and is not done is refused by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specserve.checkpoint.folder import ADAPTER_CONFIG as CONFIG, TensorInfo, read_header, read_json
from specserve.checkpoint.weights import open_file
from specserve.errors import ModelError, shown

TENSORS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_MOST_NUMBER = 2**31
_FLOATS = ("F32", "BF16", "F16")
_PREFIX = "base_model.model."
# A layer's part in an adapter: lora_A.weight, in older files lora_A.NAME.weight, of embeddings lora_embedding_A.
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.[^.]+)?(?:\.weight)?")
_BASE = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")
_NOT_DONE = {
    "use_dora": "DoRA",
    "modules_to_save": "layers that were trained as a whole",
    "lora_bias": "biases of adapters",
    "trainable_token_indices": "tokens that were trained",
    "layer_replication": "layers that are repeated",
    "target_parameters": "parameters of experts",
    "alora_invocation_tokens": "adapters that begin at a token",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal adapters",
    "arrow_config": "Arrow's routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
# Ways to begin that change the base model's own weights; others only say where training began.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_CONVERT = "Save it again with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)."


@dataclass(frozen=True, slots=True)
class PeftLayer:
    """What an adapter adds to one module: scaling * b a x, of an embedding scaling * b a[:, id]."""

    module: str  # by its name in the model that was trained
    a: str  # names of tensors in the file
    b: str
    rank: int
    scaling: float
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter folder, read as far as its headers."""

    folder: Path
    base: str  # the model that it says it was made for; "" where it says none
    layers: list[PeftLayer]
    infos: Mapping[str, TensorInfo]
    base_weights: Mapping[str, str]  # tensors of the model's own that PEFT saved beside it, by module
    read: Callable[[str], Tensor]

    @property
    def rank(self) -> int:
        return max(layer.rank for layer in self.layers)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(self.infos[name].shape) for layer in self.layers for name in (layer.a, layer.b))

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return sum(self.infos[name].num_bytes for layer in self.layers for name in (layer.a, layer.b))


def read_peft(folder: Path) -> PeftAdapter:
    """The adapter in `folder`. Raises ModelError naming the setting or tensor that is wrong or not supported."""
    config = _checked_config(folder)
    path = folder / TENSORS
    if not path.is_file():
        raise ModelError(_no_tensors(folder))
    infos = read_header(path)
    pairs: dict[tuple[str, bool], dict[str, str]] = {}
    base_weights: dict[str, str] = {}
    for name, info in infos.items():
        found = _PART.fullmatch(name)
        if found is None:
            base = _BASE.fullmatch(name)
            if base is None or not re.search(r"(embed|lm_head|wte|word_embeddings|output)", name):
                raise ModelError(f"{path} has {name}, which is no part of a LoRA adapter that is supported.")
            base_weights[_module(base["module"])] = name
            continue
        if info.dtype not in _FLOATS or len(info.shape) != 2:
            raise ModelError(f"{path}: {name} is {info.dtype} {list(info.shape)}; it must be a matrix of floats.")
        sides = pairs.setdefault((_module(found["module"]), found["embedding"] is not None), {})
        if found["side"] in sides:
            raise ModelError(f"{path} has several adapters: {sides[found['side']]} and {name}. Save one alone.")
        sides[found["side"]] = name
    if not pairs:
        raise ModelError(f"{path} has no lora_A and lora_B: it is no LoRA adapter.")
    layers = [_layer(path, config, infos, *key, sides) for key, sides in pairs.items()]
    named = config.get("base_model_name_or_path")
    return PeftAdapter(folder, named if isinstance(named, str) else "", layers, infos, base_weights, open_file(path))


def _module(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _layer(
    path: Path, config: Mapping[str, Any], infos: Mapping[str, TensorInfo], module: str, is_embedding: bool,
    sides: Mapping[str, str],
) -> PeftLayer:  # fmt: skip
    if missing := {"A", "B"} - sides.keys():
        raise ModelError(f"{path} lacks lora_{missing.pop()} of {module}: the adapter is incomplete.")
    a, b = sides["A"], sides["B"]
    rank = infos[a].shape[0]
    if not rank or infos[b].shape[1] != rank:
        raise ModelError(f"{path}: {a} is {list(infos[a].shape)} and {b} {list(infos[b].shape)}; the ranks differ.")
    said = _of_module(config, "rank_pattern", module, config["r"])
    if said != rank:
        raise ModelError(f"{path}: {a} has rank {rank}, and {CONFIG} says {shown(said)} for {module}.")
    alpha = _of_module(config, "alpha_pattern", module, config["lora_alpha"])
    if not _is_positive(alpha):
        why = f"lora_alpha of {module} is {shown(alpha)}; it must be a positive number"
        raise ModelError(f"{path.with_name(CONFIG)}: {why}.")
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return PeftLayer(module, a, b, rank, scaling, is_embedding)


def _of_module(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """A setting of a module, which the first pattern that the end of its name matches decides, as in PEFT."""
    for pattern, value in (config.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _checked_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder. An adapter is a folder that PEFT's save_pretrained wrote.")
    if not path.is_file():
        raise ModelError(f"{folder} has no {CONFIG}: it is no folder of an adapter that PEFT saved.")
    config = read_json(path)
    if (kind := config.get("peft_type")) != "LORA":
        raise ModelError(f"{path}: peft_type is {shown(kind)}; only LORA is supported.")
    for key, what in _NOT_DONE.items():
        if config.get(key):
            raise ModelError(f"{path} sets {key} ({what}), which is not supported. Merge it into the model with PEFT.")
    if (bias := config.get("bias", "none")) != "none":
        raise ModelError(f"{path}: bias is {shown(bias)}; only adapters that leave biases alone (none) are supported.")
    begins = str(config.get("init_lora_weights", "")).lower()
    if any(begins.startswith(each) for each in _CHANGES_BASE):
        raise ModelError(f"{path}: init_lora_weights is {begins!r}, which changed the model's own weights. {_CONVERT}")
    for key in ("r", "lora_alpha"):
        if not _is_positive(value := config.get(key)):
            raise ModelError(f"{path}: {key} is {shown(value)}; it must be a positive number.")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not _are_patterns(patterns):
            raise ModelError(f"{path}: {key} is {shown(patterns)}; it must map patterns of module names to numbers.")
    return config


def _is_positive(value: Any) -> bool:
    """Whether it is a number of a size that occurs."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST_NUMBER


def _are_patterns(patterns: Iterable[str]) -> bool:
    try:
        return all(len(each) < 1000 and re.compile(each) for each in patterns)
    except re.error:
        return False


def _no_tensors(folder: Path) -> str:
    if (folder / _PICKLE).is_file():
        return (
            f"{folder} has its adapter only as {_PICKLE}, a pickle. Load it with PEFT and save it again: "
            "save_pretrained writes safetensors."
        )
    return f"{folder} has no {TENSORS}."
