"""How the token ids of a draft model stand to the target's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.text.tokenizer import Tokenizer

_ALIKE = 0.9  # of the ids that both have, for one vocabulary: names of reserved tokens may differ
_SHARED = 0.1  # of the target's tokens, for two: with fewer there is hardly a draft


class SharedVocabulary(NamedTuple):
    """The draft model proposes its `size` ids `rows` int64 [size], which mean the target's `ids` int64 [size],
    ascending; None: the first ones of both. It reads the target's id i as reads[i], int64 [target's ids]; None: as
    itself."""

    size: int
    rows: Tensor | None
    ids: Tensor | None
    reads: Tensor | None


def shared_vocabulary(target: Tokenizer, draft: Tokenizer, sizes: tuple[int, int], name: str) -> SharedVocabulary:
    """Of the tokenizers of target and draft model, whose heads have sizes[0] and sizes[1] rows. Of one vocabulary, ids
    are compared; of two, the bytes that tokens stand for, however they mark spaces. A token that the draft model does
    not have is read as the longest of its own that the token ends with: one token stays one place of its KV, and worse
    context only makes worse drafts. Raises ConfigError where too few tokens are shared."""
    spelled = [target.token_bytes(token) for token in range(min(target.vocab_size, sizes[0]))]
    drafted = [draft.token_bytes(token) for token in range(min(draft.vocab_size, sizes[1]))]
    both = min(len(spelled), len(drafted))
    alike = torch.tensor([spelled[token] == drafted[token] for token in range(both)])
    if alike.float().mean() >= _ALIKE:
        same = None if bool(alike.all()) else alike.nonzero()[:, 0]
        reads = torch.arange(sizes[0])
        reads[sizes[1] :] = 0  # which it has never seen
        return SharedVocabulary(int(alike.sum()), same, same, None if sizes[1] >= sizes[0] else reads)
    known = {spelling: token for token, spelling in enumerate(drafted)}  # of equals the last: single bytes come first
    known.pop(b"", None)
    ends = zip(sorted(target.eos_ids), sorted(draft.eos_ids), strict=False)
    pairs = {i: known[spelling] for i, spelling in enumerate(spelled) if spelling in known} | dict(ends)
    if len(pairs) < _SHARED * len(spelled):
        raise ConfigError(
            f"The draft model {name} shares {len(pairs):,} tokens with the target, whose vocabulary has "
            f"{len(spelled):,}. It needs {_SHARED:.0%}: take a model of the target's family, or of its language."
        )
    reads = torch.zeros(sizes[0], dtype=torch.int64)
    reads[: len(spelled)] = torch.tensor([pairs.get(i, _end(spelling, known)) for i, spelling in enumerate(spelled)])
    ids = torch.tensor(sorted(pairs))
    return SharedVocabulary(len(ids), torch.tensor([pairs[i] for i in ids.tolist()]), ids, reads)


def _end(spelling: bytes, known: dict[bytes, int]) -> int:
    """The longest token that these bytes end with; 0 for none."""
    return next((known[spelling[i:]] for i in range(len(spelling)) if spelling[i:] in known), 0)
