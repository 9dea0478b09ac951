"""What a request's parameters do to logits before temperature: repetition, frequency and presence penalties;
logit_bias; allowed_token_ids; bad_words; min_tokens, in this order. Prepared once for all completions of a request,
updated as they grow, applied to all rows of a sequence together.

A row after a draft token counts the draft tokens on its path as output.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.runtime.pack import num_logit_rows
from specserve.sampling import bad_words
from specserve.types import Draft, Ids, SamplingParams, ScheduledSeq, Sequence

Int64s = NDArray[np.int64]


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


def edited(logits: Tensor, sampled: Many[ScheduledSeq]) -> Tensor:
    """Logits [rows or more, vocab] with the edits of all sequences, float32 [rows, vocab]; `logits` itself if there are
    none."""
    if not any(changes_logits(each.seq) for each in sampled):
        return logits
    num_rows = num_logit_rows(sampled)
    scores = logits[:num_rows].to(torch.float32, copy=True)
    for each in sampled:
        if changes_logits(each.seq):
            _edit(scores[each.logits_start : each.logits_start + len(each.draft) + 1], each.seq, each.draft)
    return scores


def leaves_none(seq: Sequence, mask: Ids | None, vocab_size: int) -> bool:
    """Whether what a sequence asks for forbids every token that could come next. mask int32 [words] or None: its
    grammar's bits."""
    scores = edited(torch.zeros(1, vocab_size), [ScheduledSeq(seq, 0, 1, sampled=True)])
    seq.edits = None  # they were made for this device
    may_come = scores[0].isfinite().numpy()
    if mask is not None:
        may_come &= np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size) == 1
    return not may_come.any()


def _edit(scores: Tensor, seq: Sequence, draft: Draft) -> None:
    """Change the rows of one sequence, float32 [len(draft) + 1, vocab], in place."""
    if not isinstance(seq.edits, _Edits):
        known = None if seq.parent is None else seq.parent.edits
        shared = known.shared if isinstance(known, _Edits) else _Shared(seq, scores.shape[1], scores.device)
        seq.edits = _Edits(shared, _Occurrences(shared) if _has_penalty(seq.params) else None)
    seq.edits.apply(scores, seq, draft)


def row_depths(draft: Draft) -> list[int]:
    """How many draft tokens come before what each row judges: 0 at the root."""
    return [0, *(draft.depths + 1).tolist()]


