"""What is wrong with a draft, if anything: the one gate between a drafter, which may be anybody's, and the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specserve.speculation.constants import Q_TOLERANCE
from specserve.types import Draft


def checked(draft: Any, budget: int, vocab_size: int, is_ours: bool = False) -> Draft | str:
    """A copy of the draft that may be verified, or one word for the first rule of `Draft` that it breaks. Of a drafter
    that is not ours others may still hold the arrays, and change them when they like.

    type, shape, dtype (tokens, parents and q are what Draft says), budget (more tokens than asked for), vocabulary (an
    id outside 0 .. vocab_size - 1, -1 padding included), parents (not before their node), siblings (equal ones), q (not
    finite, negative, not summing to 1, or 0 at the token said to be drawn from it, which no verification can undo),
    confidence (not one float32 from 0 to 1 for each node). What a drafter says of `sources` and `jump_forward` is not
    read.
    """
    if not isinstance(draft, Draft):
        return "type"
    tokens, parents, q, confidence = draft.tokens, draft.parents, draft.q, draft.confidence
    if type(tokens) is not np.ndarray or type(parents) is not np.ndarray:  # others may say one thing and then another
        return "type"
    if tokens.dtype != np.int32 or parents.dtype != np.int32:
        return "dtype"
    if tokens.ndim != 1 or tokens.shape != parents.shape:
        return "shape"
    if len(tokens) > budget:
        return "budget"
    ids, before = tokens.tolist(), parents.tolist()  # copies; so few that numpy would take longer
    is_chain = before == list(range(-1, len(ids) - 1))
    if len(ids) != len(before) or len(ids) > budget or draft.is_chain != is_chain:
        return "parents"  # changed in place since
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        return "vocabulary"
    if any(not -1 <= parent < node for node, parent in enumerate(before)):
        return "parents"
    if len(set(zip(before, ids, strict=True))) < len(ids):
        return "siblings"
    if q is not None:
        wrong = _q_fault(q, ids, vocab_size)
        if not wrong and not is_ours:
            q = q.clone(memory_format=torch.contiguous_format)
            wrong = _q_fault(q, ids, vocab_size)
        if wrong:
            return wrong
    if confidence is not None:
        if type(confidence) is not np.ndarray or confidence.dtype != np.float32 or confidence.shape != (len(ids),):
            return "confidence"
        confidence = np.array(confidence)
        if not all(0.0 <= value <= 1.0 for value in confidence.tolist()):  # False for NaN
            return "confidence"
    own = frozenset(node for node in range(len(ids)) if node in draft.own)
    more: dict[str, Any] = {"q": q, "confidence": confidence, "own": own}
    return Draft.chain(ids, **more) if is_chain else Draft(np.array(ids, np.int32), np.array(before, np.int32), **more)


def _q_fault(q: Any, ids: list[int], vocab_size: int) -> str | None:
    if type(q) is not torch.Tensor or q.layout is not torch.strided:
        return "type"
    if not q.is_floating_point():
        return "dtype"
    if q.shape != (len(ids), vocab_size):
        return "shape"
    drawn = q.gather(1, torch.tensor(ids, dtype=torch.int64, device=q.device)[:, None])  # [n, 1]
    normalised = (q.sum(1, dtype=torch.float32) - 1).abs() <= Q_TOLERANCE  # False for NaN
    sound = (q >= 0).all() & normalised.all() & (drawn > 0).all()  # one answer, so one transfer from the device
    return None if bool(sound) else "q"
