"""Turns tensors of a GGUF file into those of a Hugging Face checkpoint: what llama.cpp's converter does to rows is
undone here. Rows of blocks move whole, so that quantised tensors are never expanded for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.checkpoint.gguf_file import Bytes, GGUFFile, GGUFTensor
from specserve.checkpoint.gguf_index import StoredTensor
from specserve.checkpoint.gguf_metadata import KEPT, dequantize
from specserve.errors import ModelError

_CHUNK_BYTES = 32 << 20
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class Heads(NamedTuple):
    """Numbers of query heads and of those of keys and values, and features of each."""

    num: int
    num_kv: int
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One tensor as it will be written, under its name: some rows of `source`, as `order` lists them (None: all)."""

    name: str
    source: GGUFTensor
    shape: tuple[int, ...]
    order: NDArray[np.intp] | None = None
    offset: float = 0.0  # to subtract
    is_transposed: bool = False  # a matrix, which is to be written so

    def __post_init__(self) -> None:
        if self.order is not None and len(self.source.shape) == 1 and self.source.kind not in _ITEM_BYTES:
            raise ModelError(f"Tensor {self.source.name!r} has blocks of type {self.source.kind} across its rows.")

    @property
    def dtype(self) -> str:
        return self.source.kind if self.source.kind in KEPT and not self.offset else "F32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def placed(self) -> StoredTensor:
        """Where it lies in the file, for an index."""
        order = None if self.order is None else tuple(self.order.tolist())
        place = self.source.shape, self.source.begin, order, self.offset, self.is_transposed
        return StoredTensor(self.name, self.source.kind, self.shape, *place)

    def pieces(self) -> Iterator[bytes]:
        """The bytes to write, some rows at a time; at once for a matrix that is transposed."""
        data, order = self.source.data, self.order
        if order is not None and len(self.source.shape) == 1:
            data = data.reshape(self.source.shape[0], -1)  # a vector is one row in the file
        num_rows = len(data) if order is None else len(order)
        step = num_rows if self.is_transposed else max(1, _CHUNK_BYTES // max(1, self.num_bytes // num_rows))
        for start in range(0, num_rows, step):
            rows = data[start : start + step] if order is None else data[order[start : start + step]]
            values = rows.view(np.uint16) if self.dtype in KEPT else self._float32(rows)
            yield (values.T if self.is_transposed else values).tobytes()

    def _float32(self, rows: Bytes) -> NDArray[np.float32]:
        values = dequantize(rows, self.source.kind)
        return values - np.float32(self.offset) if self.offset else values


# What becomes of a tensor of a layer: all of those it is in the checkpoint, named within the layer and without
# ".weight" and ".bias", which are put behind.
Arrange = Callable[[GGUFFile, Heads, GGUFTensor], list[Stored]]


def plain(name: str) -> Arrange:
    return lambda file, heads, tensor: [Stored(name, tensor, tensor.shape)]


def transposed(name: str) -> Arrange:
    """A matrix that the checkpoint has as [in, out]; its bias is as it is."""

    def arrange(file: GGUFFile, heads: Heads, tensor: GGUFTensor) -> list[Stored]:
        return [Stored(name, tensor, tensor.shape[::-1], is_transposed=len(tensor.shape) == 2)]

    return arrange


def halves(name: str, *, of_keys: bool = False) -> Arrange:
    """Rows of queries or keys, which llama.cpp has by (pair, half) inside each head and the checkpoint by (half,
    pair)."""

    def arrange(file: GGUFFile, heads: Heads, tensor: GGUFTensor) -> list[Stored]:
        number, rows = heads.num_kv if of_keys else heads.num, tensor.shape[0]
        if rows % (2 * number):
            raise ModelError(f"{file.path}: {tensor.name!r} has {rows} rows, which {number} heads cannot share.")
        order = np.arange(rows).reshape(number, -1, 2).swapaxes(1, 2).reshape(-1)
        return [Stored(name, tensor, tensor.shape, order)]

    return arrange


def by_head(name: str) -> Arrange:
    """Rows of all queries, all keys and all values, which the checkpoint has by KV head: its query heads, its key head,
    its value head."""

    def arrange(file: GGUFFile, heads: Heads, tensor: GGUFTensor) -> list[Stored]:
        q, k, v = np.split(np.arange(tensor.shape[0]), _qkv_starts(file, heads, tensor))
        shared = [part.reshape(heads.num_kv, -1, heads.dim) for part in (q, k, v)]
        return [Stored(name, tensor, tensor.shape, np.concatenate(shared, axis=1).reshape(-1))]

    return arrange


def split_qkv(*names: str) -> Arrange:
    """Rows of all queries, all keys and all values, which the checkpoint has as tensors of their own."""

    def arrange(file: GGUFFile, heads: Heads, tensor: GGUFTensor) -> list[Stored]:
        parts = np.split(np.arange(tensor.shape[0]), _qkv_starts(file, heads, tensor))
        shapes = [(len(part), *tensor.shape[1:]) for part in parts]
        return [Stored(*each) for each in zip(names, [tensor] * 3, shapes, parts, strict=True)]

    return arrange


def _qkv_starts(file: GGUFFile, heads: Heads, tensor: GGUFTensor) -> list[int]:
    """Where keys and values begin."""
    q, kv = heads.num * heads.dim, heads.num_kv * heads.dim
    if tensor.shape[0] != q + 2 * kv or heads.num % heads.num_kv:
        raise ModelError(
            f"{file.path}: {tensor.name!r} has {tensor.shape[0]} rows, and {heads.num} heads of queries and "
            f"{heads.num_kv} of keys and values with {heads.dim} features have {q + 2 * kv}."
        )
    return [q, q + kv]


def experts(name: str) -> Arrange:
    """[experts, rows, columns], which the checkpoint has as tensors of their own: `name` with the number of each."""

    def arrange(file: GGUFFile, heads: Heads, tensor: GGUFTensor) -> list[Stored]:
        if len(tensor.shape) != 3:
            raise ModelError(f"{file.path}: {tensor.name!r} has shape {tensor.shape}; experts have three dimensions.")
        number, *own = tensor.shape
        rows = np.arange(number * own[0]).reshape(number, own[0])
        return [Stored(name.format(i), tensor, tuple(own), rows[i]) for i in range(number)]

    return arrange


def row(name: str) -> Arrange:
    """One row of a matrix, which a GGUF file has as a vector."""
    return lambda file, heads, tensor: [Stored(name, tensor, (1, tensor.shape[-1]))]


def named(parts: Sequence[Stored], prefix: str, suffix: str, offset: float) -> list[Stored]:
    """The same under their full names."""
    return [replace(part, name=f"{prefix}{part.name}.{suffix}", offset=offset) for part in parts]
