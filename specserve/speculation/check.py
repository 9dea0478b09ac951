"""What is wrong with a draft, if anything: the one gate between a drafter, which may be anybody's, and the engine.
Knows no drafter and no sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specserve.types import Draft

Q_TOLERANCE = 1e-3  # how far a row's sum may be from 1: float32 softmax over 256k ids errs by less, bfloat16 by more


def fault(draft: Any, budget: int, vocab_size: int) -> str | None:
    """One word for the first rule of `Draft` that `draft` breaks, None if it may be verified.

    type, shape, dtype (tokens, parents and q are what Draft says), budget (more tokens than asked for), vocabulary (an
    id outside 0 .. vocab_size - 1, -1 padding included), parents (not before their node), siblings (equal ones), q (not
    finite, negative, not summing to 1, or 0 at the token said to be drawn from it, which no verification can undo),
    confidence (not one float32 from 0 to 1 for each node).
    """
    if not isinstance(draft, Draft):
        return "type"
    for part in (draft.tokens, draft.parents):
        if not isinstance(part, np.ndarray):
            return "type"
        if part.dtype != np.int32:
            return "dtype"
        if part.ndim != 1 or len(part) != len(draft.tokens):
            return "shape"
    if len(draft) > budget:
        return "budget"
    ids, before = draft.tokens.tolist(), draft.parents.tolist()  # so few that numpy would take longer
    if draft.is_chain != (before == list(range(-1, len(draft) - 1))):
        return "parents"  # changed in place since somebody asked whether it is a chain
    wrong = _tree_fault(ids, before, vocab_size) or _q_fault(draft, vocab_size)
    return wrong or (None if draft.confidence is None else _confidence_fault(draft.confidence, len(draft)))


def _tree_fault(ids: list[int], before: list[int], vocab_size: int) -> str | None:
    if not ids:
        return None
    if min(ids) < 0 or max(ids) >= vocab_size:
        return "vocabulary"
    if any(not -1 <= parent < node for node, parent in enumerate(before)):
        return "parents"
    return "siblings" if len(set(zip(before, ids, strict=True))) < len(ids) else None


def _q_fault(draft: Draft, vocab_size: int) -> str | None:
    q = draft.q
    if q is None:
        return None
    if not isinstance(q, torch.Tensor):
        return "type"
    if not q.is_floating_point():
        return "dtype"
    if q.shape != (len(draft), vocab_size):
        return "shape"
    drawn = q.gather(1, torch.as_tensor(draft.tokens, dtype=torch.int64, device=q.device)[:, None])  # [n, 1]
    normalised = (q.sum(1, dtype=torch.float32) - 1).abs() <= Q_TOLERANCE  # False for NaN
    sound = (q >= 0).all() & normalised.all() & (drawn > 0).all()  # one answer, so one transfer from the device
    return None if bool(sound) else "q"


def _confidence_fault(confidence: Any, length: int) -> str | None:
    if not isinstance(confidence, np.ndarray) or confidence.dtype != np.float32 or confidence.shape != (length,):
        return "confidence"
    return None if all(0.0 <= value <= 1.0 for value in confidence.tolist()) else "confidence"  # False for NaN
