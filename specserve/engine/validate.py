"""Refuses requests that leave no first token to sample, before they are queued."""

from __future__ import annotations

import numpy as np

from specserve.errors import NoTokenLeftError
from specserve.sampling.edits import leaves_none
from specserve.sampling.sampler import NO_TOKEN
from specserve.types import Ids, Sequence


def check_first_token(seq: Sequence, vocab_size: int) -> None:
    """Raise NoTokenLeftError for a sequence whose grammar, allowed_token_ids, bad_words and min_tokens forbid every
    token. Grammars alone were tried when they were compiled; one that fails here ends its request when it runs."""
    params = seq.params
    words = seq.bad_words
    fields = {"allowed_token_ids": params.allowed_token_ids, "bad_words": words, "min_tokens": params.min_tokens}
    restricting = [name for name, value in fields.items() if value]
    if not restricting:
        return
    if seq.grammar is None:
        num_open = vocab_size if params.allowed_token_ids is None else len(set(params.allowed_token_ids))
        num_bad = 0 if words is None else len(words.always) + sum(map(len, words.lasts))
        if num_open > num_bad + len(seq.stop_ids):  # more than can be forbidden
            return
    mask: Ids | None = None
    if seq.grammar is not None:
        mask = np.empty(-(-vocab_size // 32), np.int32)
        seq.grammar.fill(mask)
        if seq.grammar.fault is not None:
            return
    if leaves_none(seq, mask, vocab_size):
        raise NoTokenLeftError(NO_TOKEN.format(len(seq.tokens)), restricting[0])
