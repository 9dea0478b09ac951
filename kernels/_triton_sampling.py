"""Sampling in Triton: a token of each row by its own temperature, filters, mask and noise, in few launches and one copy
each way.

What `_torch_sampling.sample` does, with sums of integers as there, so no row's token depends on other rows. Programs
have a part of a row each; filters look for the lowest logit that they keep in the bits of float32, two at a time, so
that nothing is sorted.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from specserve.kernels._torch_sampling import SamplingArrays
from specserve.ops import NO_TOKEN_LEFT, NOT_FINITE
from specserve.ops.fixed_point import scale_of
from specserve.types import Ids

_PART = 1024  # logits of a program
_SEARCHED = 4096  # logits that the program of a row's filters looks at together
_MOST_WEIGHED = 2**23  # logits whose weights are kept at a time: 96 MiB
_DROPPED = tl.constexpr(-(2**31))  # below the key of any float32
_NOT_FINITE, _NO_TOKEN_LEFT = tl.constexpr(NOT_FINITE), tl.constexpr(NO_TOKEN_LEFT)


def sample(scores: Tensor, sampling: SamplingArrays, hashed: Tensor, masks: Ids | None) -> Tensor:
    """A token for each of n rows of scores float32 [rows, vocab], or why it has none, as Ops.verify says, int64 [n];
    hashed int64 [vocab], masks int32 [rows, words] on the host."""
    n, vocab = len(sampling.rows), scores.shape[1]
    drawn = sampling.temperature > 0
    is_filtered = drawn & ((sampling.top_p < 1) | ((sampling.top_k > 0) & (sampling.top_k < vocab)))
    at_once = max(1, _MOST_WEIGHED // vocab) if is_filtered.any() else max(n, 1)
    parts = [
        _sample(scores, sampling[first : first + at_once], hashed, masks, is_filtered[first : first + at_once])
        for first in range(0, n, at_once)
    ]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _sample(
    scores: Tensor, sampling: SamplingArrays, hashed: Tensor, masks: Ids | None, is_filtered: NDArray[np.bool_]
) -> Tensor:
    assert scores.is_contiguous() and scores.dtype == torch.float32
    n, vocab, device = len(sampling.rows), scores.shape[1], scores.device
    row = _row_numbers(sampling, vocab).to(device)
    bits = None if masks is None else torch.from_numpy(np.ascontiguousarray(masks[sampling.rows])).to(device)
    parts = -(-vocab // _PART)
    tops, ids = (torch.empty((n, parts), dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    read = (scores, bits, row, row.view(torch.float64))
    sizes: dict[str, Any] = {"BLOCK": _PART, "PARTS": triton.next_power_of_2(parts), "num_warps": 4}
    counts = (vocab, parts, 0 if bits is None else bits.shape[1])
    _best_of_part_kernel[n, parts](*read, tops, ids, *counts, _PART, num_warps=4)
    noisy = floors = None
    if is_filtered.any():
        floors = torch.empty(n, dtype=torch.int64, device=device)
        keys = torch.empty((n, vocab), dtype=torch.int32, device=device)
        weights = torch.empty((n, vocab), dtype=torch.int64, device=device)
        _weigh_kernel[n, parts](*read, tops, keys, weights, scale_of(vocab), *counts, **sizes)
        _floor_kernel[(n,)](row, row.view(torch.float64), keys, weights, tops, floors, vocab, parts,
                            BLOCK=_SEARCHED, PARTS=sizes["PARTS"], num_warps=8)  # fmt: skip
    if (sampling.temperature > 0).any():
        noisy = torch.empty((n, parts), dtype=torch.float64, device=device)
        noisy_ids = torch.empty_like(ids)
        _noise_kernel[n, parts](*read, tops, floors, hashed, noisy, noisy_ids, *counts, **sizes)
    else:
        noisy_ids = ids
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    _choose_kernel[(n,)](row.view(torch.float64), tops, ids, noisy, noisy_ids, tokens, parts, PARTS=sizes["PARTS"])
    return tokens


_NUMBERS = tl.constexpr(6)  # of a row, as follows


def _row_numbers(sampling: SamplingArrays, vocab: int) -> Tensor:
    """int64 [n, 6]: row of the scores, key of the noise, top_k; bits of float64: temperature, the least logarithm that
    min_p keeps, top_p."""
    numbers = np.empty((len(sampling.rows), _NUMBERS.value), np.int64)
    numbers[:, 0], numbers[:, 1] = sampling.rows, sampling.keys
    numbers[:, 2] = np.where(sampling.top_k < vocab, sampling.top_k, 0)
    laws = numbers.view(np.float64)
    laws[:, 3], laws[:, 5] = sampling.temperature, sampling.top_p
    laws[:, 4] = [math.log(p) if p > 0 else -math.inf for p in sampling.min_p.tolist()]
    return torch.from_numpy(numbers)


@triton.jit
def _scores_of_part(scores, bits, row, at, vocab, words):
    """Scores float32 [BLOCK] at tokens `at`, -inf where a token may not come; a NaN counts as infinite."""
    x = tl.load(scores + tl.load(row) * vocab + at, mask=at < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    if bits is not None:
        word = tl.load(bits + tl.program_id(0).to(tl.int64) * words + at // 32, mask=at < vocab, other=0)
        x = tl.where(((word >> (at % 32)) & 1) != 0, x, float("-inf"))
    return x


@triton.jit
def _top(tops, parts, PARTS: tl.constexpr):
    """The best score of this program's row."""
    part = tl.arange(0, PARTS)
    place = tops + tl.program_id(0).to(tl.int64) * parts + part
    return tl.max(tl.load(place, mask=part < parts, other=float("-inf")), 0)


