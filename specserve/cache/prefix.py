"""The names of prefixes: a chained digest for each full block of tokens. Knows no blocks and no sequences.

A digest names a block's tokens *and everything before them*, so equal digests mean equal KV. The chain starts at the
sequence's salt: sequences with different salts never share a digest, whatever their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence as Many

import numpy as np


def root(salt: bytes) -> bytes:
    """The digest before the first block. The salt is hashed twice: a salt is chosen outside, and one crafted to look
    like (digest, tokens) must not start a chain in the middle of somebody else's."""
    return hashlib.sha256(hashlib.sha256(salt).digest()).digest()


def link(parent: bytes, tokens: Many[int]) -> bytes:
    """The digest of a block holding `tokens` after the prefix `parent`."""
    return hashlib.sha256(parent + np.asarray(tokens, "<i4").tobytes()).digest()


def chain(salt: bytes, tokens: Many[int], block_size: int, num_blocks: int) -> Iterator[bytes]:
    """The digests of the first `num_blocks` blocks of `tokens`, hashed as they are asked for."""
    digest = root(salt)
    for start in range(0, num_blocks * block_size, block_size):
        digest = link(digest, tokens[start : start + block_size])
        yield digest
