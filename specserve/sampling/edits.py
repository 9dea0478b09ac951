"""What a request's parameters do to logits before temperature: repetition, frequency and presence penalties;
logit_bias; allowed_token_ids; bad_words; min_tokens, in this order. The host says what is to be done, by value; whoever
has the logits does it to all rows of a sequence together.

A row after a draft token counts the draft tokens on its path as output.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.sampling import bad_words
from specserve.types import Draft, Ids, SamplingParams, Sequence

Int64s = NDArray[np.int64]


class TokenCounts(NamedTuple):
    """Tokens, each once, which penalties are for."""

    ids: Int64s  # [n]
    counts: NDArray[np.int64]  # [n] or [rows, n]: how often each is in the output, the draft's path included
    seen: NDArray[np.bool_] | None = None  # [rows, n]: whether each has been had at all; None: all have


@dataclass(slots=True)
class Edits:
    """What is done to the rows of one sequence. Arrays may change with the sequence's next step."""

    penalties: tuple[float, float, float] | None  # repetition, frequency and presence
    bias: tuple[Int64s, NDArray[np.float32]] | None  # token ids, and what is added to their logits
    allowed: Int64s | None  # the ids that alone may come
    forbidden: Int64s
    stop_ids: Int64s  # which may not come at the rows
    unfinished: Many[int] = ()
    forbidden_at: Many[tuple[int, list[int]]] = ()  # rows and ids, beside those that are forbidden everywhere
    had: TokenCounts | None = None  # by the sequence
    drafted: TokenCounts | None = None  # which count otherwise after some nodes of the draft


def changes_logits(seq: Sequence) -> bool:
    """Whether anything but a grammar does."""
    params = seq.params
    return bool(
        _has_penalty(params)
        or params.logit_bias
        or params.allowed_token_ids is not None
        or seq.bad_words is not None
        or params.min_tokens > seq.num_output
    )


