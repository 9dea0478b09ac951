"""Reads checkpoints of compressed-tensors, as llm-compressor writes them.

config_groups say for which modules (`targets`: class names, names, or "re:" and a pattern) weights have how many bits,
and `ignore` which modules have none. Of a matrix [out, in]:

    pack-quantized   weight_packed int32 [out, in * bits / 32], each number plus 2^(bits - 1); weight_shape;
                     weight_zero_point int32 [out * bits / 32, groups] likewise, packed along outputs
    int-quantized    weight int8 [out, in]; weight_zero_point int8
    float-quantized  weight float8_e4m3fn [out, in]
    mxfp4            weight_packed uint8 [out, in / 2], two E2M1 numbers each, the first in the low nibble; weight_scale
                     uint8, an exponent of 2 plus 127 (OCP Microscaling 1.0)

and weight_scale [out, groups], [out, 1], [1], or [out / n, in / m] for blocks; weight_g_idx [in], the group of each
input. https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specserve.checkpoint.bitstream import WORD, num_words, unpack
from specserve.checkpoint.float8 import dequantised
from specserve.checkpoint.layout import (
    SCALES,
    Config,
    Infos,
    Layout,
    Matrix,
    block_size,
    check,
    check_order,
    fits_int4,
    group_size,
    grouped,
    in_groups,
    matches,
    parts_of,
    setting,
)
from specserve.errors import ModelError
from specserve.ops.packing import Quantized

NAME = "compressed-tensors"
_PACKED, _INT, _FLOAT, _NAIVE, _MXFP4 = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
)
_FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE, _MXFP4)
_CLASSES = ("Linear", "LinearBase")  # those of every matrix that is quantised
# What activations and a quantised KV cache have in a file, by its end.
_OF_ACTIVATIONS = (
    *("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"),
    *(f"{name}_{part}" for name in "qkv" for part in ("scale", "zero_point")),
)
_E2M1 = [0, 1, 2, 3, 4, 6, 8, 12]  # twice the numbers
_EXPONENT_BIAS = 127
_MX_GROUP = 32


class _Scheme(NamedTuple):
    """How the matrices of some modules are stored."""

    format: str
    bits: int
    is_symmetric: bool
    strategy: str
    group: int  # inputs, -1: all
    block: tuple[int, int]  # outputs and inputs
    reorders: bool
    targets: tuple[str, ...]


def find(config: Config, infos: Infos) -> Layout:
    """Its matrices. Raises ModelError for settings that are not supported and tensors that contradict them."""
    for key in ("sparsity_config", "transform_config"):
        if (value := config.get(key)) and (not isinstance(value, Mapping) or value.get("format") != "dense"):
            raise ModelError(f"quantization_config has a {key}, which is not supported. Use a version without one.")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("quantization_config has no config_groups.")
    schemes = [_scheme(name, group, config) for name, group in groups.items()]
    ignored = _names(config, "ignore")
    matrices = {f"{module}.weight": _matrix(module, schemes, ignored, infos) for module in _modules(infos)}
    unused = frozenset(name for name in infos if name.rpartition(".")[2] in _OF_ACTIVATIONS)
    notes = []
    if any((group.get("input_activations") or {}) for group in groups.values()):
        notes.append("activations are rounded as the kernels do it, not as the checkpoint says")
    if config.get("kv_cache_scheme"):
        notes.append("the KV cache is not quantised as the checkpoint says")
    return Layout(matrices, unused, tuple(notes))


def _names(config: Config, key: str) -> tuple[str, ...]:
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ModelError(f"quantization_config gives {key} as {found!r}; it must be a list of names.")
    return tuple(found)


def _scheme(name: str, group: Any, config: Config) -> _Scheme:
    if not isinstance(group, Mapping) or not isinstance(weights := group.get("weights"), Mapping):
        raise ModelError(f"config_groups of quantization_config has {name}, which does not say how weights are stored.")
    form = group.get("format") or config.get("format")
    if form not in _FORMATS:
        raise ModelError(
            f"quantization_config has weights in the format {form!r}; supported are {', '.join(_FORMATS)}. "
            "Use a version of the model in one of these, such as W4A16, W8A8 or FP8."
        )
    is_float = setting(weights, "type", ["int", "float"], "int") == "float"
    if is_float != (form in (_FLOAT, _MXFP4)) and form != _NAIVE:
        raise ModelError(f"{name} of quantization_config has weights of type {weights.get('type')!r} in {form}.")
    form = {True: _FLOAT, False: _INT}[is_float] if form == _NAIVE else form
    bits = setting(weights, "num_bits", {_PACKED: range(1, 9), _INT: range(1, 9), _MXFP4: [4]}.get(form, [8]), 8)
    strategy = str(setting(weights, "strategy", ["tensor", "channel", "group", "block"], _implied(weights)))
    return _Scheme(
        form,
        bits,
        setting(weights, "symmetric", [True, False], True),
        strategy,
        group_size(weights) if strategy == "group" else -1,
        block_size(weights, "block_structure") or (1, 1),
        str(weights.get("actorder")).lower() in ("group", "true", "dynamic"),
        _names(group, "targets"),
    )


def _implied(weights: Config) -> str:
    """A group_size alone means groups, or channels where it is -1."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def _modules(infos: Infos) -> Iterable[str]:
    """Those that are quantised: all that have a scale."""
    return [name.removesuffix(".weight_scale") for name in infos if name.endswith(".weight_scale")]


