"""The best tokens that may follow beams, with their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from specserve.beams import Candidate
from specserve.ops import Ops, fraction_bits
from specserve.sampling.inputs import SampledSeq
from specserve.sampling.logprobs import token_logprobs
from specserve.types import Ids


def candidates(
    ops: Ops, logits: Tensor, scores: Tensor, beams: Many[SampledSeq], masks: Ids | None
) -> list[list[list[Candidate]]]:
    """For each of `beams`, and each of its rows, the best tokens that may come, best first, of equals the lower id.

    logits float32 [rows, vocab] are the model's, `scores` [rows, vocab] those with edits; masks int32 [rows, words] the
    bits of tokens that may come. As in transformers a log-probability is the model's own, with what edits add to it:
    what is forbidden leaves nothing to the others. After a row that is not finite nothing is said."""
    rows = np.array([each.logits_start + i for each in beams for i in range(len(each.draft) + 1)], np.int64)
    vocab, none = logits.shape[1], np.zeros(len(rows), np.int64)
    most = min(max(each.num_candidates for each in beams), vocab)
    raw = found = ops.score(logits, rows, none, most)
    if masks is not None or any(each.edits is not None for each in beams):
        allowed = scores[torch.from_numpy(rows).to(scores.device)]
        if masks is not None:
            bits = np.unpackbits(masks[rows].view(np.uint8), axis=1, bitorder="little", count=vocab)
            allowed.masked_fill_(torch.from_numpy(bits == 0).to(scores.device), -torch.inf)
        found = ops.score(allowed, np.arange(len(rows)), none, most)
    scale = 2.0 ** fraction_bits(vocab)
    logs = np.array([math.log(total / scale) if total > 0 else 0.0 for total in raw.totals.tolist()])
    with np.errstate(invalid="ignore"):  # rows that are not finite
        values = found.logits[:, 1:].astype(np.float64) - raw.peaks[:, None] - logs[:, None]
    logprobs, tokens = values.astype(np.float32).tolist(), found.best.tolist()
    is_finite = np.isfinite(raw.peaks)
    result: list[list[list[Candidate]]] = []
    for each in beams:
        own: list[list[Candidate]] = []
        first = int(np.searchsorted(rows, each.logits_start))
        for row in range(first, first + len(each.draft) + 1):
            if not is_finite[row]:
                break
            pairs = zip(tokens[row][: each.num_candidates], logprobs[row], strict=False)
            usable = [(token, value) for token, value in pairs if value > -math.inf]
            entries: Many[object] = [None] * len(usable)
            if (k := each.params.logprobs) is not None:
                at, ks = [int(rows[row])] * len(usable), [k] * len(usable)
                entries = token_logprobs(ops, logits, at, [token for token, _ in usable], ks)
            own.append([Candidate(*pair, entry) for pair, entry in zip(usable, entries, strict=True)])
        result.append(own)
    return result
