"""Which device an engine computes on, and why a GPU that is there cannot be used."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from specserve.errors import CapacityError, ConfigError

_log = logging.getLogger(__name__)
_GET_STARTED = "pytorch.org/get-started shows how"
_NODES = ("dev/nvidia0", "dev/dxg", "dev/kfd")  # of NVIDIA's driver, of WSL's, of AMD's


def choose_device(name: str, root: Path = Path("/")) -> torch.device:
    """The device a name stands for, a GPU always with its number. "auto" is a GPU if torch can use one; where it cannot
    use one that this machine has, the log says why. Raises ConfigError for a device that is not there, with what to do
    about it. `root` is the root of the file system."""
    if name == "auto":
        if _is_available():
            return torch.device("cuda", torch.cuda.current_device())
        if _has_gpu(root):
            _log.warning("This machine has a GPU, and the engine runs on the CPU: %s", why_no_gpu())
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r} is not a device. Use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cpu":
        return torch.device("cpu")
    if not _is_available():
        raise ConfigError(f"--device {name}: {why_no_gpu()} Or use --device cpu.")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r}, and they are numbered within it)"
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ConfigError(f"--device {name} is not there: torch sees {there} here{hidden}.")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def why_no_gpu() -> str:
    """Why torch cannot use a GPU here, and what helps: sentences. Only where it cannot."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is a build for CPUs alone. Install one for CUDA ({_GET_STARTED}, Compute "
            "Platform: CUDA)."
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return _explained(str(error))
    return "torch sees no GPU. nvidia-smi shows those that the driver has; in Docker it takes --gpus all."


@contextmanager
def within_memory() -> Iterator[None]:
    """Whatever is built within it on a GPU. Raises CapacityError, with what to lower, where that has too little memory:
    nobody knows before what libraries and graphs take."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        device, asked = (re.search(each, str(error)) for each in (r"GPU (\d+)", r"allocate ([\d.]+ \w+)"))
        more = f": it takes {asked[1]} more than are free" if asked else ""
        raise CapacityError(
            f"{f'cuda:{device[1]}' if device else 'The GPU'} ran out of memory{more}. Lower --kv-cache-gib, so that "
            "the cache leaves more, or --max-num-batched-tokens and --max-num-seqs, which say what a step works on; or "
            "free some memory (nvidia-smi shows who has it), or choose a smaller model."
        ) from error


def check_number(device: torch.device, count: int) -> None:
    """Raises ConfigError where there are not so many GPUs from `device` on, one for each process of a model."""
    assert device.index is not None, "chosen"
    last, there = device.index + count - 1, torch.cuda.device_count() - 1
    if last > there:
        raise ConfigError(
            f"--tensor-parallel-size {count} takes {device} to cuda:{last}, and torch sees cuda:0 to cuda:{there} "
            "here. Lower it, or name an earlier --device; CUDA_VISIBLE_DEVICES may hide some."
        )


def check_attention(device: torch.device, attention: str) -> None:
    """Raises ConfigError for flash attention on a CPU; `attention` is of config.ATTENTIONS."""
    if device.type == "cpu" and attention == "flash":
        raise ConfigError("--attention flash is for GPUs, and this engine runs on the CPU: leave it out.")


def _explained(error: str) -> str:
    """What torch says, shorter and with what to do."""
    if (found := re.search(r"driver on your system is too old \(found version (\d+)\)", error)) is not None:
        version = int(found[1])
        return (
            f"the NVIDIA driver is too old: it knows CUDA {version // 1000}.{version % 1000 // 10}, and torch "
            f"{torch.__version__} is built for CUDA {torch.version.cuda}. Update the driver, or install torch for an "
            f"older CUDA ({_GET_STARTED})."
        )
    if "Found no NVIDIA driver" in error:
        return "there is no NVIDIA driver. Install it (nvidia-smi then lists the GPUs); in Docker it takes --gpus all."
    if "No CUDA GPUs are available" in error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        return f"the driver shows no GPU{hidden}. nvidia-smi lists those that there are; in Docker it takes --gpus all."
    first = next(iter(error.strip().splitlines()), "no reason given")
    return f"CUDA does not start: {first.rstrip('.')}."


def _is_available() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old, which is said in our own words
        return bool(torch.cuda.is_available())


def _has_gpu(root: Path) -> bool:
    """Whether the system shows one, whatever torch can do with it."""
    return any((root / node).exists() for node in _NODES)
