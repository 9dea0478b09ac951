"""Numbers of the tensors in a GGUF file that an index tells of. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specserve.checkpoint.gguf_index import StoredTensor

Bytes = NDArray[np.uint8]

_CHUNK_BYTES = 1 << 20  # of float32, which stay in a core's cache
_Q8_0_BYTES = 34  # of a block: a half, which is its scale, and 32 whole numbers


def numbers(data: Bytes, tensor: StoredTensor) -> NDArray[Any]:
    """A tensor of a file's `data`: float32, float16, or the bits of bfloat16 as int16."""
    rows = data[tensor.begin : tensor.begin + tensor.stored_bytes].reshape(tensor.num_rows, tensor.row_bytes)
    order = None if tensor.order is None else np.array(tensor.order, np.intp)
    num_rows = len(rows) if order is None else len(order)
    kind = {"F32": np.float32, "F16": np.float16, "BF16": np.int16}[tensor.dtype]
    made = np.empty((num_rows, -(-int(np.prod(tensor.shape)) // num_rows)), kind)
    step = max(1, _CHUNK_BYTES // (4 * made.shape[1]))
    for start in range(0, num_rows, step):
        part = rows[start : start + step] if order is None else rows[order[start : start + step]]
        if tensor.dtype == "F32":
            values = _floats(part, tensor.kind)
            made[start : start + step] = values - np.float32(tensor.minus) if tensor.minus else values
        else:
            made[start : start + step] = np.ascontiguousarray(part).view(kind)
    return np.ascontiguousarray(made.T if tensor.is_transposed else made).reshape(tensor.shape)


def _floats(rows: Bytes, kind: str) -> NDArray[np.float32]:
    if kind == "F32":
        return np.ascontiguousarray(rows).view("<f4")
    if kind == "Q8_0":  # of most embeddings, which every start reads
        blocks = np.ascontiguousarray(rows).reshape(-1, _Q8_0_BYTES)
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        return (blocks[:, 2:].view(np.int8) * scales).reshape(len(rows), -1)
    import gguf  # here: it takes 0.3 s, and a start whose weights are packed needs it for few types

    values: NDArray[np.float32] = gguf.dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind])
    return values
