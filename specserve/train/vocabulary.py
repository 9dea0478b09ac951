"""Chooses the ids that a head proposes from: those that the target wrote most often."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from specserve.train.batches import Answer


def count_outputs(answers: Iterable[Answer], vocab_size: int) -> NDArray[np.int64]:
    """How often the target wrote each id, [vocab]."""
    counts = np.zeros(vocab_size, np.int64)
    for answer in answers:
        counts += np.bincount(answer.tokens[answer.num_prompt :], minlength=vocab_size)
    return counts


def choose_ids(counts: NDArray[np.int64], size: int, always: Iterable[int]) -> NDArray[np.int64]:
    """The `size` ids that occur most often, of equals the lowest, ascending [min(size, vocab)]; those in `always` come
    before all others. Ids beyond the vocabulary, which tokenizers of padded models may have, are left out."""
    vocab = len(counts)
    first = sorted(each for each in set(always) if each < vocab)
    ranked = counts.copy()
    ranked[first] = np.iinfo(np.int64).max
    order = np.argsort(-ranked, kind="stable")
    return np.sort(order[: min(size, vocab)]).astype(np.int64)


def offsets(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """d2t [draft vocabulary]: target id = i + d2t[i]."""
    return ids - np.arange(len(ids), dtype=np.int64)
