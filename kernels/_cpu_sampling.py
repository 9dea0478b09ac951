"""What the native kernels do with logits once a step has them: the arrays and addresses for kernels/cpu/verify.h."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import specserve.kernels._native as _native
from specserve.config import VERIFICATIONS
from specserve.ops import DraftArrays, RowScores, Verified, fraction_bits
from specserve.types import Ids


def verify(
    verifier: _native.Verifier,
    scores: Tensor,
    best: Tensor,
    drafts: DraftArrays,
    hashed: Tensor,
    masks: Ids | None,
    verification: str,
) -> Verified:
    """As Ops.verify."""
    assert hashed.is_contiguous() and (masks is None or masks.flags.c_contiguous)
    assert scores.dtype == torch.float32 and scores.stride(1) == 1 and best.is_contiguous()
    num_seqs, num_rows = len(drafts.starts) - 1, drafts.rows.shape[1]
    q = [(seq, law.to(torch.float64).contiguous()) for seq, law in drafts.q.items() if verification != "coupled"]
    out = np.zeros(2 * num_rows + num_seqs, np.int64)
    verifier.verify(
        scores.data_ptr(), scores.stride(0), scores.shape[1], best.data_ptr(), hashed.data_ptr(),
        0 if masks is None else masks.ctypes.data, drafts.starts, drafts.rows, drafts.seqs, drafts.laws,
        [(seq, law.data_ptr()) for seq, law in q], VERIFICATIONS.index(verification), out,
    )  # fmt: skip
    return Verified(out[:num_rows], out[num_rows : 2 * num_rows], out[2 * num_rows :])


def score(
    verifier: _native.Verifier, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int
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
    verifier.score(
        logits.data_ptr(), logits.stride(0), vocab, n, rows.ctypes.data, tokens.ctypes.data, k,
        2.0 ** fraction_bits(vocab), found.peaks.ctypes.data, found.totals.ctypes.data, found.ranks.ctypes.data,
        found.best.ctypes.data, found.logits.ctypes.data,
    )  # fmt: skip
    return found
