"""Reads checkpoints of float8 matrices: weight float8_e4m3fn [out, in], and a scale for each block, weight_scale_inv
[out / n, in / m], by which its numbers are multiplied, as DeepSeek V3 and Qwen3 FP8 have it (arXiv 2412.19437); or one
for all, weight_scale, as AutoFP8 does."""

from __future__ import annotations

from torch import Tensor

from specserve.checkpoint.layout import (
    SCALES,
    Config,
    Infos,
    Layout,
    Matrix,
    block_size,
    check,
    modules_with,
    parts_of,
    setting,
)
from specserve.errors import ModelError

NAME = "FP8"
_SCALES, _SCALE = "weight_scale_inv", "weight_scale"


def find(config: Config, infos: Infos) -> Layout:
    """Its matrices. Raises ModelError for settings that are not supported and tensors that contradict them."""
    setting(config, "fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    block = block_size(config, "weight_block_size")
    name = _SCALE if block is None else _SCALES
    excluded = [*(config.get("modules_to_not_convert") or []), *(config.get("ignored_layers") or [])]
    matrices = {}
    for module in modules_with(infos, name):
        if module in excluded:
            raise ModelError(f"{module} is quantised, and quantization_config says not.")
        matrices[f"{module}.weight"] = _matrix(module, name, block, infos)
    unused = frozenset(name for name in infos if name.endswith((".input_scale", ".k_scale", ".v_scale")))
    return Layout(matrices, unused, ("activations are rounded as the kernels do it, not as the checkpoint says",))


def _matrix(module: str, scale: str, block: tuple[int, int] | None, infos: Infos) -> Matrix:
    parts = parts_of(infos, module, ["weight", scale])
    check(infos, parts["weight"], ["F8_E4M3"])
    if len(shape := infos[parts["weight"]].shape) != 2:
        raise ModelError(f"{parts['weight']} has shape {shape}; it must be a matrix.")
    size = block or (shape[0], shape[1])
    blocks = -(-shape[0] // size[0]), -(-shape[1] // size[1])
    shapes = (blocks,) if block else ((), (1,), (1, 1))
    said = f"a weight_block_size of {list(block)}," if block else "no weight_block_size,"
    check(infos, parts[scale], SCALES, *shapes, why=f"quantization_config, {said}")

    def read(weight: Tensor, **scales: Tensor) -> Tensor:
        return dequantised(weight, scales[scale].view(blocks), size)

    words = f"blocks of {size[0]} x {size[1]}" if block else "one scale each"
    return Matrix((shape[0], shape[1]), f"float8 (E4M3), {words}", parts, read)


def dequantised(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float8 [out, in] times the scale of each block, float32."""
    numbers = weight.float()
    wide = scales.float().repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    for row in range(len(scales)):  # blocks of rows, one after the other: no second matrix
        numbers[row * block[0] : (row + 1) * block[0]] *= wide[row]
    return numbers
