"""What the native kernels do with logits once a step has them: the arrays and addresses for kernels/cpu/sample.h and
score.h."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specserve.kernels._native as _native
from specserve.ops import RowScores, SamplingArrays, fraction_bits
from specserve.types import Ids


def sample(
    sampler: _native.RowSampler, scores: Tensor, sampling: SamplingArrays, hashed: Tensor, masks: Ids | None
) -> NDArray[np.int64]:
    """As Ops.sample."""
    assert hashed.is_contiguous() and (masks is None or masks.flags.c_contiguous)
    assert scores.dtype == torch.float32 and scores.stride(1) == 1
    p = sampling
    arrays = [np.ascontiguousarray(x) for x in (p.rows, p.temperature, p.min_p, p.top_p, p.top_k, p.keys)]
    rows, temperature, min_p, top_p, top_k, keys = (array.ctypes.data for array in arrays)
    out = np.empty(len(p.rows), np.int64)
    sampler.sample(
        scores.data_ptr(), scores.stride(0), scores.shape[1], len(out), rows, temperature, min_p, top_p, top_k, keys,
        hashed.data_ptr(), 0 if masks is None else masks.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    return out


def score(
    sampler: _native.RowSampler, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int
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
    sampler.score(
        logits.data_ptr(), logits.stride(0), vocab, n, rows.ctypes.data, tokens.ctypes.data, k,
        2.0 ** fraction_bits(vocab), found.peaks.ctypes.data, found.totals.ctypes.data, found.ranks.ctypes.data,
        found.best.ctypes.data, found.logits.ctypes.data,
    )  # fmt: skip
    return found
