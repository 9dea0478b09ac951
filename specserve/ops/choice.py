"""Chooses a device, and the kernels that serve it."""

from __future__ import annotations

import torch

from specserve.errors import ConfigError
from specserve.ops import Ops
from specserve.ops.backend import KernelBackend, KernelOptions
from specserve.registry import KERNELS


def choose_device(name: str) -> torch.device:
    """The device a name stands for, "auto" too. Raises ConfigError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is not a device. Use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but torch sees no CUDA device here. Use --device cpu.")
    return device


def choose_ops(device: torch.device, dtype: str, quantization: str, threads: int, isa: str = "auto") -> Ops:
    """The kernels that serve a device, of the first backend in kernels/ that can; "auto" is what is fastest with them.
    Raises ConfigError for what no backend can serve, and for an instruction set that the kernels do not have."""
    asked = KernelOptions(device, dtype, quantization, threads, isa)
    backend: KernelBackend = KERNELS.choose(asked)
    return backend.create(asked)
