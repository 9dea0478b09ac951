"""Noise without state: (seed, position, token, purpose) hashed into a uniform number, and Gumbel-max sampling with it.

Two rounds of the splitmix64 finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): one
makes a key per row out of (seed, position, purpose), one mixes that key with a hashed token id. Integers wrap modulo
2^64 on every device, so the same arguments give the same bits everywhere and no token drawn depends on another.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int64])  # int64


class Purpose(IntEnum):
    """What a number is for. Numbers of different purposes are independent."""

    SAMPLE = 0  # the target samples a token; `coupled` drafters sample with it too
    ACCEPT = 1  # a draft token is accepted or rejected
    RESAMPLE = 2  # the target samples from what a rejected draft left over
    DRAFT = 3  # a drafter samples from its own q, for `rejection` and `block`


_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_SALT = 0xD1B54A32D192ED03
# Making noise for every token costs more than finding the few of a filtered row, once they are one in this many.
_SPARSE = 16


def row_keys(seeds: Many[int], positions: Many[int], purposes: Many[int]) -> Tensor:
    """Keys int64 [rows] on the host. Seeds are whole numbers modulo 2^64; `positions` index the token being chosen in
    prompt + output; `purposes` are of `Purpose`."""
    seed = np.array([_signed(value ^ _SEED_SALT) for value in seeds], np.int64)
    place = np.asarray(positions, np.int64) * len(Purpose) + np.asarray(purposes, np.int64) + 1
    return torch.from_numpy(_mix(_mix(seed) + place * _signed(_GOLDEN)))  # for few numbers torch takes thrice as long


def hash_tokens(tokens: Tensor) -> Tensor:
    """Token ids as `uniform`, `sample` and `fold` want them: int64, any shape."""
    return _mix((tokens.long() + 1) * _signed(_GOLDEN))


def fold(keys: Tensor, hashed: Tensor) -> Tensor:
    """The keys one token further down a path, int64. Folding the tokens of a path makes a key that no other path has.

    A drafter that samples for `rejection` or `block` starts from `row_keys(seed, len(seq.tokens), DRAFT)` and folds
    each sampled token. `block` looks at whole paths before it emits, so noise keyed by position alone would come back
    in the next step, and in the next branch of a tree, after it had already decided something.
    """
    return _mix(keys ^ hashed)


def uniform(keys: Tensor, hashed: Tensor) -> Tensor:
    """Uniform in (0, 1), float64, never 0 and never 1; `keys` and `hashed` broadcast."""
    return unit(fold(keys, hashed))


def unit(keys: Tensor) -> Tensor:
    """Keys as numbers (2 i + 1) / 2^53, i in [0, 2^52): symmetric around one half, and both ends stay out of reach."""
    return _shift(keys, 12).double().add_(0.5).mul_(2.0**-52)


def gumbel(keys: Tensor, hashed: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, finite."""
    return uniform(keys, hashed).log_().neg_().log_().neg_()


def sample(scores: Tensor, keys: Tensor, hashed: Tensor) -> Tensor:
    """One token of each row, int64 [rows], with probability proportional to exp(score): Gumbel-max in float64.

    scores float64 [rows, vocab] (any constant may be added to a row, -inf is never drawn), keys [rows], hashed [vocab].
    """
    if scores.is_cpu:
        possible = scores > -torch.inf
        if int(possible.sum()) * _SPARSE < scores.numel():
            return _sample_few(scores, keys, hashed, possible)
    return gumbel(keys[:, None], hashed).add_(scores).argmax(-1)


def _sample_few(scores: Tensor, keys: Tensor, hashed: Tensor, possible: Tensor) -> Tensor:
    """The same tokens, with noise made only where a score is finite."""
    rows, tokens = possible.nonzero(as_tuple=True)
    noisy = torch.full_like(scores, -torch.inf)
    noisy[rows, tokens] = gumbel(keys[rows], hashed[tokens]) + scores[rows, tokens]
    return noisy.argmax(-1)


def _mix(x: Words) -> Words:
    """The splitmix64 finaliser, a bijection of 64-bit words."""
    x = x ^ _shift(x, 30)
    x *= _signed(0xBF58476D1CE4E5B9)
    x ^= _shift(x, 27)
    x *= _signed(0x94D049BB133111EB)
    x ^= _shift(x, 31)
    return x


def _shift(x: Words, bits: int) -> Words:
    """Logical shift to the right: that of signed words copies the sign bit."""
    shifted = x >> bits
    shifted &= (1 << (64 - bits)) - 1
    return shifted


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK_64
    return value - 2**64 if value >= 2**63 else value
