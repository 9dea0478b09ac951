"""The names of prefixes: a chained digest for each full block of tokens.

A digest names a block's tokens *and everything before them*, so equal digests mean equal KV. The chain starts at the
sequence's salt: sequences with different salts never share a digest, whatever their tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence as Many


def root(salt: bytes) -> bytes:
    """The digest before the first block. The salt is hashed twice: a salt is chosen outside, and one crafted to look
    like (digest, tokens) must not start a chain in the middle of somebody else's."""
    return hashlib.sha256(hashlib.sha256(salt).digest()).digest()


def salted(salt: bytes, adapter: bytes | None) -> bytes:
    """What separates an adapter's KV, and what drafters learn of its texts, from all others': by the digest of its
    numbers, as its name may come to mean another one."""
    return salt if adapter is None else hashlib.sha256(b"adapter\0" + adapter + salt).digest()


def link(parent: bytes, tokens: Many[int]) -> bytes:
    """The digest of a block holding `tokens` after the prefix `parent`."""
    return hashlib.sha256(parent + array("i", tokens).tobytes()).digest()


def span(block: int, block_size: int, num_ahead: int) -> slice:
    """The tokens that a block is named after beside its parent, where its KV depends on `num_ahead` that follow too."""
    return slice(block * block_size + (num_ahead if block else 0), (block + 1) * block_size + num_ahead)


def chain(
    salt: bytes,
    tokens: Many[int],
    block_size: int,
    num_blocks: int,
    known: list[bytes] | None = None,
    num_ahead: int = 0,
) -> Iterator[bytes]:
    """The digests of the first `num_blocks` blocks of `tokens`, hashed as they are asked for. `known` are the first of
    them, and those that are hashed are appended."""
    digests = [] if known is None else known
    for i in range(num_blocks):
        if i == len(digests):
            above = digests[-1] if digests else root(salt)
            digests.append(link(above, tokens[span(i, block_size, num_ahead)]))
        yield digests[i]
