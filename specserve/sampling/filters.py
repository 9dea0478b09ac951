"""Knows how a request's parameters turn logits into the law a token is drawn from. Knows nothing of noise, drafts that
stand or fall, or engines.

The order, for every row: repetition, presence and frequency penalties; logit_bias; allowed_token_ids; bad_words;
min_tokens; the grammar's bits; temperature; min-p, top-k, top-p (vLLM's order). A row after a draft token counts the
draft tokens on its path as output.

No row may change by one bit with what else is in the batch. Hence no float is ever summed here: sums are of fixed-point
integers, which have no order, and everything else is elementwise or a maximum. A feature that no sequence of the batch
uses costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.ops import Laws
from specserve.runtime.batch import Rows
from specserve.types import Draft, SamplingParams, Sequence

Entry = tuple[Sequence, Draft, int]  # a sequence, its draft, its first row
Int64s = NDArray[np.int64]

_TINIEST_TEMPERATURE = 1e-300  # 0 / denormal is NaN where denormals are flushed to zero
_FIRST_NUCLEUS = 512  # top-p looks at this many best tokens before it sorts them all


def process(logits: Tensor, rows: Rows, masks: Tensor | None) -> Tensor:
    """Everything before temperature. logits float32 [rows, vocab], left as they are; masks int32 [rows, words], bit t
    of a row set where token t may come. The result is `logits` itself if there is nothing to do."""
    if not is_processed(rows, masks):
        return logits
    entries = list(zip(rows.seqs, rows.drafts, rows.starts, strict=True))
    penalised = [e for e in entries if _has_penalty(e[0].params)]
    biased = [e for e in entries if e[0].params.logit_bias]
    limited = [e for e in entries if e[0].params.allowed_token_ids is not None]
    forbidden = [pair for e in entries for pair in _forbidden(*e)]
    scores = logits.clone()
    _penalise(scores, penalised)
    _add_bias(scores, biased)
    _keep_allowed(scores, limited)
    _forbid(scores, forbidden)
    _apply_masks(scores, masks)
    return scores


def leaves_none(seq: Sequence, mask: Tensor | None, vocab_size: int) -> bool:
    """Whether what a sequence asks for forbids every token that could come next. mask int32 [1, words] or None: its
    grammar's bits."""
    nothing = torch.zeros(1, vocab_size)
    return not bool(process(nothing, Rows([seq], [Draft.empty()], [0]), mask).isfinite().any())


def is_processed(rows: Rows, masks: Tensor | None) -> bool:
    """Whether any row may come out of `process` as another."""
    return masks is not None or any(changes_logits(seq) for seq in rows.seqs)


def changes_logits(seq: Sequence) -> bool:
    """Whether anything but a grammar does."""
    params = seq.params
    return bool(
        _has_penalty(params)
        or params.logit_bias
        or params.allowed_token_ids is not None
        or seq.bad_ids
        or params.min_tokens > seq.num_output
    )


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _penalise(scores: Tensor, entries: list[Entry]) -> None:
    """Repetition divides what is above zero and multiplies what is not; frequency subtracts per occurrence, presence
    once. Repetition looks at prompt and output, the others at the output alone."""
    if not entries:
        return
    counted = [_occurrences(*entry) for entry in entries]
    at = torch.from_numpy(np.concatenate([where for where, _ in counted], axis=1)).to(scores.device)
    counts = torch.from_numpy(np.concatenate([count for _, count in counted])).to(scores.device)
    lengths = [len(count) for _, count in counted]
    repetition, frequency, presence = _spread([_penalties(seq.params) for seq, _, _ in entries], lengths, scores)
    value = scores[at[0], at[1]]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value = value - frequency * counts
    scores[at[0], at[1]] = value - presence * (counts > 0)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _spread(values: list[tuple[float, float, float]], lengths: list[int], like: Tensor) -> tuple[Tensor, ...]:
    """One float32 column per field, value i repeated lengths[i] times."""
    columns = np.repeat(np.asarray(values, np.float32), lengths, axis=0).T
    return torch.from_numpy(np.ascontiguousarray(columns)).to(like.device).unbind(0)


def _occurrences(seq: Sequence, draft: Draft, start: int) -> tuple[Int64s, Int64s]:
    """Where a sequence's rows have a token seen before, as (row, token) [2, n], and how often each is in the output."""
    prompt, output = seq.tokens[: seq.num_prompt], seq.tokens[seq.num_prompt :]
    ids, inverse = np.unique(np.asarray([*output, *draft.tokens.tolist(), *prompt], np.int64), return_inverse=True)
    columns = inverse[len(output) :]  # of draft tokens, then of the prompt's
    counts = np.zeros((len(draft) + 1, len(ids)), np.int64)
    counts[0] = np.bincount(inverse[: len(output)], minlength=len(ids))
    for node, parent in enumerate(draft.parents.tolist()):
        counts[node + 1] = counts[parent + 1]
        counts[node + 1, columns[node]] += 1
    seen = counts > 0
    seen[:, columns[len(draft) :]] = True
    rows, found = seen.nonzero()
    return np.stack([start + rows, ids[found]]), counts[rows, found]


def _add_bias(scores: Tensor, entries: list[Entry]) -> None:
    if not entries:
        return
    triples = [
        (start + row, token, bias)
        for seq, draft, start in entries
        for row in range(len(draft) + 1)
        for token, bias in (seq.params.logit_bias or {}).items()
    ]
    rows, tokens, biases = zip(*triples, strict=True)
    at = torch.tensor([rows, tokens], device=scores.device)
    scores[at[0], at[1]] += torch.tensor(biases, dtype=scores.dtype, device=scores.device)


def _keep_allowed(scores: Tensor, entries: list[Entry]) -> None:
    for seq, draft, start in entries:
        ids = torch.tensor(list(seq.params.allowed_token_ids or ()), device=scores.device)
        own = scores[start : start + len(draft) + 1]
        kept = own[:, ids]
        own.fill_(-torch.inf)
        own[:, ids] = kept


def _forbidden(seq: Sequence, draft: Draft, start: int) -> Iterable[tuple[int, int]]:
    """(row, token) of what bad_words and min_tokens rule out."""
    if seq.bad_ids:
        yield from _bad_endings(seq, draft, start)
    missing = seq.params.min_tokens - seq.num_output
    if missing > 0:
        for row, depth in enumerate(row_depths(draft)):
            if depth < missing:
                yield from ((start + row, token) for token in sorted(seq.stop_ids))


def _bad_endings(seq: Sequence, draft: Draft, start: int) -> Iterable[tuple[int, int]]:
    """A bad word's last token may not follow the others; prompt, output and path are one text."""
    longest = max(len(word) for word in seq.bad_ids) - 1
    tails = [tuple(seq.tokens[-longest:]) if longest else ()]  # per row, what came before it
    for node, parent in enumerate(draft.parents.tolist()):
        tail = (*tails[parent + 1], int(draft.tokens[node]))
        tails.append(tail[-longest:] if longest else ())
    for row, tail in enumerate(tails):
        for *before, last in seq.bad_ids:
            if not before or tail[-len(before) :] == tuple(before):
                yield start + row, last


def row_depths(draft: Draft) -> list[int]:
    """How many draft tokens come before what each row judges: 0 at the root."""
    return [0, *(draft.depths + 1).tolist()]


def _forbid(scores: Tensor, pairs: list[tuple[int, int]]) -> None:
    if pairs:
        at = torch.tensor(pairs, device=scores.device)
        scores[at[:, 0], at[:, 1]] = -torch.inf


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
