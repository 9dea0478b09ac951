"""What a reader of a quantised layout finds in a checkpoint, and the checks that all readers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specserve.checkpoint.folder import TensorInfo
from specserve.errors import ModelError
from specserve.ops.packing import Quantized, Weight

Config = Mapping[str, Any]
Infos = Mapping[str, TensorInfo]
SCALES = ("F16", "BF16", "F32")  # safetensors' spelling


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix [out, in] that several stored tensors make up: `parts` has their names by what they are, and `read`
    takes them by that. `kind` says for people how it is stored, `fits_int4` that kernels keep its integers in int4."""

    shape: tuple[int, int]
    kind: str
    parts: Mapping[str, str]
    read: Callable[..., Weight]
    fits_int4: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint's matrices by the name of the tensor that an unquantised one has in their place, stored tensors that
    nothing is read from, and for people what of the layout is passed over."""

    matrices: Mapping[str, Matrix]
    unused: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def setting(config: Config, key: str, allowed: Iterable[Any], default: Any = None) -> Any:
    """config[key], or `default` where it is absent or null. Raises ModelError for what is not allowed."""
    value = config.get(key)
    value = default if value is None else value
    allowed = list(allowed)
    if not any(value == each and type(value) is type(each) for each in allowed):
        shown = ", ".join(map(repr, allowed))
        raise ModelError(f"quantization_config gives {key} as {value!r}; supported are {shown}.")
    return value


def group_size(config: Config, key: str = "group_size") -> int:
    """A positive number of inputs, or -1: all. Raises ModelError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 0 < value < 2**31):
        raise ModelError(f"quantization_config gives {key} as {value!r}; it must be a positive number or -1.")
    return value


def block_size(config: Config, key: str) -> tuple[int, int] | None:
    """Outputs and inputs of the blocks that share a scale; None where it does not say. Raises ModelError."""
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(each) is int and each > 0 for each in value):
        raise ModelError(f"quantization_config gives {key} as {value!r}; it must be two positive numbers.")
    return value[0], value[1]


def modules_with(infos: Infos, suffix: str) -> list[str]:
    """The names of modules that have a tensor of this name."""
    return [name.removesuffix(f".{suffix}") for name in infos if name.endswith(f".{suffix}")]


def parts_of(infos: Infos, module: str, needed: Iterable[str], others: Iterable[str] = ()) -> dict[str, str]:
    """The names of a module's tensors by their last part; `others` it may lack. Raises ModelError."""
    for part in needed:
        if f"{module}.{part}" not in infos:
            raise ModelError(f"{module} is quantised and has no {part}: the checkpoint is incomplete.")
    return {part: name for part in (*needed, *others) if (name := f"{module}.{part}") in infos}


def check(infos: Infos, name: str, dtypes: Iterable[str], *shapes: tuple[int, ...], why: str = "") -> None:
    """Raise ModelError where a stored tensor has another dtype, or none of these shapes, which follow from `why`."""
    info = infos[name]
    if info.dtype not in (allowed := tuple(dtypes)):
        raise ModelError(f"{name} holds {info.dtype}; the layout has {', '.join(allowed)}.")
    if shapes and info.shape not in shapes:
        raise ModelError(f"{name} has shape {info.shape}; {why} implies {' or '.join(map(str, shapes))}.")


def check_order(name: str, order: Tensor, num_groups: int) -> None:
    """Raise ModelError for a group that does not exist."""
    lowest, highest = (int(bound) for bound in torch.aminmax(order))
    if lowest < 0 or highest >= num_groups:
        raise ModelError(
            f"{name} gives inputs the groups {lowest} to {highest}; there are scales of {num_groups}, from 0."
        )
    if num_groups > 1 and highest == 0:
        raise ModelError(f"{name} gives all inputs the group 0, and there are scales of {num_groups}.")


def in_groups(ints: Tensor, scales: Tensor, zeros: Tensor | None, group: int, order: Tensor | None = None) -> Quantized:
    """The matrix of these, without the order where that is the plain one. `group` is -1 where there is one."""
    inputs = ints.shape[1]
    group = inputs if group == -1 else group
    if order is not None and torch.equal(order.long(), torch.arange(inputs) // group):
        order = None
    return Quantized(ints, scales, zeros, group, order)


def grouped(bits: int, group: int, *more: str, kind: str = "int") -> str:
    """A matrix's format in words."""
    size = "one group" if group == -1 else f"groups of {group}"
    return ", ".join((f"{kind}{bits}", size, *more))


def fits_int4(bits: int, group: int, has_order: bool = False) -> bool:
    """Whether int4 keeps integers of so many bits: its own groups are of 32 inputs, in their order."""
    return bits <= 4 and (group == -1 or (group % 32 == 0 and not has_order))


def matches(pattern: str, module: str) -> bool:
    """Whether a regular expression of a checkpoint matches the beginning of a module's name. Raises ModelError."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise ModelError(f"quantization_config has {pattern!r}, which is no regular expression: {error}.") from error
