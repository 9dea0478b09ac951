"""Reads the header of a GGUF file and maps its tensors: names, types, shapes, bytes.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length is checked against the file before
it is used, so a truncated or garbage file is an error in one line, found before any tensor is read.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
from numpy.typing import NDArray

from specserve.errors import ModelError
from specserve.files import map_file

Bytes = NDArray[np.uint8]

ALLOWED_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_VERSIONS = (2, 3)
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_MOST_HEADER_BYTES = 2**26  # of metadata and names of tensors; vocabularies of 262,144 tokens take 10 MB
_MOST_ENTRIES = 2**16  # tensors, and keys
_MOST_VALUES = 2**20  # of one key: vocabularies of 200,000 tokens have 450,000 merges


@dataclass(frozen=True, slots=True, eq=False)
class GGUFTensor:
    """One tensor. `shape` is outermost first, as PyTorch has it; `data` is its bytes, one row of blocks per row of the
    innermost dimension, memory-mapped, and begins at byte `begin`; `kind` is one of ALLOWED_TYPES."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: Bytes  # [rows, bytes per row]
    begin: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """The metadata by key (arrays of strings are lists, those of numbers numpy's) and the tensors by name, in file
    order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def require(self, key: str) -> Any:
        """The value of `key`; ModelError when the file has none."""
        if key not in self.metadata:
            raise ModelError(f"{self.path} has no metadata key {key!r}, which this architecture needs.")
        return self.metadata[key]

    def strings(self, key: str) -> list[str]:
        """The value of `key`, a list of strings; else ModelError."""
        values: list[str] = self.require(key)
        if not isinstance(values, list):
            raise ModelError(f"{self.path}: {key} is no list of strings.")
        return values

    def integers(self, key: str) -> list[int]:
        """The value of `key`, a list of whole numbers; else ModelError."""
        values = self.require(key)
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
            raise ModelError(f"{self.path}: {key} is no list of whole numbers.")
        whole: list[int] = values.tolist()
        return whole


def read(path: Path) -> GGUFFile:
    """The header of `path`, tensors mapped and not yet read.

    Raises ModelError for anything but a complete GGUF file (version 2 or 3, little-endian) of ALLOWED_TYPES.
    """
    cursor = _Cursor(path, _map(path))
    num_tensors, num_keys = cursor.preamble()
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.integer("<u4"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    tensors = _map_tensors(cursor, infos, metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
    return GGUFFile(path, metadata, tensors)


def _map(path: Path) -> Bytes:
    try:
        return np.frombuffer(map_file(path), np.uint8)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error


class _Cursor:
    """A read position that cannot pass the end of the file."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def refuse(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.path} is not a usable GGUF file: {problem} (byte {self.at:,} of {len(self.data):,}).")

    def need(self, num_bytes: int) -> None:
        if self.at + num_bytes > len(self.data):
            raise ModelError(
                f"{self.path} is truncated: its header reaches at least byte {self.at + num_bytes:,}, and the file has "
                f"{len(self.data):,} bytes. Get it again."
            )
        if self.at + num_bytes > _MOST_HEADER_BYTES:
            self.refuse(f"its header has more than {_MOST_HEADER_BYTES:,} bytes")

    def take(self, num_bytes: int) -> bytes:
        self.need(num_bytes)
        start = self.at
        self.at += num_bytes
        return self.data[start : self.at].tobytes()

    def integer(self, dtype: str) -> int:
        return int(np.frombuffer(self.take(np.dtype(dtype).itemsize), dtype)[0])

    def string(self) -> str:
        raw = self.take(self.integer("<u8"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.refuse("a string is not UTF-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.integer("<u4"), self.integer("<u8"))
        return self.scalars(kind, 1).tolist()[0]

    def array(self, kind: int, length: int) -> list[str] | NDArray[Any]:
        if length > _MOST_VALUES:
            self.refuse(f"a list has {length:,} values, and {_MOST_VALUES:,} are read")
        if kind != _STRING:
            return self.scalars(kind, length)
        self.need(8 * length)  # each string has a length of 8 bytes: a wild count fails here, not after an hour
        return [self.string() for _ in range(length)]

    def scalars(self, kind: int, length: int) -> NDArray[Any]:
        if kind not in _SCALARS:
            self.refuse(f"value type {kind} is unknown here")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize * length), dtype)

    def preamble(self) -> tuple[int, int]:
        """Check magic and version; the numbers of tensors and of metadata keys."""
        if self.data[:4].tobytes() != b"GGUF":
            self.refuse("it does not begin with 'GGUF'")
        _, version, num_tensors, num_keys = struct.unpack("<4sIQQ", self.take(24))
        if version not in _VERSIONS:
            order = "big-endian, or " if version & 0xFFFF == 0 else ""
            self.refuse(f"it is {order}of version {version}, and versions 2 and 3 are read")
        if max(num_tensors, num_keys) > _MOST_ENTRIES:
            self.refuse(f"it has {num_tensors:,} tensors and {num_keys:,} keys, and {_MOST_ENTRIES:,} are read of each")
        self.need(24 * num_tensors + 12 * num_keys)  # the least that so many entries take
        return num_tensors, num_keys


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    kind: str
    shape: tuple[int, ...]
    row_bytes: int
    offset: int  # from the start of the data section

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


def _tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string()
    num_dimensions = cursor.integer("<u4")
    if not 1 <= num_dimensions <= 4:
        cursor.refuse(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(reversed(cursor.scalars(10, num_dimensions).tolist()))  # stored innermost first
    if 0 in shape:
        cursor.refuse(f"tensor {name!r} has shape {shape}, which is empty")
    kind = _type_name(cursor, name, cursor.integer("<u4"))
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if shape[-1] % block:
        cursor.refuse(f"tensor {name!r} of type {kind} has rows of {shape[-1]}, not a multiple of {block}")
    return _TensorInfo(name, kind, shape, shape[-1] // block * block_bytes, cursor.integer("<u8"))


def _type_name(cursor: _Cursor, name: str, number: int) -> str:
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    kind = known.get(number, f"number {number}")
    if kind not in ALLOWED_TYPES:
        raise ModelError(
            f"{cursor.path}: tensor {name!r} has type {kind}, which is not supported. "
            f"Supported types: {', '.join(ALLOWED_TYPES)}."
        )
    return kind


def _map_tensors(cursor: _Cursor, infos: list[_TensorInfo], alignment: Any) -> dict[str, GGUFTensor]:
    if type(alignment) is not int or alignment < 1:
        cursor.refuse(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    _check_places(cursor, infos, start)
    tensors: dict[str, GGUFTensor] = {}
    for info in infos:
        if info.name in tensors:
            cursor.refuse(f"tensor {info.name!r} is listed twice")
        begin = start + info.offset
        data = cursor.data[begin : begin + info.num_bytes].reshape(info.num_rows, info.row_bytes)
        tensors[info.name] = GGUFTensor(info.name, info.kind, info.shape, data, begin)
    return tensors


def _check_places(cursor: _Cursor, infos: list[_TensorInfo], start: int) -> None:
    """Each tensor has bytes of its own: of those that share some there may be more than the file has bytes."""
    end, before = start, ""
    for info in sorted(infos, key=lambda info: info.offset):
        begin = start + info.offset
        if begin < end:
            cursor.refuse(f"tensor {info.name!r} begins at byte {begin:,}, within {before!r}")
        end, before = begin + info.num_bytes, info.name
        if end > len(cursor.data):
            raise ModelError(
                f"{cursor.path} is truncated: tensor {info.name!r} ends at byte {end:,}, and the file has "
                f"{len(cursor.data):,}. Get it again."
            )
