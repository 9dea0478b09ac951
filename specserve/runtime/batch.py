"""Packs scheduled work into one step's arrays. Knows rows, slots and positions; knows nothing of what the tokens mean,
who drafted them or which device will read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve.types import Draft, Ids, Sequence


@dataclass(slots=True)
class Work:
    """What one step does, in order: sequence i runs `counts[i]` of its own tokens from `cached` on, and where that
    reaches its last token, up to `budgets[i]` draft tokens after them. KV slots for all of them are reserved."""

    seqs: list[Sequence]
    counts: list[int]
    budgets: list[int]


@dataclass(slots=True)
class Rows:
    """The rows to be judged, flattened: sequence i owns logits rows [starts[i], starts[i] + len(drafts[i])].

    The first of them judges the token after the last committed one, row starts[i] + 1 + j what follows draft node j.
    """

    seqs: list[Sequence]
    drafts: list[Draft]
    starts: list[int]

    @property
    def num_rows(self) -> int:
        return sum(len(draft) + 1 for draft in self.drafts)


@dataclass(slots=True)
class Batch:
    """One step on the host, with the layout of its rows (what specserve.ops calls AttentionRows)."""

    token_ids: NDArray[np.int64]  # [num_rows]
    positions: NDArray[np.int64]  # [num_rows]
    logit_rows: NDArray[np.int64]  # [rows to be judged, then rows to be scored, padded]
    rows: Rows
    scored: list[tuple[Sequence, list[int]]]  # prompt tokens whose log-probability is asked for, in logit_rows' order
    num_rows: int
    query_starts: list[int]
    cached: list[int]
    block_tables: list[list[int]]
    parents: list[Ids | None]


@dataclass(slots=True)
class _Lists:
    """The rows under construction."""

    token_ids: list[int]
    positions: list[int]
    judged: list[int]
    scored_rows: list[int]


def pack(work: Work, drafts: list[Draft], multiple: int) -> Batch:
    """Lay out one step: sequence after sequence its own tokens, then its draft, padded to a multiple of rows.

    A tree node's position is that of its depth, whatever its row. A sequence is judged when its own tokens reach its
    end; prompt log-probabilities are scored on every row whose next token is in the prompt.
    """
    lists = _Lists([], [], [], [])
    rows = Rows([], [], [])
    starts = [0]
    scored: list[tuple[Sequence, list[int]]] = []
    for seq, count, draft in zip(work.seqs, work.counts, drafts, strict=True):
        _append(lists, seq, count, draft)
        if seq.cached + count == len(seq.tokens):
            rows.seqs.append(seq)
            rows.drafts.append(draft)
            rows.starts.append(len(lists.judged))
            lists.judged += range(starts[-1] + count - 1, starts[-1] + count + len(draft))
        if unscored := _unscored(seq, count):
            scored.append((seq, seq.tokens[unscored.start : unscored.stop]))
            first = starts[-1] + unscored.start - 1 - seq.cached
            lists.scored_rows += range(first, first + len(unscored))
        starts.append(len(lists.token_ids))
    token_ids = _padded(lists.token_ids, multiple)
    return Batch(
        token_ids=token_ids,
        positions=_padded(lists.positions, multiple),
        logit_rows=_padded(lists.judged + lists.scored_rows, multiple),
        rows=rows,
        scored=scored,
        num_rows=len(token_ids),
        query_starts=starts,
        cached=[seq.cached for seq in work.seqs],
        block_tables=[seq.blocks.ids for seq in work.seqs],
        parents=[_parents(count, draft) for count, draft in zip(work.counts, drafts, strict=True)],
    )


def _append(lists: _Lists, seq: Sequence, count: int, draft: Draft) -> None:
    stop = seq.cached + count
    lists.token_ids += seq.tokens[seq.cached : stop]
    lists.positions += range(seq.cached, stop)
    if len(draft):
        lists.token_ids += draft.tokens.tolist()
        lists.positions += range(stop, stop + len(draft)) if draft.is_chain else (draft.depths + stop).tolist()


def _unscored(seq: Sequence, count: int) -> range:
    """The indexes of prompt tokens that this chunk's rows predict (row i predicts token i + 1) and that were not
    scored before a preemption."""
    if seq.params.prompt_logprobs is None:
        return range(0)
    first = max(seq.cached + 1, len(seq.prompt_logprobs))
    return range(first, min(seq.cached + count + 1, seq.num_prompt))


def num_shared_rows(seq: Sequence, count: int) -> int:
    """How many rows of a chunk have logits, but for one, which every sequence has to itself: at its end the row that is
    judged, before it the first that is scored."""
    return max(0, len(_unscored(seq, count)) - (seq.cached + count < len(seq.tokens)))


def most_tokens(seq: Sequence, shared_rows: int) -> int:
    """How long a chunk with no more than so many shared rows may be: at least one token, or any number where nothing is
    scored."""
    first = max(seq.cached + 1, len(seq.prompt_logprobs))
    scores = seq.params.prompt_logprobs is not None and first < seq.num_prompt
    return shared_rows + first - seq.cached if scores else len(seq.tokens)


def _parents(count: int, draft: Draft) -> Ids | None:
    """Each row's parent row within the sequence, own tokens first; None for a chain."""
    if draft.is_chain:
        return None
    own = np.arange(-1, count - 1, dtype=np.int32)
    return np.concatenate((own, np.where(draft.parents < 0, count - 1, draft.parents + count))).astype(np.int32)


def _padded(values: list[int], multiple: int) -> NDArray[np.int64]:
    """As many zeros after the values as make a multiple."""
    return np.array(values + [0] * (-len(values) % multiple), np.int64)
