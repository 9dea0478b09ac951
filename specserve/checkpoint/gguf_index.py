"""The index beside a GGUF file: where each tensor of a checkpoint lies in it and how its rows are arranged, so that a
start neither parses the file's header nor copies its weights. Imports neither torch nor numpy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specserve.errors import ModelError
from specserve.files import read_json

FILE, INDEX = "model.gguf", "model.gguf.json"
FLOATS = ("F32", "F16", "BF16")
# Numbers and bytes of a block of each type, https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
_BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22)} | {
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
_MOST_BYTES = 2**28
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of this `shape`: of one in the file, at byte `begin` with the shape `source`, the rows that `order`
    lists (None: all). Of every number `minus` is to be subtracted; a transposed one is a matrix to be turned."""

    name: str
    kind: str
    shape: tuple[int, ...]
    source: tuple[int, ...]
    begin: int
    order: tuple[int, ...] | None = None
    minus: float = 0.0
    is_transposed: bool = False

    @property
    def dtype(self) -> str:
        """As safetensors spell it: halves keep their bytes, everything else becomes float32."""
        return self.kind if self.kind in FLOATS and not self.minus else "F32"

    @property
    def num_rows(self) -> int:
        """In the file; a vector whose numbers are arranged has one in each."""
        is_vector = len(self.source) == 1 and self.order is not None
        return self.source[0] if is_vector else math.prod(self.source[:-1])

    @property
    def row_bytes(self) -> int:
        return self.stored_bytes // self.num_rows

    @property
    def stored_bytes(self) -> int:
        """Of the whole tensor in the file."""
        numbers, num_bytes = _BLOCKS[self.kind]
        return math.prod(self.source) // numbers * num_bytes

    @property
    def num_bytes(self) -> int:
        """Of its own rows."""
        return self.row_bytes * (self.num_rows if self.order is None else len(self.order))


def write_index(folder: Path, tensors: Iterable[StoredTensor]) -> None:
    """Beside FILE, which is there. Orders that several tensors have, as those of all layers, are written once."""
    orders: dict[tuple[int, ...], int] = {}
    entries = []
    for tensor in tensors:
        order = tensor.order
        entry = asdict(tensor)
        if order is not None and order == tuple(range(order[0], order[0] + len(order))):
            entry["order"] = [order[0], len(order)]
        elif order is not None:
            entry["order"] = orders.setdefault(order, len(orders))
        entries.append(entry)
    index = {"size": (folder / FILE).stat().st_size, "orders": list(orders), "tensors": entries}
    (folder / INDEX).write_text(json.dumps(index), "utf-8")


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor, by name. Raises ModelError for an index that is damaged, and a file that is not of its size."""
    path, file = folder / INDEX, folder / FILE
    try:
        values = read_json(path, _MOST_BYTES)
        orders = [tuple(order) for order in values["orders"]]
        tensors = [_tensor(entry, orders) for entry in values["tensors"]]
        expected = int(values["size"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} is no index of a GGUF file. Remove {folder}; it is made again.") from error
    try:
        size = file.stat().st_size
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}. Is the GGUF file still there?") from error
    if size != expected:
        raise ModelError(f"{file} should have {expected:,} bytes and has {size:,}. Get it again.")
    if strange := [tensor.name for tensor in tensors if tensor.begin + tensor.stored_bytes > size]:
        raise ModelError(f"{path} places {strange[0]!r} after the end of the file.")
    return {tensor.name: tensor for tensor in tensors}


def _tensor(entry: dict[str, Any], orders: list[tuple[int, ...]]) -> StoredTensor:
    """Raises what a wrong value raises."""
    order = entry["order"]
    if isinstance(order, list):
        start, count = order
        if count > math.prod(entry["source"]):  # before they are made
            raise ValueError("it has more rows than the file")
        order = tuple(range(start, start + count))
    elif order is not None:
        order = orders[order]
    shapes = {key: tuple(entry[key]) for key in ("shape", "source")}
    tensor = StoredTensor(**entry | shapes | {"order": order})
    whole = (*tensor.shape, *tensor.source, tensor.begin, *(order or ()))
    is_whole = all(type(number) is int and number >= 0 for number in whole)
    if not is_whole or not all(0 < len(shape) <= _MOST_DIMENSIONS and 0 not in shape for shape in shapes.values()):
        raise ValueError("a size is wrong")
    if tensor.source[-1] % _BLOCKS[tensor.kind][0] or (len(tensor.source) == 1 and order and tensor.kind not in FLOATS):
        raise ValueError("its rows are no whole blocks")
    num_rows = tensor.num_rows if order is None else len(order)
    if max(order or (0,)) >= tensor.num_rows or num_rows * math.prod(tensor.source) // tensor.num_rows != math.prod(
        tensor.shape
    ):
        raise ValueError("its rows are others than the file's")
    if not re.fullmatch(r"[\w.]+", tensor.name) or type(tensor.minus) not in (float, int):
        raise ValueError("a value is of the wrong kind")
    return tensor
