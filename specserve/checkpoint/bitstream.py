"""Numbers of a few bits each, packed into 32-bit words as quantised checkpoints have them."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 32  # bits


def num_words(count: int, bits: int) -> int:
    """Words that `count` numbers take."""
    return -(-count * bits // WORD)


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits]: number i of a row has the bits i * bits and up of its
    words, of which the first holds the lowest. Those of 3, 5, 6 and 7 bits reach over the ends of words."""
    rows, count = words.shape
    if bits in (1, 2, 4, 8):
        parts = [(words.contiguous().view(torch.uint8) >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).view(rows, -1)
    blocks = -(-count // bits)  # of `bits` words, which hold 32 numbers
    padded = torch.zeros((rows, blocks * bits), dtype=torch.int64)
    padded[:, :count] = words.long() & (2**WORD - 1)
    padded = padded.view(rows, blocks, bits)
    numbers = torch.empty((rows, blocks, WORD), dtype=torch.uint8)
    for i in range(WORD):
        word, shift = divmod(i * bits, WORD)
        value = padded[..., word] >> shift
        if shift + bits > WORD:
            value = value | padded[..., word + 1] << (WORD - shift)
        numbers[..., i] = value & (2**bits - 1)
    return numbers.view(rows, -1)[:, : count * WORD // bits]
