"""Knows how likely the model itself found a token: from raw logits, before any processing. Knows nothing of how the
token was chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.sampling.filters import row_total
from specserve.types import TokenLogprobs


def token_logprobs(logits: Tensor, tokens: list[int], k: int) -> list[TokenLogprobs]:
    """Log-probability (float32), rank and the k best of tokens[i] under logits[i]; logits float32 [rows, vocab], finite
    or -inf. Equals share the better rank; among equals the lower id comes first, as in greedy sampling."""
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    relative = logits.double() - logits.amax(-1, keepdim=True)
    logs = relative - row_total(relative.exp(), logits.shape[1]).log()[:, None]  # [rows, vocab]
    ranks = 1 + (logits > logits.gather(1, chosen)).sum(-1)
    best = _best(logits, min(k, logits.shape[1]))
    values = torch.cat([logs.gather(1, chosen), logs.gather(1, best)], 1).float().tolist()
    tops = best.tolist()
    return [
        TokenLogprobs(token, own, rank, dict(zip(top, others, strict=True)))
        for token, rank, top, (own, *others) in zip(tokens, ranks.tolist(), tops, values, strict=True)
    ]


def _best(logits: Tensor, k: int) -> Tensor:
    """Ids of the k best, best first, int64 [rows, k]. torch.topk leaves the order of equals open, so value and id are
    packed into one integer: a float's bits, those below the sign flipped where it is negative, order as the float does.
    """
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32).long()  # + 0.0: -0.0 equals 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    last_first = vocab - 1 - torch.arange(vocab, device=logits.device)
    packed = (ordered << 32) | last_first
    return vocab - 1 - (packed.topk(k).values & 0xFFFFFFFF)
