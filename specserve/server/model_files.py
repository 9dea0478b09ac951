"""What a model's folder says of the model, for clients that list models. Reads names, sizes and headers alone."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specserve.checkpoint.folder import read_config, read_headers
from specserve.errors import ModelError

_FLOATS = ("F64", "F32", "F16", "BF16")  # a number of other types may be several weights, or a part of one
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`format` is that of the weights; `family` model_type of config.json, empty where it has none; `size` in bytes;
    `modified` in seconds since 1970; `digest` changes with the names, sizes and times of the files. `num_parameters` is
    None where the weights' headers do not tell."""

    format: str
    family: str
    size: int
    modified: float
    digest: str
    num_parameters: int | None

    @property
    def parameter_size(self) -> str:
        """As 134.5M; empty where it is not known."""
        for unit, letter in _UNITS:
            if self.num_parameters is not None and self.num_parameters >= unit:
                return f"{self.num_parameters / unit:.1f}{letter}"
        return "" if self.num_parameters is None else str(self.num_parameters)


def read_model_files(folder: Path) -> ModelFiles:
    """Raises OSError for a folder that is gone, ModelError for a config.json that cannot be read."""
    found = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    listed = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)
    return ModelFiles(
        format="gguf" if any(name.endswith(".gguf") for name, _ in found) else "safetensors",
        family=str(read_config(folder).get("model_type", "")),
        size=sum(stat.st_size for _, stat in found),
        modified=max((stat.st_mtime for _, stat in found), default=0.0),
        digest=hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest(),
        num_parameters=_num_parameters(folder),
    )


def _num_parameters(folder: Path) -> int | None:
    tensors = {}
    with suppress(ModelError):  # a GGUF file, which the engine reads
        tensors = read_headers(folder)
    if not tensors or any(tensor.dtype not in _FLOATS for tensor in tensors.values()):
        return None
    return sum(prod(tensor.shape) for tensor in tensors.values())
