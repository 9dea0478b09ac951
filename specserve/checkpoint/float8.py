"""Reads checkpoints of float8 matrices with a scale for each block, as DeepSeek V3 and Qwen3 FP8 have them (arXiv
2412.19437): weight float8_e4m3fn [out, in], weight_scale_inv [out / n, in / m], by which its numbers are multiplied."""

from __future__ import annotations

from torch import Tensor

from specserve.checkpoint.layout import SCALES, Config, Infos, Layout, Matrix, check, modules_with, parts_of, setting
from specserve.errors import ModelError

NAME = "FP8"
_SCALE = "weight_scale_inv"


def find(config: Config, infos: Infos) -> Layout:
    """Its matrices. Raises ModelError for settings that are not supported and tensors that contradict them."""
    setting(config, "fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    block = config.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(each) is int and each > 0 for each in block):
        raise ModelError(
            f"quantization_config gives weight_block_size as {block!r}; supported are FP8 checkpoints with blocks of "
            "two positive numbers, or those of compressed-tensors."
        )
    size = block[0], block[1]
    matrices = {f"{module}.weight": _matrix(module, size, infos) for module in modules_with(infos, _SCALE)}
    scales = frozenset(name for name in infos if name.endswith((".input_scale", ".activation_scale")))
    return Layout(matrices, scales, ("activations are rounded as the kernels do it, not as the checkpoint says",))


def _matrix(module: str, block: tuple[int, int], infos: Infos) -> Matrix:
    parts = parts_of(infos, module, ["weight", _SCALE])
    check(infos, parts["weight"], ["F8_E4M3"])
    if len(shape := infos[parts["weight"]].shape) != 2:
        raise ModelError(f"{parts['weight']} has shape {shape}; it must be a matrix.")
    blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    check(infos, parts[_SCALE], SCALES, blocks, why=f"quantization_config, a weight_block_size of {list(block)},")

    def read(weight: Tensor, weight_scale_inv: Tensor) -> Tensor:
        return dequantised(weight, weight_scale_inv, block)

    return Matrix((shape[0], shape[1]), f"float8 (E4M3), blocks of {block[0]} x {block[1]}", parts, read)


def dequantised(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float8 [out, in] times the scale of each block, float32."""
    numbers = weight.float()
    wide = scales.float().repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    for row in range(len(scales)):  # blocks of rows, one after the other: no second matrix
        numbers[row * block[0] : (row + 1) * block[0]] *= wide[row]
    return numbers
