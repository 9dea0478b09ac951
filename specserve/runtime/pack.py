"""Packs scheduled sequences into the arrays of one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specserve.ops import AttentionRows
from specserve.types import Ids, ScheduledSeq, Sequence


@dataclass(slots=True)
class Step:
    """What one step does: who runs, with slots reserved, and what of the budget is left for drafts."""

    seqs: list[ScheduledSeq]
    num_tokens_left: int
    num_logits_left: int  # rows of logits
    preempted: list[Sequence] = field(default_factory=list)  # to make room for it

    @property
    def sampled(self) -> list[ScheduledSeq]:
        return [each for each in self.seqs if each.sampled]

    @property
    def decoding(self) -> list[ScheduledSeq]:
        """Those that compute their last token and no other; a chunk of one token that ends before is none of them."""
        return [each for each in self.seqs if each.sampled and each.num_new == 1]


def num_logit_rows(sampled: Iterable[ScheduledSeq]) -> int:
    """How many rows of logits these sequences have together."""
    return sum(len(each.draft) + 1 for each in sampled)


@dataclass(slots=True)
class StepInput:
    """One step as plain arrays, without live objects: it may be copied to a device's static buffers, or sent. Rows are
    those of sequence after sequence, then padding."""

    token_ids: NDArray[np.int64]  # [num_rows]
    positions: NDArray[np.int64]  # [num_rows]
    logit_rows: NDArray[np.int64]  # [rows to be sampled, then rows to be scored, padded]
    rows: AttentionRows


@dataclass(slots=True)
class ScoredPrompt:
    """Tokens of a prompt whose log-probabilities are asked for, one row of logits each."""

    seq: Sequence
    tokens: list[int]


def pack(step: Step, multiple: int) -> tuple[StepInput, list[ScoredPrompt]]:
    """Lay out one step: sequence after sequence its own tokens, then its draft, padded to a multiple of rows. Sets
    first_row and logits_start. The prompts that are scored have the rows of logits behind those that are sampled, in
    their order; every row whose next token is in the prompt is scored.

    A tree node's position is that of its depth, whatever its row.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    scored_rows: list[int] = []
    starts = [0]
    parents: list[int] = []
    scored: list[ScoredPrompt] = []
    for each in step.seqs:
        seq, draft, row = each.seq, each.draft, starts[-1]
        stop = each.start + each.num_new
        token_ids += seq.tokens[each.start : stop]
        positions += range(each.start, stop)
        if len(draft):
            token_ids += draft.tokens.tolist()
            positions += range(stop, stop + len(draft)) if draft.is_chain else (draft.depths + stop).tolist()
        rows = each.num_new + len(draft)
        parents += range(-1, rows - 1) if draft.is_chain else tree_rows(each.num_new, draft.parents).tolist()
        each.first_row = row
        if each.sampled:
            each.logits_start = len(sampled)
            sampled += range(row + each.num_new - 1, row + rows)
        if unscored := _unscored(seq, each.num_new):
            scored.append(ScoredPrompt(seq, seq.tokens[unscored.start : unscored.stop]))
            scored_rows += range(row + unscored.start - 1 - each.start, row + unscored.stop - 1 - each.start)
        starts.append(len(token_ids))
    inputs = StepInput(
        token_ids=padded(token_ids, multiple),
        positions=padded(positions, multiple),
        logit_rows=padded(sampled + scored_rows, multiple),
        rows=AttentionRows.pack(
            starts,
            [each.start for each in step.seqs],
            [each.seq.blocks.ids for each in step.seqs],
            parents,
            multiple,
        ),
    )
    return inputs, scored


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


def tree_rows(num_before: int, parents: Ids) -> Ids:
    """Parent rows of a chain of `num_before` tokens and a tree behind its last one, whose own parents, -1 for that
    token, count its nodes."""
    own = np.arange(-1, num_before - 1, dtype=np.int32)
    return np.concatenate((own, np.where(parents < 0, num_before - 1, parents + num_before))).astype(np.int32)


def padded(values: list[int], multiple: int) -> NDArray[np.int64]:
    """As many zeros after the values as make a multiple."""
    return np.array(values + [0] * (-len(values) % multiple), np.int64)
