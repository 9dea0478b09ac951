"""Draft heads with int8 matrices, as compressed-tensors stores them (github.com/vllm-project/compressed-tensors, format
int-quantized, one scale for each row): beside `X.weight`, int8 [rows, columns], lies `X.weight_scale`, [rows, 1]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.checkpoint.folder import TensorInfo
from specserve.checkpoint.weights import Weights
from specserve.errors import ModelError
from specserve.ops.packing import Quantized

FORMAT = "int-quantized"
_SCALE = "_scale"
_LARGEST = 127


class Int8Weights(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files where int8 matrices and their scales are one float32 tensor under the
    matrix's name, as large as its file says. An int8 tensor without a scale stays what it is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored = stored = Weights(folder)
        self._scaled = {n for n, info in stored.infos.items() if info.dtype == "I8" and n + _SCALE in stored.infos}
        self.infos: Mapping[str, TensorInfo] = {
            name: replace(info, dtype="F32") if name in self._scaled else info
            for name, info in stored.infos.items()
            if name.removesuffix(_SCALE) not in self._scaled or name in self._scaled
        }

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._stored[name]
        if name not in self._scaled:
            return tensor
        scale = self._stored[name + _SCALE]
        if tuple(scale.shape) != (len(tensor), 1) or not scale.is_floating_point():
            found = f"{str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}"
            raise ModelError(
                f"{self._folder}: {name}{_SCALE} is {found}; int8 matrices of a draft head have one scale for each "
                f"row, here [{len(tensor)}, 1]. Store them so, or as bfloat16."
            )
        return Quantized(tensor, scale, zeros=None, group=tensor.shape[1])[:]

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def to_int8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What is stored of a tensor: int8 and scales of a matrix of several rows, float32 of anything else."""
    tensor = tensor.float()
    if tensor.ndim != 2 or len(tensor) == 1:
        return {name: tensor}
    scale = (tensor.abs().amax(1, keepdim=True) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return {name: (tensor / scale).round().to(torch.int8), name + _SCALE: scale}


def quantization_config() -> dict[str, Any]:
    """What config.json says of such a head."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear", "Embedding"], "weights": weights}},
    }
