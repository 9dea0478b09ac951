"""Sampling and scoring in torch: what the reference kernels do once a step has logits, and what faster ones are tested
against.

No row may change by one bit with what else is in the batch. Hence no float is ever summed here: sums are of fixed-point
integers, which have no order, and everything else is elementwise or a maximum. A filter that no row uses costs nothing.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import NO_TOKEN_LEFT, NOT_FINITE, DrawArrays, Drawn, RowScores, fraction_bits
from specserve.ops.fixed_point import row_total, to_fixed
from specserve.sampling import noise
from specserve.types import Ids

_CACHED_ELEMENTS = 2**16  # a CPU is twice as fast while the rows it works on fit its cache
_FIRST_NUCLEUS = 512  # top-p looks at this many best tokens before it sorts them all
_SLICE = 2**18  # logits that are scored at a time: 2 MiB for each of the intermediate results
_SLICE_ELSEWHERE = 2**22  # on devices whose calls cost more than their work
_ROUNDER = 1.5 * 2.0**52  # added to a number below 2^51 and taken away again it leaves that, rounded to even
_LOG2_E = float.fromhex("0x1.71547652b82fep0")
_LN_2 = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")  # high part and the rest
_TAYLOR = [1 / math.factorial(n) for n in range(11, -1, -1)]


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """How each of n rows is sampled: arrays [n] on the host."""

    rows: NDArray[np.int64]  # which row of the scores
    temperature: NDArray[np.float64]  # 0: greedy
    min_p: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]  # 0: all tokens
    keys: NDArray[np.int64]  # of the noise, from noise.row_keys

    def __getitem__(self, some: slice | list[int]) -> SamplingArrays:
        return SamplingArrays(*(getattr(self, entry.name)[some] for entry in fields(self)))


def sample(scores: Tensor, sampling: SamplingArrays, hashed: Tensor, masks: Ids | None) -> Tensor:
    """A token for each of n rows, or why it has none, as Ops.verify says, int64 [n]."""
    at_once = max(1, _CACHED_ELEMENTS // scores.shape[1]) if scores.is_cpu else sys.maxsize
    found = [hashed[:0]]
    for first in range(0, len(sampling.rows), at_once):
        some = sampling[first : first + at_once]
        own = _masked(scores, some.rows, masks)
        tokens = masked_argmax(own)
        if drawn := np.flatnonzero(some.temperature).tolist():
            keys = torch.from_numpy(some.keys[drawn]).to(scores.device)
            taken = noise.sample(filtered(own[drawn], some[drawn]), keys, hashed)
            tokens[drawn] = torch.where(tokens[drawn] < 0, tokens[drawn], taken)
        found.append(tokens)
    return torch.cat(found)


def draw(logits: Tensor, bias: Tensor | None, how: DrawArrays, ids: Tensor | None, hashed: Tensor) -> Drawn:
    """As Ops.draw."""
    scores = logits[how.rows]
    scores = scores if bias is None else scores + bias
    top = scores.amax(-1)  # a NaN is above all
    is_greedy, has_none = how.temperature == 0, ~top.isfinite()
    scaled = (scores - top[:, None]).double() / how.temperature.masked_fill(is_greedy, 1.0)[:, None]
    if not (logits.is_cpu and is_greedy.all()):  # elsewhere asking costs more than the noise
        noise_of = noise.gumbel(how.keys[:, None], hashed)
        scaled = scaled + noise_of.masked_fill(is_greedy[:, None], 0.0)
    total, found = scaled.logsumexp(-1), list[Tensor]()
    for _ in range(2):
        highest, entry = scaled.max(-1)  # of equals the first
        share = (highest - total).exp().float().masked_fill(has_none, 0.0)
        entry = entry.masked_fill(has_none | (share == 0), 0)
        found += [entry if ids is None else ids[entry], share]
        scaled = scaled.scatter(1, entry[:, None], -torch.inf)
    return Drawn(*found)


def masked_argmax(scores: Tensor) -> Tensor:
    """The lowest of the best tokens of each row, int64 [rows]; NOT_FINITE where the highest score is infinite or any is
    NaN, NO_TOKEN_LEFT where all are -inf."""
    top, best = scores.max(-1)  # of equals the first; a NaN is above all
    best.masked_fill_(~top.isfinite(), NOT_FINITE)
    return best.masked_fill_(top == -torch.inf, NO_TOKEN_LEFT)


def probabilities(scores: Tensor, sampling: SamplingArrays, masks: Ids | None) -> Tensor:
    """The distributions that `sample` draws from, float64 [n, vocab]; temperatures are above 0. Whatever the row, it
    has no NaN."""
    weights = filtered(_masked(scores, sampling.rows, masks), sampling).exp_()
    return weights / row_total(weights, weights.shape[1])[:, None]


def filtered(scores: Tensor, sampling: SamplingArrays) -> Tensor:
    """Temperature and filters applied to rows [n, vocab] -> log-probabilities but for a constant, float64: the best is
    0, what is ruled out -inf. A row without a finite best is all zeros: nobody looks at it, no NaN leaves."""
    best = scores.amax(-1, keepdim=True)
    shaped = scores.double().sub_(best).div_(_column(sampling.temperature, scores.device))
    shaped.masked_fill_(~best.isfinite(), 0.0)
    _keep_min_p(shaped, sampling)
    _keep_top_k(shaped, sampling)
    _keep_top_p(shaped, sampling)
    return shaped


def _keep_min_p(shaped: Tensor, sampling: SamplingArrays) -> None:
    """Keep what has at least min_p times the probability of the best."""
    if sampling.min_p.any():
        floors = np.array([math.log(p) if p > 0 else -math.inf for p in sampling.min_p.tolist()])
        shaped.masked_fill_(shaped < _column(floors, shaped.device), -torch.inf)


def _keep_top_k(shaped: Tensor, sampling: SamplingArrays) -> None:
    """Keep the k best and whatever equals the last of them."""
    users = np.flatnonzero((sampling.top_k > 0) & (sampling.top_k < shaped.shape[1])).tolist()
    if users:
        widths = torch.from_numpy(sampling.top_k[users]).to(shaped.device)
        best = shaped[users].topk(int(sampling.top_k[users].max())).values
        _drop_below(shaped, users, best.gather(1, widths[:, None] - 1))


def _keep_top_p(shaped: Tensor, sampling: SamplingArrays) -> None:
    """Keep the fewest best that hold a share top_p of the probability left, and whatever equals the last of them."""
    users = np.flatnonzero(sampling.top_p < 1).tolist()
    if users:
        _drop_below(shaped, users, _nucleus(shaped[users], _column(sampling.top_p[users], shaped.device)))


def _nucleus(shaped: Tensor, top_p: Tensor) -> Tensor:
    """The lowest value in the nucleus of each row, [rows, 1].

    A CPU takes a thousand times longer to sort a vocabulary than a few hundred best, so it widens its look until they
    suffice; the sums are exact, so that the answer is the same. Elsewhere asking would cost a wait for the device.
    """
    vocab = shaped.shape[1]
    weights = to_fixed(shaped.exp(), vocab)
    enough = weights.sum(-1, keepdim=True) * top_p
    width = min(_FIRST_NUCLEUS, vocab) if shaped.is_cpu else vocab
    while True:
        best = shaped.topk(width).values  # descending
        weights = to_fixed(best.exp(), vocab)
        mass = weights.cumsum(-1)
        if width == vocab or bool((mass[:, -1:] >= enough).all()):
            inside = mass - weights < enough  # the mass above a token
            return best.gather(1, inside.sum(-1, keepdim=True).clamp_(min=1) - 1)
        width = min(16 * width, vocab)


def _drop_below(shaped: Tensor, rows: list[int], floors: Tensor) -> None:
    every = torch.full((len(shaped), 1), -torch.inf, dtype=shaped.dtype, device=shaped.device)
    every[rows] = floors
    shaped.masked_fill_(shaped < every, -torch.inf)


def _masked(scores: Tensor, rows: NDArray[np.int64], masks: Ids | None) -> Tensor:
    """A copy of some rows, -inf where a token's bit is not set."""
    own = scores[torch.from_numpy(rows).to(scores.device)]
    if masks is not None:
        bits = np.unpackbits(masks[rows].view(np.uint8), axis=1, bitorder="little", count=own.shape[1])
        own.masked_fill_(torch.from_numpy(bits).to(scores.device) == 0, -torch.inf)
    return own


def _column(values: NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)[:, None]


def score(logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], k: int) -> RowScores:
    """As Ops.score: e^x is made of operations that round alike everywhere, and its sum is one of integers. Goes over
    slices of a bounded size, whatever the vocabulary."""
    most = max(1, (_SLICE if logits.is_cpu else _SLICE_ELSEWHERE) // logits.shape[1])
    at, chosen = (torch.from_numpy(ids).to(logits.device) for ids in (rows, tokens))
    slices = [slice(first, first + most) for first in range(0, max(1, len(rows)), most)]
    parts = [_score_slice(logits[at[some]].float(), chosen[some, None], k) for some in slices]
    peaks, totals, ranks, best, own = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return RowScores(peaks, totals, ranks, best, own)


def _score_slice(raw: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, ...]:
    """The fields of RowScores; raw float32 [n, vocab], chosen int64 [n, 1]."""
    vocab = raw.shape[1]
    peaks, best = raw.amax(-1), best_ids(raw, k)
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


def best_ids(logits: Tensor, k: int) -> Tensor:
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
