"""Knows how likely the model itself found a token: from raw logits, before any processing. Knows nothing of how the
token was chosen.

Native kernels and torch give the same bits, on every device: e^x is made of operations that round alike everywhere, and
its sum is one of integers, which has no order. Torch goes over slices of a bounded size, whatever the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import RowScores, fraction_bits
from specserve.types import TokenLogprobs

_SLICE = 2**18  # logits that torch works on at a time: 2 MiB for each of its intermediate results
_SLICE_ELSEWHERE = 2**22  # on devices whose calls cost more than their work
_ROUNDER = 1.5 * 2.0**52  # added to a number below 2^51 and taken away again it leaves that, rounded to even
_LOG2_E = float.fromhex("0x1.71547652b82fep0")
_LN_2 = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")  # high part and the rest
_TAYLOR = [1 / math.factorial(n) for n in range(11, -1, -1)]


class Native(Protocol):
    """What of ops can score."""

    def score(self, logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int) -> RowScores: ...


def token_logprobs(
    logits: Tensor, rows: Many[int], tokens: Many[int], ks: Many[int], native: Native | None = None
) -> list[TokenLogprobs]:
    """Log-probability (float32), rank and the ks[i] best of tokens[i] under logits[rows[i]]; logits float [all rows,
    vocab]. Equals share the better rank; among equals the lower id comes first, as in greedy sampling. A row that is
    not finite says nothing: its token is impossible, the last in rank, and there are no best."""
    vocab = logits.shape[1]
    score = _score if native is None else native.score
    found = score(logits, np.asarray(rows, np.int64), np.asarray(tokens, np.int64), min(max(ks, default=0), vocab))
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


def _score(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int) -> RowScores:
    """As ops.score."""
    most = max(1, (_SLICE if logits.is_cpu else _SLICE_ELSEWHERE) // logits.shape[1])
    at, chosen = (torch.from_numpy(ids).to(logits.device) for ids in (rows, tokens))
    slices = [slice(first, first + most) for first in range(0, max(1, len(rows)), most)]
    parts = [_score_slice(logits[at[some]].float(), chosen[some, None], k) for some in slices]
    peaks, totals, ranks, best, own = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return RowScores(peaks, totals, ranks, best, own)


def _score_slice(raw: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, ...]:
    """The fields of RowScores; raw float32 [n, vocab], chosen int64 [n, 1]."""
    vocab = raw.shape[1]
    peaks, best = raw.amax(-1), _best(raw, k)
    own = raw.gather(1, torch.cat((chosen, best), 1))
    ranks = 1 + (raw > own[:, :1]).sum(-1)
    weights = _exp_below_zero(raw.double().sub_(peaks.double()[:, None]))
    return peaks, weights.mul_(2.0 ** fraction_bits(vocab)).round_().long().sum(-1), ranks, best, own


def _exp_below_zero(x: Tensor) -> Tensor:
    """e^x of float64 that is not above 0, to 1e-14; x is overwritten. Below e^-64 it stays there: nobody looks so far
    down. One call, one rounding: no operation here may be fused with the next."""
    x.clamp_(min=-64.0)
    power = (x * _LOG2_E).add_(_ROUNDER).sub_(_ROUNDER)
    for part in _LN_2:
        x.sub_(power * part)
    total = torch.full_like(x, _TAYLOR[0])
    for term in itertools.islice(_TAYLOR, 1, None):
        total.mul_(x).add_(term)
    return total.mul_(((power.long() + 1023) << 52).view(torch.float64))


def _best(logits: Tensor, k: int) -> Tensor:
    """Ids of the k best, best first, int64 [rows, k]. torch.topk leaves the order of equals open, so value and id are
    packed into one integer: a float's bits, those below the sign flipped where it is negative, order as the float does.
    """
    if not k:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: -0.0 equals 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last_first = vocab - 1 - torch.arange(vocab, device=logits.device)
    packed = (ordered << 32) | last_first
    return vocab - 1 - (packed.topk(k).values & 0xFFFFFFFF)
