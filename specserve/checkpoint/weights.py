"""Tensors of a model folder by name, memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from specserve.checkpoint.folder import TensorInfo, read_config, read_headers
from specserve.checkpoint.gguf_index import FILE, FLOATS, INDEX, read_index
from specserve.checkpoint.gguf_reading import numbers
from specserve.errors import ModelError
from specserve.files import map_file

__all__ = ["Weights", "read_config"]


class Weights(Mapping[str, torch.Tensor]):
    """A read-only mapping from tensor name to torch.Tensor (CPU, the dtype of the file) over the safetensors files of
    `folder`: its index, its only file, or all of them; or over its GGUF file, whose blocks become numbers when they are
    read, and whose tensors that are quantised `blocks` names.

    Headers and file sizes are checked at once; a tensor's bytes are read when it is used. `infos` has dtype, shape and
    bytes of every tensor. Raises ModelError as `specserve.checkpoint.folder.read_headers` does.
    """

    def __init__(self, folder: Path) -> None:
        self.infos: Mapping[str, TensorInfo] = read_headers(folder)
        self._files: dict[Path, Any] = {}
        self._stored = read_index(folder) if (folder / INDEX).exists() else {}
        if self._stored:
            self._data = np.frombuffer(map_file(folder / FILE), np.uint8)
        else:
            self._files = {path: _open(path) for path in dict.fromkeys(info.file for info in self.infos.values())}
        self.blocks = frozenset(name for name, tensor in self._stored.items() if tensor.kind not in FLOATS)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._stored:
            values = torch.from_numpy(numbers(self._data, self._stored[name]))
            return values.view(torch.bfloat16) if values.dtype == torch.int16 else values
        tensor: torch.Tensor = self._files[self.infos[name].file].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def open_file(path: Path) -> Callable[[str], torch.Tensor]:
    """Reads tensors of one safetensors file by name. Raises ModelError for one that cannot be opened."""
    read: Callable[[str], torch.Tensor] = _open(path).get_tensor
    return read


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be opened: {error}.") from error
