"""Tiny checkpoints in the layouts of GPTQ, AWQ, compressed-tensors and FP8, written bit by bit from their published
descriptions, and what their numbers are by definition, one by one. Nothing here is specserve's own unpacking."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.testing import write_tiny_model

Tensors = dict[str, Tensor]
SPREAD = 0.2  # of a matrix's numbers, about that of a layer of 64 inputs


def to_words(numbers: list[int], bits: int) -> list[int]:
    """A stream of bits in int32 words, the lowest first."""
    stream = sum(number << (bits * i) for i, number in enumerate(numbers))
    words = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(numbers) * bits // 32))]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def numbers_in(words: list[int], count: int, bits: int) -> list[int]:
    stream = sum((word & 0xFFFFFFFF) << (32 * at) for at, word in enumerate(words))
    return [(stream >> (bits * i)) & (2**bits - 1) for i in range(count)]


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def random_ints(shape: tuple[int, ...], low: int, high: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def random_scales(shape: tuple[int, ...], bits: int, seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    size = 4 * SPREAD / 2**bits
    return (size * (0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(seed)))).to(dtype)


def one_by_one(number: Callable[[int, int], float], shape: tuple[int, int]) -> Tensor:
    """Of each output and input, float32: as exact as that is."""
    return torch.tensor([[number(o, i) for i in range(shape[1])] for o in range(shape[0])], dtype=torch.float32)


# GPTQ


@dataclass(frozen=True)
class Gptq:
    bits: int = 4
    group: int = 32
    act_order: bool = False
    version: str | None = None  # of the format
    symmetric: bool = False
    has_order: bool = True  # whether g_idx is stored
    config: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        said = {"bits": self.bits, "group_size": self.group, "desc_act": self.act_order, "sym": self.symmetric}
        version = {} if self.version is None else {"checkpoint_format": self.version}
        return {"quant_method": "gptq", **said, **version, **self.config}

    def tensors(self, shape: tuple[int, int], seed: int) -> Tensors:
        outputs, inputs = shape
        groups = 1 if self.group == -1 else -(-inputs // self.group)
        ints = random_ints((inputs, outputs), 0, 2**self.bits, seed)
        # Of version 1 no zero is 0: what that means is another test's.
        zeros = random_ints((groups, outputs), 1, 2**self.bits, seed + 1)
        if self.symmetric:
            zeros = torch.full_like(zeros, 2 ** (self.bits - 1))
        order = torch.arange(inputs) // (inputs if self.group == -1 else self.group)
        if self.act_order:
            order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        stored = zeros - (0 if self.version == "gptq_v2" else 1)
        columns = [to_words(column, self.bits) for column in ints.T.tolist()]
        tensors = {
            "qweight": int32(columns).T.contiguous(),
            "qzeros": int32([to_words(row, self.bits) for row in stored.tolist()]),
            "scales": random_scales((groups, outputs), self.bits, seed + 2),
        }
        return tensors | ({"g_idx": order.int()} if self.has_order else {})

    def numbers(self, tensors: Tensors, shape: tuple[int, int]) -> Tensor:
        outputs, inputs = shape
        qweight, qzeros, scales = (tensors[name].tolist() for name in ("qweight", "qzeros", "scales"))
        order = [i // (inputs if self.group == -1 else self.group) for i in range(inputs)]
        order = tensors["g_idx"].tolist() if "g_idx" in tensors else order
        less = 0 if self.version == "gptq_v2" else 1
        zeros = [numbers_in(row, outputs, self.bits) for row in qzeros]
        columns = [numbers_in([row[o] for row in qweight], inputs, self.bits) for o in range(outputs)]

        def number(o: int, i: int) -> float:
            return float((columns[o][i] - (zeros[order[i]][o] + less)) * scales[order[i]][o])

        return one_by_one(number, shape)


# AWQ


@dataclass(frozen=True)
class Awq:
    group: int = 32
    config: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        said = {"bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        return {"quant_method": "awq", **said, **self.config}

    def tensors(self, shape: tuple[int, int], seed: int) -> Tensors:
        outputs, inputs = shape
        groups = 1 if self.group == -1 else inputs // self.group
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # the output of each nibble

        def packed(rows: list[list[int]]) -> Tensor:
            return int32(
                [to_words([row[8 * (i // 8) + order[i % 8]] for i in range(len(row))], bits=4) for row in rows]
            )

        return {
            "qweight": packed(random_ints((inputs, outputs), 0, 16, seed).tolist()),
            "qzeros": packed(random_ints((groups, outputs), 0, 16, seed + 1).tolist()),
            "scales": random_scales((groups, outputs), 4, seed + 2),
        }

    def numbers(self, tensors: Tensors, shape: tuple[int, int]) -> Tensor:
        nibble = [0, 4, 1, 5, 2, 6, 3, 7]  # of each output
        group = shape[1] if self.group == -1 else self.group
        stored = {name: tensor.tolist() for name, tensor in tensors.items()}

        def at(name: str, row: int, o: int) -> int:
            return int(stored[name][row][o // 8] >> (4 * nibble[o % 8])) & 15

        def number(o: int, i: int) -> float:
            return float((at("qweight", i, o) - at("qzeros", i // group, o)) * stored["scales"][i // group][o])

        return one_by_one(number, shape)


# compressed-tensors


@dataclass(frozen=True)
class Compressed:
    """`form` is the format of its only group of modules, whose weights have these settings."""

    form: str = "pack-quantized"
    bits: int = 4
    strategy: str = "group"
    group: int = 32
    symmetric: bool = True
    act_order: bool = False
    block: tuple[int, int] = (32, 16)
    config: Mapping[str, Any] = field(default_factory=dict)

    def weights(self) -> dict[str, Any]:
        said: dict[str, Any] = {"num_bits": self.bits, "strategy": self.strategy, "symmetric": self.symmetric}
        said["type"] = "float" if self.form in ("float-quantized", "naive-quantized", "mxfp4-pack-quantized") else "int"
        said |= {"group_size": self.group} if self.strategy == "group" else {}
        said |= {"block_structure": list(self.block)} if self.strategy == "block" else {}
        return said | ({"actorder": "group"} if self.act_order else {})

    def settings(self) -> dict[str, Any]:
        groups = {"group_0": {"targets": ["Linear"], "weights": self.weights(), "input_activations": None}}
        said = {"quant_method": "compressed-tensors", "format": self.form, "quantization_status": "compressed"}
        return {**said, "config_groups": groups, "ignore": ["lm_head"], **self.config}

    @property
    def offset(self) -> int:
        return 2 ** (self.bits - 1)

    def _scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        outputs, inputs = shape
        return {
            "tensor": (1,),
            "channel": (outputs, 1),
            "group": (outputs, -(-inputs // self.group)),
            "block": (-(-outputs // self.block[0]), -(-inputs // self.block[1])),
        }[self.strategy]

    def tensors(self, shape: tuple[int, int], seed: int) -> Tensors:
        outputs, inputs = shape
        if self.form == "mxfp4-pack-quantized":
            exponents = random_ints((outputs, inputs // 32), 121, 125, seed)
            packed = random_ints((outputs, inputs // 2), 0, 256, seed + 1)
            return {"weight_packed": packed.to(torch.uint8), "weight_scale": exponents.to(torch.uint8)}
        scales = random_scales(self._scale_shape(shape), self.bits, seed + 2, torch.bfloat16)
        ints = random_ints(shape, -self.offset, self.offset, seed)
        zeros = random_ints(tuple(scales.shape), -self.offset, self.offset, seed + 1)
        if self.form in ("float-quantized", "naive-quantized"):
            floats = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(torch.float8_e4m3fn)
            return {"weight": floats, "weight_scale": scales}
        if self.form == "int-quantized":
            own = {"weight": ints.char(), "weight_scale": scales}
            return own | ({} if self.symmetric else {"weight_zero_point": zeros.char()})
        tensors = {
            "weight_packed": int32([to_words([n + self.offset for n in row], self.bits) for row in ints.tolist()]),
            "weight_scale": scales,
            "weight_shape": torch.tensor(shape),
        }
        if not self.symmetric:
            columns = [to_words([n + self.offset for n in column], self.bits) for column in zeros.T.tolist()]
            tensors["weight_zero_point"] = int32(columns).T.contiguous()
        if self.act_order:
            order = torch.arange(inputs) // self.group
            tensors["weight_g_idx"] = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))].int()
        return tensors

    def numbers(self, tensors: Tensors, shape: tuple[int, int]) -> Tensor:
        outputs, inputs = shape
        group = self.group if self.strategy == "group" else inputs
        order = [i // group for i in range(inputs)]
        order = tensors["weight_g_idx"].tolist() if "weight_g_idx" in tensors else order
        exponents, scales = tensors["weight_scale"].dtype == torch.uint8, tensors["weight_scale"].tolist()
        stored = tensors["weight_packed" if "weight_packed" in tensors else "weight"].tolist()
        rows = [self._row(row, inputs) for row in stored]
        zeros = self._zeros(tensors, outputs)

        def number(o: int, i: int) -> float:
            if self.strategy == "tensor":
                scale, zero = scales[0], zeros and zeros[0]
            elif self.strategy == "block":
                scale, zero = scales[o // self.block[0]][i // self.block[1]], 0
            else:
                scale, zero = scales[o][order[i]], zeros and zeros[o][order[i]]
            return float((rows[o][i] - (zero or 0)) * (2.0 ** (scale - 127) if exponents else scale))

        return one_by_one(number, shape)

    def _row(self, stored: list[Any], inputs: int) -> list[Any]:
        if self.form == "pack-quantized":
            return [number - self.offset for number in numbers_in(stored, inputs, self.bits)]
        if self.form == "mxfp4-pack-quantized":
            half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
            codes = [(stored[i // 2] >> (4 * (i % 2))) & 15 for i in range(inputs)]
            return [-half[code - 8] if code >= 8 else half[code] for code in codes]
        return stored

    def _zeros(self, tensors: Tensors, outputs: int) -> list[Any]:
        """Of each output and group; none where there are none."""
        stored = tensors.get("weight_zero_point")
        if stored is None or self.form == "int-quantized":
            return [] if stored is None else stored.tolist()
        groups = [numbers_in(column, outputs, self.bits) for column in stored.T.tolist()]
        return [[group[o] - self.offset for group in groups] for o in range(outputs)]


@dataclass(frozen=True)
class Float8:
    block: tuple[int, int] | None = (32, 32)  # None: one scale
    config: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        block = {} if self.block is None else {"weight_block_size": list(self.block)}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", **block, **self.config}

    def tensors(self, shape: tuple[int, int], seed: int) -> Tensors:
        floats = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50
        weight = {"weight": floats.to(torch.float8_e4m3fn)}
        if self.block is None:
            return weight | {"weight_scale": random_scales((), 8, seed, torch.float32)}
        blocks = -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])
        return weight | {"weight_scale_inv": random_scales(blocks, 8, seed, torch.float32)}

    def numbers(self, tensors: Tensors, shape: tuple[int, int]) -> Tensor:
        stored, block = tensors["weight"].float().tolist(), self.block
        if block is None:
            scale = float(tensors["weight_scale"])
            return one_by_one(lambda o, i: stored[o][i] * scale, shape)
        scales = tensors["weight_scale_inv"].tolist()
        return one_by_one(lambda o, i: stored[o][i] * scales[o // block[0]][i // block[1]], shape)


Layout = Gptq | Awq | Compressed | Float8


def write_quantized(
    folder: Path,
    layout: Layout,
    architecture: str = "llama",
    *,
    modules: Callable[[str], bool] = lambda module: module.endswith("_proj"),
    others: Mapping[str, Layout] | None = None,
    **overrides: Any,
) -> Tensors:
    """A tiny model whose `modules` are stored in `layout`, or in that of `others` whose name theirs ends with -> all of
    its numbers by the names of an unquantised checkpoint, float32."""
    write_tiny_model(folder, architecture, seed=1, **{"num_hidden_layers": 1, **overrides})
    return quantize(folder, layout, modules, others)


def quantize(
    folder: Path, layout: Layout, modules: Callable[[str], bool], others: Mapping[str, Layout] | None = None
) -> Tensors:
    """As write_quantized, of a model that is there."""
    plain, stored = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for seed, (name, weight) in enumerate(list(plain.items())):
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or weight.dim() != 2 or not modules(module):
            stored[name] = weight
            continue
        own = next((each for end, each in (others or {}).items() if module.endswith(end)), layout)
        shape = (weight.shape[0], weight.shape[1])
        parts = own.tensors(shape, 10 * seed)
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        plain[name] = own.numbers(parts, shape)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=layout.settings())
    return plain


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), "utf-8")
