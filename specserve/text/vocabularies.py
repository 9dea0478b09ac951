"""Which token ids two models spell alike."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.text.tokenizer import Tokenizer

_ALIKE = 0.9  # of the ids that both have: names of reserved tokens may differ


def shared_ids(target: Tokenizer, draft: Tokenizer, vocab_size: int, name: str) -> Tensor | int:
    """The ids that both models, the draft's with a head of `vocab_size` rows, mean the same by: their number where they
    are the first ones of both, else bool [ids that both have]. Raises ConfigError for another vocabulary."""
    both = min(target.vocab_size, draft.vocab_size, vocab_size)
    alike = torch.tensor([target.token_bytes(token) == draft.token_bytes(token) for token in range(both)])
    if alike.float().mean() < _ALIKE:
        first = int((~alike).nonzero()[0])
        spelled = f"id {first} is {target.token_bytes(first)!r} there and {draft.token_bytes(first)!r} here"
        counted = f"{int(alike.sum())} of {both} ids are alike"
        raise ConfigError(
            f"The draft model {name} has another vocabulary than the target ({spelled}; {counted}). A draft model must "
            "have the target's: take a smaller model of its family."
        )
    return both if bool(alike.all()) else alike