def _has_penalty(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def edits_of(seq: Sequence, draft: Draft) -> Edits | None:
    """What is done to the rows of a sequence and its draft; None: nothing. Prepared once for all completions of a
    request, updated as they grow."""
    if not changes_logits(seq):
        return None
    if not isinstance(seq.edits, _Prepared):
        known = None if seq.parent is None else seq.parent.edits
        seq.edits = _Prepared(known.shared if isinstance(known, _Prepared) else _Shared(seq))
    return seq.edits.edits(seq, draft)


def apply_edits(scores: Tensor, edits: Edits) -> None:
    """Change the rows of one sequence, float32 [rows, vocab], in place."""

    def moved(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(scores.device)

    if edits.penalties is not None and edits.had is not None:
        # Tensors, since a device may divide by a number in another way.
        penalties = torch.tensor(edits.penalties, dtype=torch.float32, device=scores.device)
        drafted, after = None, None
        if edits.drafted is not None and edits.drafted.seen is not None:
            drafted = moved(edits.drafted.ids)
            before = scores.index_select(1, drafted)
            counted = _penalised(before, moved(edits.drafted.counts), penalties)
            after = torch.where(moved(edits.drafted.seen), counted, before)
        ids, counts = moved(edits.had.ids), moved(edits.had.counts)
        scores.index_copy_(1, ids, _penalised(scores.index_select(1, ids), counts, penalties))
        if drafted is not None and after is not None:  # rows differ in these alone
            scores.index_copy_(1, drafted, after)
    if edits.bias is not None:
        ids, biases = moved(edits.bias[0]), moved(edits.bias[1])
        scores.index_copy_(1, ids, scores.index_select(1, ids).add_(biases))
    if edits.allowed is not None:
        most = torch.full((scores.shape[1],), -torch.inf, device=scores.device)
        torch.minimum(scores, most.index_fill_(0, moved(edits.allowed), torch.inf), out=scores)
    if len(edits.forbidden):
        scores.index_fill_(1, moved(edits.forbidden), -torch.inf)
    for row, some in edits.forbidden_at:
        scores[row, some] = -torch.inf
    for row in edits.unfinished:
        scores[row].index_fill_(0, moved(edits.stop_ids), -torch.inf)


def leaves_none(seq: Sequence, mask: Ids | None, vocab_size: int) -> bool:
    """Whether what a sequence asks for forbids every token that could come next. mask int32 [words] or None: its
    grammar's bits."""
    scores = torch.zeros(1, vocab_size)
    if (edits := edits_of(seq, Draft.empty())) is not None:
        apply_edits(scores, edits)
    may_come = scores[0].isfinite().numpy()
    if mask is not None:
        may_come &= np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size) == 1
    return not may_come.any()


def row_depths(draft: Draft) -> list[int]:
    """How many draft tokens come before what each row judges: 0 at the root."""
    return [0, *(draft.depths + 1).tolist()]


def _penalised(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Of tokens seen, which are `counts` times in the output: repetition divides what is above zero and multiplies what
    is not; frequency subtracts per occurrence, presence once."""
    repetition, frequency, presence = penalties.unbind()
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    return (logits - frequency * counts).sub_(presence * (counts > 0))


class _Shared:
    """What the completions of a request have in common."""

    def __init__(self, seq: Sequence) -> None:
        params, bias, allowed = seq.params, seq.params.logit_bias, seq.params.allowed_token_ids
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        repeated = seq.tokens[: seq.num_prompt] if params.repetition_penalty != 1 else []
        self.prompt_ids = np.unique(np.array(repeated, np.int64))  # as far as penalties count them
        self.edits = Edits(
            penalties=penalties if _has_penalty(params) else None,
            bias=(np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)) if bias else None,
            allowed=None if allowed is None else np.array(allowed, np.int64),
            forbidden=np.array([] if seq.bad_words is None else seq.bad_words.always, np.int64),
            stop_ids=np.array(sorted(seq.stop_ids), np.int64),
        )


class _Occurrences:
    """Which tokens a sequence has had, and how often each is in its output. Repetition looks at prompt and output, the
    other penalties at the output alone."""

    def __init__(self, shared: _Shared) -> None:
        prompt = shared.prompt_ids
        self._ids = np.resize(prompt, 2 * len(prompt) + 64) if len(prompt) else np.zeros(64, np.int64)
        self._counts = np.zeros(len(self._ids), np.int64)
        self._places = dict(zip(prompt.tolist(), range(len(prompt)), strict=True))  # of each token among _ids
        self._num_counted = 0  # tokens of the output

    def count(self, seq: Sequence) -> None:
        """Take in what has been committed since the last call."""
        for token in seq.tokens[seq.num_prompt + self._num_counted :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids, self._counts = np.resize(self._ids, 2 * place), np.resize(self._counts, 2 * place)
                self._counts[place:] = 0
            self._ids[place] = token
            self._counts[place] += 1
        self._num_counted = seq.num_output

    def had(self) -> TokenCounts:
        num_ids = len(self._places)
        return TokenCounts(self._ids[:num_ids], self._counts[:num_ids])

    def drafted(self, draft: Draft) -> TokenCounts:
        tokens = draft.tokens.tolist()
        columns = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
        added = np.zeros((len(draft) + 1, len(columns)), np.int64)
        for node, (token, parent) in enumerate(zip(tokens, draft.parents.tolist(), strict=True)):
            added[node + 1] = added[parent + 1]
            added[node + 1, columns[token]] += 1
        places = np.array([self._places.get(token, -1) for token in columns])
        counts = added + np.where(places < 0, 0, self._counts[places])
        return TokenCounts(np.array(list(columns)), counts, (added > 0) | (places >= 0))


class _Prepared:
    """One sequence's."""

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self._occurrences = None if shared.edits.penalties is None else _Occurrences(shared)

    def edits(self, seq: Sequence, draft: Draft) -> Edits:
        edits = replace(self.shared.edits)
        if self._occurrences is not None:
            self._occurrences.count(seq)
            edits.had = self._occurrences.had()
            edits.drafted = self._occurrences.drafted(draft) if len(draft) else None
        if seq.bad_words is not None:
            edits.forbidden_at = bad_words.forbidden(seq.bad_words, seq.tokens, draft)
        if (missing := seq.params.min_tokens - seq.num_output) > 0:
            edits.unfinished = [row for row, depth in enumerate(row_depths(draft)) if depth < missing]
        return edits