@triton.jit
def _shaped(x, top, law):
    """Scores x float32 as log-probabilities but for a constant, float64: the best is 0, what min_p drops -inf."""
    temperature = tl.load(law + 3)
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0).to(tl.float64)
    shaped = (x.to(tl.float64) - top) / tl.where(temperature > 0, temperature, 1.0)
    return tl.where(shaped < tl.load(law + 4), float("-inf"), shaped)


@triton.jit
def _key(x):
    """int32 that order as float32 x do; of both zeros it is 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best_of_part_kernel(scores, bits, row, law, tops, ids, vocab, parts, words, BLOCK: tl.constexpr):
    """Program (row, part): its best score, and the lowest token that has it."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _scores_of_part(scores, bits, row + tl.program_id(0) * _NUMBERS, at, vocab, words)
    top = tl.max(x, 0)
    place = tl.program_id(0).to(tl.int64) * parts + tl.program_id(1)
    tl.store(tops + place, top)
    tl.store(ids + place, tl.min(tl.where(x == top, at, vocab), 0))


@triton.jit
def _weigh_kernel(
    scores, bits, row, law, tops, keys, weights, scale, vocab, parts, words, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Program (row, part): keys int32 of what mask and min_p leave, and their weights as fixed-point int64."""
    number = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _scores_of_part(scores, bits, row + number * _NUMBERS, at, vocab, words)
    shaped = _shaped(x, _top(tops, parts, PARTS), law + number * _NUMBERS)
    is_kept = shaped > float("-inf")
    weight = tl.floor(tl.exp(tl.minimum(shaped, 0.0)) * scale + 0.5)
    tl.store(keys + number * vocab + at, tl.where(is_kept, _key(x), _DROPPED), mask=at < vocab)
    tl.store(weights + number * vocab + at, tl.where(is_kept, weight, 0.0).to(tl.int64), mask=at < vocab)


@triton.jit
def _mass(keys, weights, least, vocab, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    """What tokens whose keys are `least` or more weigh together, or how many they are, int64."""
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        key = tl.load(keys + at, mask=at < vocab, other=_DROPPED).to(tl.int64)
        total += tl.where(key >= least, _weight(weights, at, vocab, WEIGHED), 0)
    return tl.sum(total, 0)


@triton.jit
def _weight(weights, at, vocab, WEIGHED: tl.constexpr):
    if WEIGHED:
        return tl.load(weights + at, mask=at < vocab, other=0)
    return tl.where(at < vocab, 1, 0).to(tl.int64)


@triton.jit
def _highest(keys, weights, wanted, vocab, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    """The highest key, int64, so that tokens of it and of higher ones weigh `wanted`, float64, or more."""
    found = tl.full((), -(2**31), tl.int64)
    unit = tl.full((), 2**30, tl.int64)
    for _ in range(16):
        one, two, three = (tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64))
        for start in range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            key = tl.load(keys + at, mask=at < vocab, other=_DROPPED).to(tl.int64) - found
            weight = _weight(weights, at, vocab, WEIGHED)
            one += tl.where(key >= unit, weight, 0)
            two += tl.where(key >= 2 * unit, weight, 0)
            three += tl.where(key >= 3 * unit, weight, 0)
        found += tl.where(tl.sum(one, 0).to(tl.float64) >= wanted, unit, 0)
        found += tl.where(tl.sum(two, 0).to(tl.float64) >= wanted, unit, 0)
        found += tl.where(tl.sum(three, 0).to(tl.float64) >= wanted, unit, 0)
        unit = unit >> 2
    return found


@triton.jit
def _floor_kernel(row, law, keys, weights, tops, floors, vocab, parts, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Program (row): the lowest key that top_k, and of what it keeps top_p, keep."""
    number = tl.program_id(0).to(tl.int64)
    keys += number * vocab
    weights += number * vocab
    top_k = tl.load(row + number * _NUMBERS + 2)
    top_p = tl.load(law + number * _NUMBERS + 5)
    floor = tl.full((), -(2**31), tl.int64)
    if top_k > 0:
        floor = _highest(keys, weights, top_k.to(tl.float64), vocab, BLOCK, False)
    if top_p < 1:
        enough = _mass(keys, weights, floor, vocab, BLOCK, True).to(tl.float64) * top_p
        best = _key(_top(tops, parts, PARTS)).to(tl.int64)
        floor = tl.minimum(_highest(keys, weights, enough, vocab, BLOCK, True), best)
    tl.store(floors + number, floor)


@triton.jit
def _mix(x):
    """The splitmix64 finaliser of uint64 x, as noise.py has it."""
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise_kernel(
    scores, bits, row, law, tops, floors, hashed, noisy, ids, vocab, parts, words, BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Program (row, part): its best score with Gumbel noise, and the lowest token that has it."""
    number = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _scores_of_part(scores, bits, row + number * _NUMBERS, at, vocab, words)
    shaped = _shaped(x, _top(tops, parts, PARTS), law + number * _NUMBERS)
    if floors is not None:
        shaped = tl.where(_key(x).to(tl.int64) < tl.load(floors + number), float("-inf"), shaped)
    key = tl.load(row + number * _NUMBERS + 1) ^ tl.load(hashed + at, mask=at < vocab, other=0)
    uniform = ((_mix(key.to(tl.uint64, bitcast=True)) >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    drawn = tl.where(at < vocab, shaped - tl.log(-tl.log(uniform)), float("-inf"))
    best = tl.max(drawn, 0)
    tl.store(noisy + number * parts + tl.program_id(1), best)
    tl.store(ids + number * parts + tl.program_id(1), tl.min(tl.where(drawn == best, at, vocab), 0))


@triton.jit
def _choose_kernel(law, tops, ids, noisy, noisy_ids, tokens, parts, PARTS: tl.constexpr):
    """Program (row): its token, or why it has none."""
    number = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PARTS)
    place = number * parts + at
    top = _top(tops, parts, PARTS)
    x = tl.load(tops + place, mask=at < parts, other=float("-inf"))
    first = tl.load(ids + place, mask=at < parts, other=2147483647)
    token = tl.min(tl.where(x == top, first, 2147483647), 0)
    if noisy is not None:
        drawn = tl.load(noisy + place, mask=at < parts, other=float("-inf"))
        first = tl.load(noisy_ids + place, mask=at < parts, other=2147483647)
        found = tl.min(tl.where(drawn == tl.max(drawn, 0), first, 2147483647), 0)
        token = tl.where(tl.load(law + number * _NUMBERS + 3) > 0, found, token)
    token = tl.where(tl.abs(top) < float("inf"), token, _NOT_FINITE)
    token = tl.where(top == float("-inf"), _NO_TOKEN_LEFT, token)
    tl.store(tokens + number, token.to(tl.int64))
