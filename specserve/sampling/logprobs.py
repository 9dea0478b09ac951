"""How likely the model itself found a token: log-probability and rank from raw logits, before any processing."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np
from torch import Tensor

from specserve.ops import Ops, fraction_bits
from specserve.types import TokenLogprobs


def token_logprobs(ops: Ops, logits: Tensor, rows: Many[int], tokens: Many[int], ks: Many[int]) -> list[TokenLogprobs]:
    """Log-probability (float32), rank and the ks[i] best of tokens[i] under logits[rows[i]]; logits float [all rows,
    vocab]. Equals share the better rank; among equals the lower id comes first, as in greedy sampling. A row that is
    not finite says nothing: its token is impossible, the last in rank, and there are no best."""
    vocab = logits.shape[1]
    found = ops.score(logits, np.asarray(rows, np.int64), np.asarray(tokens, np.int64), min(max(ks, default=0), vocab))
    scale = 2.0 ** fraction_bits(vocab)
    logs = np.array([math.log(total / scale) if total > 0 else 0.0 for total in found.totals.tolist()])
    with np.errstate(invalid="ignore"):  # rows that are not finite
        values = (found.logits.astype(np.float64) - found.peaks[:, None] - logs[:, None]).astype(np.float32)
    return [
        TokenLogprobs(token, own, rank, dict(zip(best[:k], others, strict=False)))
        if is_usable
        else TokenLogprobs(token, -math.inf, vocab, {})
        for token, k, rank, best, (own, *others), is_usable in zip(
            tokens,
            ks,
            found.ranks.tolist(),
            found.best.tolist(),
            values.tolist(),
            np.isfinite(found.peaks).tolist(),
            strict=True,
        )
    ]