def _matrix(module: str, schemes: list[_Scheme], ignored: tuple[str, ...], infos: Infos) -> Matrix:
    if found := [name for name in ignored if _names_module(name, module)]:
        raise ModelError(f"{module} is quantised, and ignore in quantization_config has {found[0]!r}, which says not.")
    fitting = [scheme for scheme in schemes if any(_names_module(name, module) for name in scheme.targets)]
    fitting = fitting or [scheme for scheme in schemes if any(name in _CLASSES for name in scheme.targets)]
    if not fitting:
        raise ModelError(f"{module} is quantised, and no targets in quantization_config name it.")
    return _READERS[fitting[0].format](module, fitting[0], infos)


def _names_module(target: str, module: str) -> bool:
    return matches(target[3:], module) if target.startswith("re:") else target == module


def _packed(module: str, scheme: _Scheme, infos: Infos) -> Matrix:
    needed = ["weight_packed", "weight_scale", "weight_shape"]
    needed += [] if scheme.is_symmetric else ["weight_zero_point"]
    parts = parts_of(infos, module, needed, ["weight_g_idx", "weight_zero_point"])
    check(infos, parts["weight_packed"], ["I32"])
    outputs, words = _matrix_shape(infos, parts["weight_packed"])
    inputs = _inputs(module, scheme, words, infos)
    groups, has_order = _check_scales(parts, scheme, (outputs, inputs), infos), "weight_g_idx" in parts
    if "weight_zero_point" in parts:
        shapes = (num_words(outputs, scheme.bits), groups), (outputs, groups)
        check(infos, parts["weight_zero_point"], ["I32", "I8"], *shapes, why="weight_packed")
    if has_order:
        check(infos, parts["weight_g_idx"], ["I32", "I64"], (inputs,), why="weight_packed")
    elif scheme.reorders and groups > 1:
        raise ModelError(f"{module} has no weight_g_idx, and actorder says that its groups are in another order.")
    offset, bits = 2 ** (scheme.bits - 1), scheme.bits

    def read(
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_shape: Tensor,
        weight_zero_point: Tensor | None = None,
        weight_g_idx: Tensor | None = None,
    ) -> Quantized:
        if weight_shape.tolist() != [outputs, inputs]:
            raise ModelError(f"{module}.weight_shape is {weight_shape.tolist()}; the others imply {outputs, inputs}.")
        zeros = weight_zero_point
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpack(zeros.T, bits)[:, :outputs].T.short() - offset
        if weight_g_idx is not None and (weight_g_idx < 0).all():  # of a module that was not reordered
            weight_g_idx = None
        if weight_g_idx is not None:
            check_order(parts["weight_g_idx"], weight_g_idx, groups)
        ints = unpack(weight_packed, bits)[:, :inputs].short() - offset
        return in_groups(ints.char(), _each_output(weight_scale, outputs), zeros, scheme.group, weight_g_idx)

    more = ["act-order"] if has_order else []
    fits = fits_int4(bits, scheme.group, has_order)
    return Matrix((outputs, inputs), grouped(bits, scheme.group, *more), parts, read, fits)


