"""Packs rows of sequences into the arrays of one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specserve.cache.cache import begun
from specserve.ops import AttentionRows
from specserve.sampling.inputs import NOTHING, SamplingInput, ScoredTokens
from specserve.types import ScheduledSeq, Sequence


@dataclass(slots=True)
class Step:
    """What one step does: who runs, with slots reserved, and what of the budget is left for drafts."""

    seqs: list[ScheduledSeq]
    num_tokens_left: int
    num_logits_left: int  # rows of logits
    preempted: list[Sequence] = field(default_factory=list)  # to make room for it
    asking_s: float = 0.0  # that asking for its drafts took
    outlook: Any = None  # what drafting expects of it, until it ends

    @property
    def sampled(self) -> list[ScheduledSeq]:
        return [each for each in self.seqs if each.sampled]

    @property
    def decoding(self) -> list[ScheduledSeq]:
        """Those that compute their last token and no other; a chunk of one token that ends before is none of them."""
        return [each for each in self.seqs if each.sampled and each.num_new == 1]


class SequenceRows(NamedTuple):
    """What one sequence gives to a step, by value."""

    tokens: Many[int]
    start: int  # the logical index of the first row; so many tokens have KV before the step
    blocks: Many[int]  # that hold the KV of these, and will hold the rows'
    parents: Many[int] | None = None  # [tokens] the row that each follows, -1: the token before `start`; None: a chain
    num_logits: int = 0  # rows that have logits, the last ones
    scored: range = range(0)  # rows that have logits, too, which come after those of all sequences' last ones
    is_block: bool = False  # whether the rows of a chain see each other
    adapter: int = -1  # the slot of its adapter; negative: none


@dataclass(slots=True)
class StepInput:
    """One step by value, without live objects: it may be copied to a device's static buffers, or sent. Rows are those
    of sequence after sequence, then padding."""

    token_ids: NDArray[np.int64]  # [num_rows]
    positions: NDArray[np.int64]  # [num_rows]
    logit_rows: NDArray[np.int64]  # [rows of all sequences' `num_logits`, then of all `scored`, padded]
    rows: AttentionRows
    sampling: SamplingInput = NOTHING
    adapters: NDArray[np.int64] | None = None  # [num_rows] slots, negative: none; None: no row has any


def pack(seqs: Iterable[SequenceRows], multiple: int) -> StepInput:
    """Lay out one step: sequence after sequence, padded to a multiple of rows. A tree node's position is that of its
    depth, whatever its row."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    scored_rows: list[int] = []
    starts, cached, tables = [0], [], []
    parents: list[int] = []
    adapters: list[tuple[int, int]] = []  # of each sequence, and its rows
    for tokens, start, blocks, own_parents, num_logits, scored, is_block, adapter in seqs:
        row, count = starts[-1], len(tokens)
        token_ids += tokens
        if own_parents is None:
            positions += range(start, start + count)
            parents += range(-1, count - 1)
            if is_block and count > 1:
                parents[row] = count - 1
        else:
            for parent in own_parents:
                positions.append(positions[row + parent] + 1 if parent >= 0 else start)
            parents += own_parents
        logit_rows += range(row + count - num_logits, row + count)
        if scored:
            scored_rows += range(row + scored.start, row + scored.stop)
        starts.append(row + count)
        cached.append(start)
        tables.append(blocks)
        adapters.append((adapter, count))
    padding = [0] * (-len(token_ids) % multiple)
    logit_rows += scored_rows
    logit_rows += [0] * (-len(logit_rows) % multiple)
    num_rows = len(token_ids) + len(padding)
    # One array, as numpy takes as long for each as for twenty numbers.
    numbers = np.array(token_ids + padding + positions + padding + logit_rows, np.int64)
    return StepInput(
        token_ids=numbers[:num_rows],
        positions=numbers[num_rows : 2 * num_rows],
        logit_rows=numbers[2 * num_rows :],
        rows=AttentionRows.pack(starts, cached, tables, parents, multiple),
        adapters=_slots_of_rows(adapters, num_rows) if any(slot >= 0 for slot, _ in adapters) else None,
    )


def _slots_of_rows(seqs: list[tuple[int, int]], num_rows: int) -> NDArray[np.int64]:
    """Of sequences' slots and numbers of rows."""
    slots = np.full(num_rows, -1, np.int64)
    found = np.repeat(*np.array(seqs).T)
    slots[: len(found)] = found
    return slots


def pack_step(step: Step, multiple: int) -> tuple[StepInput, list[Sequence]]:
    """Pack what is scheduled: of each sequence its own tokens, then its draft. Sets first_row and logits_start. Returns
    the sequences whose prompts are scored, too, in the order of their rows of logits: those whose next token is in the
    prompt, after all rows that are sampled."""
    rows: list[SequenceRows] = []
    scored: dict[Sequence, ScoredTokens] = {}
    num_rows = num_logits = 0
    no_rows = range(0)
    for each in step.seqs:
        seq, draft, start, num_new = each.seq, each.draft, each.start, each.num_new
        tokens, parents = seq.tokens[start : start + num_new], None
        if start == len(seq.tokens):  # it comes with the step under way, and is put here then
            tokens = [0]
        if len(draft):
            tokens += draft.tokens.tolist()
            if not draft.is_chain:
                parents = [*range(-1, num_new - 1), *(num_new + parent for parent in draft.parents.tolist())]
        count = len(tokens)
        own_logits = count - num_new + 1 if each.sampled else 0
        score = no_rows
        if seq.params.prompt_logprobs is not None and (unscored := _unscored(seq, num_new)):
            scored[seq] = ScoredTokens(seq.tokens[unscored.start : unscored.stop], seq.params.prompt_logprobs)
            score = range(unscored.start - 1 - start, unscored.stop - 1 - start)
        slot = -1 if seq.adapter is None else seq.adapter.slot
        rows.append(SequenceRows(tokens, start, seq.blocks.ids, parents, own_logits, score, adapter=slot))
        each.first_row, each.logits_start = num_rows, num_logits
        num_rows += count
        num_logits += own_logits
    packed = pack(rows, multiple)
    packed.sampling = SamplingInput.of(step.sampled, scored.values())
    return packed, list(scored)


def _unscored(seq: Sequence, count: int) -> range:
    """The indexes of prompt tokens that this chunk's rows predict (row i predicts token i + 1) and that were not
    scored before a preemption."""
    if seq.params.prompt_logprobs is None:
        return range(0)
    first = max(begun(seq) + 1, len(seq.prompt_logprobs))
    return range(first, min(begun(seq) + count + 1, seq.num_prompt))


def num_shared_rows(seq: Sequence, count: int) -> int:
    """How many rows of a chunk have logits, but for one, which every sequence has to itself: at its end the row that is
    judged, before it the first that is scored."""
    return max(0, len(_unscored(seq, count)) - (begun(seq) + count < len(seq.tokens)))


def most_tokens(seq: Sequence, shared_rows: int) -> int:
    """How long a chunk with no more than so many shared rows may be: at least one token, or any number where nothing is
    scored."""
    first = max(begun(seq) + 1, len(seq.prompt_logprobs))
    scores = seq.params.prompt_logprobs is not None and first < seq.num_prompt
    return shared_rows + first - begun(seq) if scores else len(seq.tokens)
