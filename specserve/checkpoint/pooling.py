"""How a model that was made for embeddings makes one of a text's states: what sentence-transformers saved beside it
(https://sbert.net, modules.json). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve import files
from specserve.checkpoint.folder import read_json
from specserve.errors import InputError, ModelError, shown

MODULES, CONFIG = "modules.json", "1_Pooling/config.json"
_LAST = "pooling_mode_lasttoken"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pooling:
    """The last token's state after the final norm is the embedding; where `normalizes`, divided by its length."""

    normalizes: bool

    def embedding(self, state: bytes, dimensions: int | None = None) -> NDArray[np.float32]:
        """Of a state's float32 numbers, or of so many of the first of them, which then has length 1. Raises InputError
        for more than there are."""
        found = np.frombuffer(state, np.float32)
        if dimensions is not None and not 1 <= dimensions <= len(found):
            raise InputError(f"dimensions is {dimensions}; the model has {len(found)}.", "dimensions")
        cut = found[:dimensions]
        length = float(np.sqrt(np.square(cut, dtype=np.float64).sum()))
        is_scaled = (self.normalizes or len(cut) < len(found)) and length > 0
        return (cut / length).astype(np.float32) if is_scaled else cut


def read_pooling(folder: Path) -> Pooling | None:
    """None for a model that was not made for embeddings. Raises ModelError for one that is pooled otherwise."""
    if not (folder / MODULES).is_file():
        return None
    kinds = _kinds(folder / MODULES)
    if "Pooling" not in kinds:
        return None
    if others := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ModelError(f"{folder / MODULES} has {shown(others[0])}; embeddings are made by pooling and norms alone.")
    config = read_json(folder / CONFIG)
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if modes != [_LAST]:
        named = ", ".join(modes) or "none"
        raise ModelError(f"{folder / CONFIG} sets {named}; of causal models only {_LAST} is supported.")
    return Pooling("Normalize" in kinds)


def _kinds(path: Path) -> list[str]:
    """The modules' classes, in order."""
    try:
        return [str(each["type"]).rpartition(".")[2] for each in _list_in(path)]
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path} is no list of modules with types.") from error


def _list_in(path: Path) -> list[Any]:
    try:
        found = files.read_json(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, list):
        raise ModelError(f"{path} holds a JSON {type(found).__name__}; it must hold a list.")
    return found
