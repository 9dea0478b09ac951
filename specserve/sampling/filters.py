"""Knows how a request's parameters turn logits into the law a token is drawn from. Knows nothing of noise, drafts that
stand or fall, or engines.

The order, for every row: repetition, presence and frequency penalties; logit_bias; allowed_token_ids; bad_words;
min_tokens (all these: see `edits`); the grammar's bits; temperature; min-p, top-k, top-p (vLLM's order).

No row may change by one bit with what else is in the batch. Hence no float is ever summed here: sums are of fixed-point
integers, which have no order, and everything else is elementwise or a maximum. A feature that no sequence of the batch
uses costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from specserve.ops import Laws
from specserve.sampling.edits import changes_logits, edit
from specserve.sampling.rows import Rows
from specserve.types import Draft, SamplingParams, Sequence

_TINIEST_TEMPERATURE = 1e-300  # 0 / denormal is NaN where denormals are flushed to zero
_FIRST_NUCLEUS = 512  # top-p looks at this many best tokens before it sorts them all


def process(logits: Tensor, rows: Rows, masks: Tensor | None) -> Tensor:
    """Everything before temperature. logits float32 [rows, vocab], left as they are; masks int32 [rows, words], bit t
    of a row set where token t may come. The result is `logits` itself if there is nothing to do."""
    if not is_processed(rows, masks):
        return logits
    scores = logits.clone()
    for seq, draft, start in zip(rows.seqs, rows.drafts, rows.starts, strict=True):
        if changes_logits(seq):
            edit(scores[start : start + len(draft) + 1], seq, draft)
    _apply_masks(scores, masks)
    return scores


def leaves_none(seq: Sequence, mask: Tensor | None, vocab_size: int) -> bool:
    """Whether what a sequence asks for forbids every token that could come next. mask int32 [1, words] or None: its
    grammar's bits."""
    nothing = torch.zeros(1, vocab_size)
    scores = process(nothing, Rows([seq], [Draft.empty()], [0]), mask)
    seq.edits = None  # they were made for this device
    return not bool(scores.isfinite().any())


def is_processed(rows: Rows, masks: Tensor | None) -> bool:
    """Whether any row may come out of `process` as another."""
    return masks is not None or any(changes_logits(seq) for seq in rows.seqs)


def _apply_masks(scores: Tensor, masks: Tensor | None) -> None:
    if masks is None:
        return
    limited = (masks != -1).any(-1).nonzero().squeeze(-1).to(scores.device)  # the others may become anything
    bits = _bits(masks.to(scores.device)[limited])[:, : scores.shape[1]]
    scores[limited] = scores[limited].masked_fill_(bits == 0, -torch.inf)


def _bits(masks: Tensor) -> Tensor:
    """Whether each bit is set, lowest first: [rows, 32 words]. numpy is ten times as fast as torch on a CPU."""
    if masks.is_cpu:
        return torch.from_numpy(np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little"))
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks[:, :, None] >> shifts) & 1).flatten(1)


def laws(params: Many[SamplingParams]) -> Laws:
    """The parameters of `shape` as arrays, for kernels that do its work."""
    return Laws(
        np.array([max(p.temperature, _TINIEST_TEMPERATURE) for p in params], np.float64),
        np.array([p.min_p for p in params], np.float64),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.top_k for p in params], np.int64),
    )


def shape(scores: Tensor, params: Many[SamplingParams]) -> Tensor:
    """Temperature (above zero) and the filters: float64 [rows, vocab] log-probabilities, but for a constant; the best
    is 0, what is ruled out -inf. A row without a finite best is all zeros: nobody looks at it, no NaN leaves."""
    best = scores.amax(-1, keepdim=True)
    temperature = _column([max(p.temperature, _TINIEST_TEMPERATURE) for p in params], scores.device)
    shaped = scores.double().sub_(best).div_(temperature).masked_fill_(~best.isfinite(), 0.0)
    _apply_min_p(shaped, params)
    _apply_top_k(shaped, params)
    _apply_top_p(shaped, params)
    return shaped


def _apply_min_p(shaped: Tensor, params: Many[SamplingParams]) -> None:
    """Keep what has at least min_p times the probability of the best."""
    if any(p.min_p > 0 for p in params):
        floors = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        shaped.masked_fill_(shaped < _column(floors, shaped.device), -torch.inf)


def _apply_top_k(shaped: Tensor, params: Many[SamplingParams]) -> None:
    """Keep the k best and whatever equals the last of them."""
    users = [i for i, p in enumerate(params) if 0 < p.top_k < shaped.shape[1]]
    if users:
        widths = torch.tensor([params[i].top_k for i in users], device=shaped.device)
        best = shaped[users].topk(max(params[i].top_k for i in users)).values
        _drop_below(shaped, users, best.gather(1, widths[:, None] - 1))


def _apply_top_p(shaped: Tensor, params: Many[SamplingParams]) -> None:
    """Keep the fewest best that hold a share top_p of the probability left, and whatever equals the last of them."""
    users = [i for i, p in enumerate(params) if p.top_p < 1]
    if users:
        _drop_below(shaped, users, _nucleus(shaped[users], _column([params[i].top_p for i in users], shaped.device)))


def _nucleus(shaped: Tensor, top_p: Tensor) -> Tensor:
    """The lowest value in the nucleus of each row, [rows, 1].

    A CPU takes a thousand times longer to sort a vocabulary than a few hundred best, so it widens its look until they
    suffice; the sums are exact, so that the answer is the same. Elsewhere asking would cost a wait for the device.
    """
    vocab = shaped.shape[1]
    weights = _fixed(shaped.exp(), vocab)
    enough = weights.sum(-1, keepdim=True) * top_p
    width = min(_FIRST_NUCLEUS, vocab) if shaped.is_cpu else vocab
    while True:
        best = shaped.topk(width).values  # descending
        weights = _fixed(best.exp(), vocab)
        mass = weights.cumsum(-1)
        if width == vocab or bool((mass[:, -1:] >= enough).all()):
            inside = mass - weights < enough  # the mass above a token
            return best.gather(1, inside.sum(-1, keepdim=True).clamp_(min=1) - 1)
        width = min(16 * width, vocab)


def _drop_below(shaped: Tensor, rows: list[int], floors: Tensor) -> None:
    every = torch.full((len(shaped), 1), -torch.inf, dtype=shaped.dtype, device=shaped.device)
    every[rows] = floors
    shaped.masked_fill_(shaped < every, -torch.inf)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def normalise(shaped: Tensor) -> Tensor:
    """Probabilities float64 [rows, vocab] of log-probabilities whose best is 0."""
    weights = shaped.exp()
    return weights / row_total(weights, shaped.shape[1])[:, None]


def row_total(values: Tensor, most: float) -> Tensor:
    """The sum of each row, float64 [rows]; values float64 [rows, n], none negative, no row above `most`. Independent of
    the order of addition and so of the device, its threads and the other rows; exact to n * most * 2^-62."""
    return _fixed(values, most).sum(-1).double() / _scale(most)


def _fixed(values: Tensor, most: float) -> Tensor:
    """Fixed-point int64: integer addition is associative, float addition is not."""
    return (values * _scale(most)).round_().long()


def _scale(most: float) -> float:
    return float(2.0 ** (62 - math.ceil(math.log2(most))))
