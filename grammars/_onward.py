"""Which way to try a grammar: a token of its mask that leads further into it."""

from __future__ import annotations

from random import Random

import numpy as np

from specserve.structured.base import Vocabulary
from specserve.types import Ids

_CLOSING, _STRUCTURE = frozenset(b"}]"), frozenset(b'",:[{')
_SHARE = 0.7  # of the tokens tried that have some structure of JSON in them; else strings would be all that is seen


class Onward:
    """Chooses for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = [*vocabulary.tokens, *[b""] * (vocabulary.size - len(vocabulary.tokens))]
        self._is_text = np.ones(vocabulary.size, np.bool_)
        self._is_text[list(vocabulary.eos_ids)] = False
        self._closes = np.array([not _CLOSING.isdisjoint(text) for text in texts], np.bool_)
        self._has_structure = np.array([not _STRUCTURE.isdisjoint(text) for text in texts], np.bool_) & ~self._closes

    def __call__(self, row: Ids, dice: Random | None) -> int | None:
        """An allowed token, one that closes nothing if there is any; None if only the end is allowed. The first, or any
        that `dice` likes."""
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[: len(self._is_text)].astype(np.bool_)
        allowed &= self._is_text
        choices = [allowed & ~self._closes, allowed]
        if dice is not None and dice.random() < _SHARE:
            choices.insert(0, allowed & self._has_structure)
        for among in choices:
            found = np.flatnonzero(among)
            if len(found):
                return int(found[0] if dice is None else found[dice.randrange(len(found))])
        return None
