"""Reads GPTQ checkpoints (arXiv 2210.17323) as AutoGPTQ and GPTQModel write them.

Of a matrix [out, in]: qweight int32 [in * bits / 32, out] packs along inputs, qzeros int32 [groups, out * bits / 32]
along outputs, scales [groups, out], g_idx int32 [in], the group of each input. Format "gptq" stores each zero less 1,
as GPTQModel undoes it: words plus 1 in each place, modulo 2^32, and of 3 bits each number plus 1, modulo 8. "gptq_v2"
stores zeros. https://github.com/ModelCloud/GPTQModel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specserve.checkpoint.bitstream import WORD, num_words, unpack
from specserve.checkpoint.layout import (
    SCALES,
    Config,
    Infos,
    Layout,
    Matrix,
    check,
    check_order,
    fits_int4,
    group_size,
    grouped,
    in_groups,
    matches,
    modules_with,
    parts_of,
    setting,
)
from specserve.errors import ModelError
from specserve.ops.packing import Quantized

NAME = "GPTQ"
_FORMATS = ("gptq", "gptq_v2")
_BITS = (2, 3, 4, 8)
_OTHERS = {  # settings that would change what is stored, and their plain values
    "is_marlin_format": (None, False),
    "pack_dtype": (None, "int32", "torch.int32"),
    "rotation": (None, ""),
    "adapter": (None,),
}


class _Settings(NamedTuple):
    bits: int
    group: int  # -1: all inputs
    desc_act: bool
    is_v1: bool


def find(config: Config, infos: Infos) -> Layout:
    """Its matrices. Raises ModelError for settings that are not supported and tensors that contradict them."""
    form = _format(config)
    modules = modules_with(infos, "qweight")
    return Layout({f"{module}.weight": _matrix(module, _settings(config, form, module), infos) for module in modules})


def _format(config: Config) -> str:
    for key, plain in _OTHERS.items():
        if config.get(key) not in plain:
            raise ModelError(f"quantization_config sets {key} to {config[key]!r}, which is not supported.")
    found = {config[key] for key in ("checkpoint_format", "format") if config.get(key) is not None} or {"gptq"}
    if len(found) > 1 or not found <= set(_FORMATS):
        names = ", ".join(map(repr, sorted(map(str, found))))
        raise ModelError(
            f"The GPTQ checkpoint_format is {names}; supported are {', '.join(_FORMATS)}. Save the model in one of "
            "them with GPTQModel, or use another version of it."
        )
    (form,) = found
    return str(form)


def _settings(config: Config, form: str, module: str) -> _Settings:
    own = {**config, **_rule(config, module)}
    return _Settings(
        setting(own, "bits", _BITS),
        group_size(own),
        setting(own, "desc_act", (True, False), False),
        form == "gptq",
    )


def _rule(config: Config, module: str) -> Config:
    """What `dynamic` says of a module: the first pattern that matches the beginning of its name."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ModelError(f"quantization_config gives dynamic as {dynamic!r}; it must be an object.")
    for rule, changes in dynamic.items():
        is_negative = rule.startswith("-:")
        if not matches(rule[2:] if rule[:2] in ("-:", "+:") else rule, module):
            continue
        if is_negative:
            raise ModelError(f"{module} is quantised, and dynamic in quantization_config has {rule!r}, which says not.")
        if not isinstance(changes, Mapping):
            raise ModelError(f"dynamic in quantization_config gives {rule!r} as {changes!r}; it must be an object.")
        return changes
    return {}


def _matrix(module: str, settings: _Settings, infos: Infos) -> Matrix:
    parts = parts_of(infos, module, ("qweight", "qzeros", "scales"), ("g_idx",))
    names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    bits = settings.bits
    check(infos, names["qweight"], ["I32"])
    check(infos, names["scales"], SCALES)
    shapes = infos[names["qweight"]].shape, infos[names["scales"]].shape
    if any(len(shape) != 2 for shape in shapes):
        raise ModelError(f"{module}: qweight and scales have shapes {shapes[0]} and {shapes[1]}; both are matrices.")
    (words, outputs), (num_groups, _) = shapes
    inputs = words * WORD // bits
    if "g_idx" in parts:
        check(infos, names["g_idx"], ["I32", "I64"])
        inputs = min(inputs, *infos[names["g_idx"]].shape)  # the last word may not be full
    if num_words(inputs, bits) != words or not inputs:
        raise ModelError(f"{names['qweight']} has {words:,} rows of words, which {bits} bits a number do not fill.")
    said = f"{bits} bits and a group_size of {settings.group}"
    groups = 1 if settings.group == -1 else -(-inputs // settings.group)
    check(infos, names["scales"], SCALES, (groups, outputs), why=f"quantization_config, {said},")
    check(infos, names["qzeros"], ["I32"], (groups, num_words(outputs, bits)), why=f"quantization_config, {said},")
    if "g_idx" in parts:
        check(infos, names["g_idx"], ["I32", "I64"], (inputs,), why=f"qweight of {bits} bits")
    elif settings.desc_act and num_groups > 1:
        raise ModelError(f"{module} has no g_idx, and desc_act says that its groups are in another order.")
    more = ["act-order"] if settings.desc_act else []

    def read(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None) -> Quantized:
        ints = unpack(qweight.T, bits)[:, :inputs]
        zeros = _zeros(qzeros, settings)[:, :outputs].T
        if g_idx is not None:
            check_order(names["g_idx"], g_idx, num_groups)
        return in_groups(ints, scales.T, zeros, settings.group, g_idx)

    fits = fits_int4(bits, settings.group, settings.desc_act)
    return Matrix((outputs, inputs), grouped(bits, settings.group, *more), parts, read, fits)


def _zeros(words: Tensor, settings: _Settings) -> Tensor:
    """int32 [groups, words] -> uint8 [groups, outputs]."""
    bits = settings.bits
    if not settings.is_v1:
        return unpack(words, bits)
    if WORD % bits:
        return unpack(words, bits).add(1).remainder(1 << bits)
    ones = sum(1 << shift for shift in range(0, WORD, bits))
    return unpack(torch.add(words, ones), bits)
