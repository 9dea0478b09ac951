"""Chooses the kernels that serve a device."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from specserve.ops import Ops
from specserve.ops.backend import KernelBackend, KernelOptions
from specserve.registry import KERNELS

_log = logging.getLogger(__name__)


def choose_ops(
    device: torch.device,
    dtype: str,
    quantization: str,
    threads: int,
    isa: str = "auto",
    without: Collection[str] = (),
) -> Ops:
    """The kernels that serve a device, of the first backend in kernels/ that can, but for those named `without`; "auto"
    is what is fastest with them. Raises ConfigError for what no backend can serve, and for an instruction set that the
    kernels do not have."""
    asked = KernelOptions(device, dtype, quantization, threads, isa)
    backend: KernelBackend = KERNELS.choose(asked, without)
    return backend.create(asked)


def reference_for(ops: Ops) -> Ops:
    """The kernels of the lowest priority, plain torch, on the CPU and in the dtype of `ops`."""
    backend: KernelBackend = KERNELS.find(KERNELS.ranked()[-1])
    return backend.create(KernelOptions(torch.device("cpu"), str(ops.dtype).removeprefix("torch."), "none"))


def describe(ops: Ops, origin: str, num_processes: int) -> str:
    """What computes a model, for people; `origin` is how its checkpoint is quantised, "" where it is not."""
    weights = str(ops.dtype).removeprefix("torch.") if ops.quantization == "none" else ops.quantization
    weights += f" (checkpoint: {origin})" if origin else ""
    flash = ops.flash and f"flash attention of {ops.flash}"
    kernels = ", ".join([f"{ops.name} kernels", *filter(None, [ops.instruction_set, flash])])
    processes = "" if num_processes == 1 else f", {num_processes} processes"
    return f"in {weights} on {ops.device} ({kernels}{processes})"


def lacking(ops: Ops) -> str:
    """What an engine loses that faster kernels for its device do not serve, and how to have them; "" where it loses
    nothing."""
    if ops.device.type != "cpu":
        return _passed_over(ops)
    names = KERNELS.unbuilt_before(ops.name)
    if not names:
        return ""
    dtype = str(ops.dtype).removeprefix("torch.")
    return (
        f"The {' and '.join(names)} kernels were not built with this installation. The {ops.name} kernels, in PyTorch, "
        f"are several times slower and keep weights in {dtype}. Install specserve from a wheel, or anew with a C++ "
        "compiler and Python's headers; with SPECSERVE_REQUIRE_NATIVE=1 the installation says why it cannot build them."
    )


def _passed_over(ops: Ops) -> str:
    asked = KernelOptions(ops.device, str(ops.dtype).removeprefix("torch."), ops.quantization)
    reasons = KERNELS.reasons_before(ops.name, asked, ops.device.type)
    if not reasons:
        return ""
    told = " ".join(f"{name} {why}" for name, why in reasons.items())
    return (
        f"On {ops.device} the {ops.name} kernels serve, in PyTorch, op by op and without CUDA graphs, several times "
        f"slower than others: {told} docs/gpu.md lists what they need."
    )


def warn_of_lacking(ops: Ops) -> None:
    if told := lacking(ops):
        _log.warning("%s", told)
