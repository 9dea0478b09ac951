"""Chooses a device, and the kernels that serve it."""

from __future__ import annotations

import logging

import torch

from specserve.errors import ConfigError
from specserve.ops import Ops
from specserve.ops.backend import KernelBackend, KernelOptions
from specserve.registry import KERNELS

_log = logging.getLogger(__name__)


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


def unbuilt(ops: Ops) -> str:
    """What an engine on a CPU loses whose fastest kernels were not built with this installation; "" where they were."""
    names = KERNELS.unbuilt_before(ops.name) if ops.device.type == "cpu" else []
    if not names:
        return ""
    dtype = str(ops.dtype).removeprefix("torch.")
    return (
        f"The {' and '.join(names)} kernels were not built with this installation. The {ops.name} kernels, in PyTorch, "
        f"are several times slower and keep weights in {dtype}. Install specserve from a wheel, or anew with a C++ "
        "compiler and Python's headers; with SPECSERVE_REQUIRE_NATIVE=1 the installation says why it cannot build them."
    )


def warn_of_unbuilt(ops: Ops) -> None:
    if lacking := unbuilt(ops):
        _log.warning("%s", lacking)
