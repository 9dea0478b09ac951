"""What the native kernels do with logits once a step has them: draws, the best of some tokens, and how likely tokens
are. Knows shapes and memory; the arithmetic is in kernels/cpu/draw.h and score.h."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specserve.kernels._native as _native
from specserve.ops import Laws, RowScores, fraction_bits
from specserve.types import Ids


def draw(
    drawer: _native.Drawer,
    scores: Tensor,
    rows: NDArray[np.int64],
    laws: Laws,
    keys: Tensor,
    hashed: Tensor,
    masks: Ids | None,
) -> Tensor:
    """As Ops.draw."""
    is_packed = keys.is_contiguous() and hashed.is_contiguous() and (masks is None or masks.flags.c_contiguous)
    assert is_packed and scores.dtype == torch.float32 and scores.stride(1) == 1
    out = torch.empty(len(rows), dtype=torch.int64)
    arrays = [np.ascontiguousarray(x) for x in (rows, laws.temperature, laws.min_p, laws.top_p, laws.top_k)]
    at, temperature, min_p, top_p, top_k = (array.ctypes.data for array in arrays)
    drawer.run(
        scores.data_ptr(), scores.stride(0), scores.shape[1], len(rows), at, temperature, min_p, top_p, top_k,
        keys.data_ptr(), hashed.data_ptr(), 0 if masks is None else masks.ctypes.data, out.data_ptr(),
    )  # fmt: skip
    return out


def best_within(drawer: _native.Drawer, scores: Tensor, row: int, masks: Ids) -> int:
    """As Ops.best_within."""
    assert masks.flags.c_contiguous and scores.dtype == torch.float32 and scores.stride(1) == 1
    at = scores.data_ptr() + 4 * row * scores.stride(0), scores.shape[1], masks.ctypes.data + row * masks.strides[0]
    return drawer.best_within(*at)


def score(
    drawer: _native.Drawer, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int
) -> RowScores:
    """As Ops.score."""
    n, vocab = len(rows), logits.shape[1]
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and 0 <= k <= vocab
    assert rows.dtype == tokens.dtype == np.int64 and len(tokens) == n
    found = RowScores(
        np.zeros(n, np.float32),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros((n, k), np.int64),
        np.zeros((n, 1 + k), np.float32),
    )
    rows, tokens = np.ascontiguousarray(rows), np.ascontiguousarray(tokens)
    drawer.score(
        logits.data_ptr(), logits.stride(0), vocab, n, rows.ctypes.data, tokens.ctypes.data, k,
        2.0 ** fraction_bits(vocab), found.peaks.ctypes.data, found.totals.ctypes.data, found.ranks.ctypes.data,
        found.best.ctypes.data, found.logits.ctypes.data,
    )  # fmt: skip
    return found
