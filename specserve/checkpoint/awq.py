"""Reads AWQ checkpoints (arXiv 2306.00978) in the layout "gemm" of AutoAWQ.

Of a matrix [out, in]: qweight int32 [in, out / 8] and qzeros int32 [groups, out / 8] pack along outputs, eight to a
word, whose nibbles from the lowest on are outputs 0, 2, 4, 6, 1, 3, 5, 7; scales [groups, out]. Zeros are stored as
they are. https://github.com/casper-hansen/AutoAWQ
"""

from __future__ import annotations

from torch import Tensor

from specserve.checkpoint.bitstream import unpack
from specserve.checkpoint.layout import (
    SCALES,
    Config,
    Infos,
    Layout,
    Matrix,
    check,
    fits_int4,
    group_size,
    grouped,
    in_groups,
    modules_with,
    parts_of,
    setting,
)
from specserve.errors import ModelError
from specserve.ops.packing import Quantized

NAME = "AWQ"
_BITS = 4
_PER_WORD = 32 // _BITS
_NIBBLE_OF = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of eight outputs lies


def find(config: Config, infos: Infos) -> Layout:
    """Its matrices. Raises ModelError for settings that are not supported and tensors that contradict them."""
    # Files beside config.json, which AutoAWQ wrote first, have other names for the same.
    named = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size"), **config}
    version = str(named.get("version") or "gemm").lower()
    if version != "gemm":
        raise ModelError(f"The AWQ version is {version!r}; supported is gemm. Use a gemm version of the model.")
    setting(named, "bits", [_BITS])
    group = group_size(named)
    kept = named.get("modules_to_not_convert") or []
    matrices = {}
    for module in modules_with(infos, "qweight"):
        if found := [name for name in kept if name in module]:
            raise ModelError(f"{module} is quantised, and modules_to_not_convert has {found[0]!r}, which says not.")
        matrices[f"{module}.weight"] = _matrix(module, group, infos)
    return Layout(matrices)


def _matrix(module: str, group: int, infos: Infos) -> Matrix:
    parts = parts_of(infos, module, ("qweight", "qzeros", "scales"))
    check(infos, parts["qweight"], ["I32"])
    if len(shape := infos[parts["qweight"]].shape) != 2:
        raise ModelError(f"{parts['qweight']} has shape {shape}; it must be a matrix.")
    inputs, outputs = shape[0], shape[1] * _PER_WORD
    groups = 1 if group == -1 else -(-inputs // group)
    said = f"quantization_config, a group_size of {group},"
    check(infos, parts["scales"], SCALES, (groups, outputs), why=said)
    check(infos, parts["qzeros"], ["I32"], (groups, shape[1]), why=said)

    def read(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Quantized:
        return in_groups(_outputs(qweight), scales.T, _outputs(qzeros), group)

    return Matrix((outputs, inputs), grouped(_BITS, group), parts, read, fits_int4(_BITS, group))


def _outputs(words: Tensor) -> Tensor:
    """int32 [any, words] -> uint8 [outputs, any]."""
    nibbles = unpack(words, _BITS).view(*words.shape, _PER_WORD)
    return nibbles[..., _NIBBLE_OF].flatten(1).T