class _Shared:
    """What the completions of a request have in common, each part made when it is first needed."""

    def __init__(self, seq: Sequence, vocab_size: int, device: torch.device) -> None:
        self._params, self._tokens, self._num_prompt = seq.params, seq.tokens, seq.num_prompt  # the sequence owns this
        self._bad_words, self._stop_ids = seq.bad_words, seq.stop_ids
        self.vocab_size = vocab_size
        self.device = device

    @cached_property
    def penalties(self) -> tuple[Tensor, ...]:
        """Repetition, frequency and presence. Tensors, since a device may divide by a number in another way."""
        params = self._params
        values = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        return torch.tensor(values, dtype=torch.float32, device=self.device).unbind()

    @cached_property
    def prompt_ids(self) -> Int64s:
        """Each token of the prompt once, as far as penalties count it."""
        if self._params.repetition_penalty == 1:
            return np.empty(0, np.int64)
        return np.unique(np.array(self._tokens[: self._num_prompt], np.int64))

    @cached_property
    def biases(self) -> tuple[Tensor, Tensor]:
        """Token ids, and what is added to their logits."""
        given = self._params.logit_bias or {}
        return self._ids(list(given)), torch.tensor(list(given.values()), dtype=torch.float32, device=self.device)

    @cached_property
    def not_allowed(self) -> Tensor:
        """Bool [vocab]."""
        mask = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
        mask[self._ids(self._params.allowed_token_ids)] = False
        return mask

    @cached_property
    def always_bad(self) -> Tensor:
        return self._ids([] if self._bad_words is None else self._bad_words.always)

    @cached_property
    def stop_ids(self) -> Tensor:
        return self._ids(sorted(self._stop_ids))

    def _ids(self, ids: object) -> Tensor:
        return torch.from_numpy(np.array(ids, np.int64)).to(self.device)

    def penalised(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Of tokens seen, which are `counts` times in the output: repetition divides what is above zero and multiplies
        what is not; frequency subtracts per occurrence, presence once."""
        repetition, frequency, presence = self.penalties
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        return (logits - frequency * counts).sub_(presence * (counts > 0))


class _Occurrences:
    """Which tokens a sequence has had, and how often each is in its output. Repetition looks at prompt and output, the
    other penalties at the output alone."""

    def __init__(self, shared: _Shared) -> None:
        prompt = shared.prompt_ids
        self.num_ids = len(prompt)
        self._ids = np.zeros(2 * len(prompt) + 64, np.int64)  # the first num_ids of them, each once
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(self._ids), np.int64)
        self._places = np.full(shared.vocab_size, -1, np.int32)  # of each token among _ids, -1: not had
        self._places[prompt] = np.arange(len(prompt))
        self._num_counted = 0  # tokens of the output

    def count(self, seq: Sequence) -> None:
        """Take in what has been committed since the last call."""
        for token in seq.tokens[seq.num_prompt + self._num_counted :]:
            if self._places[token] < 0:
                self._append(token)
            self._counts[self._places[token]] += 1
        self._num_counted = seq.num_output

    def _append(self, token: int) -> None:
        if self.num_ids == len(self._ids):
            self._ids, self._counts = np.resize(self._ids, 2 * self.num_ids), np.resize(self._counts, 2 * self.num_ids)
        self._ids[self.num_ids], self._counts[self.num_ids] = token, 0
        self._places[token] = self.num_ids
        self.num_ids += 1

    def root(self) -> tuple[Int64s, Int64s]:
        """Tokens had, and their counts."""
        return self._ids[: self.num_ids], self._counts[: self.num_ids]

    def drafted(self, draft: Draft) -> tuple[Int64s, Int64s, NDArray[np.bool_]]:
        """Tokens of a draft, int64 [n]; in each row their counts, and whether they have been had, [rows, n]."""
        tokens = draft.tokens.tolist()
        columns = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
        added = np.zeros((len(draft) + 1, len(columns)), np.int64)
        for node, (token, parent) in enumerate(zip(tokens, draft.parents.tolist(), strict=True)):
            added[node + 1] = added[parent + 1]
            added[node + 1, columns[token]] += 1
        ids = np.array(list(columns))
        places = self._places[ids]
        return ids, added + np.where(places < 0, 0, self._counts[places]), (added > 0) | (places >= 0)


class _Edits:
    """One sequence's."""

    def __init__(self, shared: _Shared, occurrences: _Occurrences | None) -> None:
        self.shared = shared
        self._occurrences = occurrences

    def apply(self, scores: Tensor, seq: Sequence, draft: Draft) -> None:
        params, shared = seq.params, self.shared
        if self._occurrences is not None:
            self._penalise(scores, seq, draft, self._occurrences)
        if params.logit_bias:
            ids, biases = shared.biases
            scores.index_copy_(1, ids, scores.index_select(1, ids).add_(biases))
        if params.allowed_token_ids is not None:
            scores.masked_fill_(shared.not_allowed, -torch.inf)
        if seq.bad_words is not None:
            scores.index_fill_(1, shared.always_bad, -torch.inf)
            for row, bad in bad_words.forbidden(seq.bad_words, seq.tokens, draft):
                scores[row, bad] = -torch.inf
        if (missing := params.min_tokens - seq.num_output) > 0:
            for row, depth in enumerate(row_depths(draft)):
                if depth < missing:
                    scores[row].index_fill_(0, shared.stop_ids, -torch.inf)

    def _penalise(self, scores: Tensor, seq: Sequence, draft: Draft, occurrences: _Occurrences) -> None:
        """Rows differ in the tokens of the draft alone; these are put right after the others."""
        occurrences.count(seq)
        had, counts = (torch.from_numpy(part).to(scores.device) for part in occurrences.root())
        if len(draft):
            ids, own_counts, seen = (torch.from_numpy(x).to(scores.device) for x in occurrences.drafted(draft))
            before = scores.index_select(1, ids)
            after = torch.where(seen, self.shared.penalised(before, own_counts), before)
        scores.index_copy_(1, had, self.shared.penalised(scores.index_select(1, had), counts))
        if len(draft):
            scores.index_copy_(1, ids, after)