def _inputs(module: str, scheme: _Scheme, words: int, infos: Infos) -> int:
    """How many inputs a row of so many words has: where the last one may not be full, the groups or the order say."""
    bits, most = scheme.bits, words * WORD // scheme.bits
    if f"{module}.weight_g_idx" in infos:
        most = min(most, *infos[f"{module}.weight_g_idx"].shape)  # the last word may not be full
    elif scheme.group > 0:
        most = min(most, infos[f"{module}.weight_scale"].shape[-1] * scheme.group)
    if num_words(most, bits) != words or (WORD % bits and -(-most // (WORD // bits)) == words):
        raise ModelError(f"{module}.weight_packed has {words:,} words a row, which {bits} bits a number do not fill.")
    return most


def _int8(module: str, scheme: _Scheme, infos: Infos) -> Matrix:
    needed = ["weight", "weight_scale"] + ([] if scheme.is_symmetric else ["weight_zero_point"])
    parts = parts_of(infos, module, needed, ["weight_zero_point"])
    check(infos, parts["weight"], ["I8"])
    shape = _matrix_shape(infos, parts["weight"])
    groups = _check_scales(parts, scheme, shape, infos)
    if "weight_zero_point" in parts:
        check(infos, parts["weight_zero_point"], ["I8"], (shape[0], groups), (1,), (1, 1), why="weight_scale")

    def read(weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None = None) -> Quantized:
        zeros = None if weight_zero_point is None else _each_output(weight_zero_point, shape[0])
        return in_groups(weight, _each_output(weight_scale, shape[0]), zeros, scheme.group)

    return Matrix(shape, grouped(8, scheme.group), parts, read)


def _float8(module: str, scheme: _Scheme, infos: Infos) -> Matrix:
    parts = parts_of(infos, module, ["weight", "weight_scale"])
    check(infos, parts["weight"], ["F8_E4M3"])
    shape = _matrix_shape(infos, parts["weight"])
    _check_scales(parts, scheme, shape, infos)

    def read(weight: Tensor, weight_scale: Tensor) -> Tensor:
        block = scheme.block if scheme.strategy == "block" else (1, shape[1] if scheme.group == -1 else scheme.group)
        scales = weight_scale if scheme.strategy == "block" else _each_output(weight_scale, shape[0])
        return dequantised(weight, scales, block)

    return Matrix(shape, f"float8 (E4M3), a scale for each {scheme.strategy}", parts, read)


def _mxfp4(module: str, scheme: _Scheme, infos: Infos) -> Matrix:
    parts = parts_of(infos, module, ["weight_packed", "weight_scale"])
    check(infos, parts["weight_packed"], ["U8"])
    outputs, num_bytes = _matrix_shape(infos, parts["weight_packed"])
    inputs = 2 * num_bytes
    check(infos, parts["weight_scale"], ["U8"], (outputs, -(-inputs // _MX_GROUP)), why="weight_packed")

    def read(weight_packed: Tensor, weight_scale: Tensor) -> Quantized:
        twice = torch.tensor([*_E2M1, *(-each for each in _E2M1)], dtype=torch.int8)
        nibbles = torch.stack((weight_packed & 15, weight_packed >> 4), dim=-1).view(outputs, inputs)
        if (weight_scale == 255).any():
            raise ModelError(f"{module}.weight_scale holds NaN.")
        halves = torch.exp2(weight_scale.float() - _EXPONENT_BIAS - 1)
        return in_groups(twice[nibbles.int()], halves, None, _MX_GROUP)

    return Matrix((outputs, inputs), "MXFP4, groups of 32", parts, read)


_READERS: Mapping[str, Callable[[str, _Scheme, Infos], Matrix]] = {
    _PACKED: _packed,
    _INT: _int8,
    _FLOAT: _float8,
    _MXFP4: _mxfp4,
}


def _matrix_shape(infos: Infos, name: str) -> tuple[int, int]:
    if len(shape := infos[name].shape) != 2:
        raise ModelError(f"{name} has shape {shape}; it must be a matrix.")
    return shape[0], shape[1]


def _check_scales(parts: Mapping[str, str], scheme: _Scheme, shape: tuple[int, int], infos: Infos) -> int:
    """How many groups of inputs there are. Raises ModelError where the scales are not those of as many."""
    outputs, inputs = shape
    groups = 1 if scheme.group == -1 else -(-inputs // scheme.group)
    shapes: tuple[tuple[int, ...], ...] = ((outputs, groups),)
    if scheme.strategy == "tensor":
        shapes = (1,), (1, 1), ()
    elif scheme.strategy == "channel":
        shapes = (outputs, 1), (outputs,)
    elif scheme.strategy == "block":
        shapes = ((-(-outputs // scheme.block[0]), -(-inputs // scheme.block[1])),)
    said = f"quantization_config, strategy {scheme.strategy}" + (f" of {scheme.group}" if scheme.group > 0 else "")
    check(infos, parts["weight_scale"], SCALES, *shapes, why=f"{said},")
    return groups


def _each_output(values: Tensor, outputs: int) -> Tensor:
    """[out, groups] of what may be one number for all."""
    return values.reshape(1, 1).expand(outputs, 1) if values.numel() == 1 else values.view(outputs, -1)
