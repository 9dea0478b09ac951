"""A block head guesses several tokens in one pass, from masks behind the last token; see BlockSpec for where it was
published."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.draft_sampler import (
    ChainDraft,
    DraftSampler,
    GrowingChains,
    checked_flag,
    checked_probability,
    named_for_auto,
)
from specserve.speculation.models import MOST_MISSING, DraftInput, DraftOutput, HiddenInput, ModelContext
from specserve.types import Draft

PRIORITY = 5
RUNS_MODEL = True


class BlockDrafter:
    """Drafts with `head`, a folder or repository of a block head that was made for the target; by default the one
    that comes along in the zoo, where there is one for it.

    A draft takes one pass of the head, whatever its length, and has no more tokens than the head was made for. What the
    target has computed of a sequence, its hidden states, is written to the head's keys and values before a draft, and
    where nobody asks for one whenever MOST_MISSING tokens wait: who goes on from a prefix of the sequence then lacks no
    more than is passed over. A draft is a chain with the second best tokens beside it, unless `second_best` is false,
    and ends before a token that is given less than `min_probability`; the confidence that some heads were trained to
    give tells less than the token's share, and is not asked. Sequences whose prompt was computed while another drafter
    ran get no drafts. Raises ModelError for a head that cannot be run or was made for another target.
    """

    def __init__(
        self, context: ModelContext, head: str | None = None, min_probability: float = 0.0, second_best: bool = True
    ) -> None:
        self._min_probability, self._second_best = checked_probability(min_probability), checked_flag(second_best)
        self._head = context.load_head(head, "block")
        self._layers: tuple[int, ...] = self._head.head.hidden_layers
        self.needs = Needs(hidden_layers=tuple(sorted(set(self._layers))), cost_class="pass")
        self._sampler = DraftSampler(context.verification, context.vocab_size, context.ops)
        self._runner, self._ops = context.runner(self._head), context.ops
        self._waiting: dict[SequenceView, HiddenInput] = {}  # what the head is yet to be told
        self._most_waiting = min(MOST_MISSING, self._runner.most_rows // 2)  # tokens of a sequence
        # What the head makes of the target's states, float32 [hidden], of the last token that was written. Where the
        # KV is whole that is the one before the newest: the target computes at least that here, whatever it found.
        self._last: dict[SequenceView, Tensor] = {}
        self._draws = self._head.draws(self._sampler.hashed(self._head.spec.vocab_size, self._head.ids))

    @staticmethod
    def suits(context: ModelContext, head: str | None = None, **others: Any) -> bool:
        return named_for_auto(context, head, "block")

    def begin(self, seq: SequenceView) -> None: ...

    def end(self, seq: SequenceView) -> None:
        self._waiting.pop(seq, None)
        self._last.pop(seq, None)

    def observe(self, step: StepReport) -> None:
        for seq in step.preempted:
            self.end(seq)
        full = []
        for report in step.seqs:
            if rows := report.kept_rows:
                one_piece = slice(rows[0], rows[-1] + 1)  # a view, but behind a draft that was a tree
                kept = one_piece if rows[-1] - rows[0] == len(rows) - 1 else rows
                new = HiddenInput(report.seq, report.start, [step.hidden[layer][kept] for layer in self._layers])
                if self._wait(new) >= self._most_waiting:
                    full.append(report.seq)
        self._write(full)

    def _wait(self, new: HiddenInput) -> int:
        """Keep hidden states of a step until they are written; returns of how many tokens of the sequence there are
        some. Those of a chunk are written before the step's are gone."""
        rows, before = len(new.hidden[0]), self._waiting.get(new.seq)
        if rows >= self._most_waiting:
            self._write([new.seq])
        elif before is not None and before.start + len(before.hidden[0]) == new.start:
            hidden = [torch.cat(both) for both in zip(before.hidden, new.hidden, strict=True)]
            new = HiddenInput(new.seq, before.start, hidden)
        else:
            new = HiddenInput(new.seq, new.start, [each.clone() for each in new.hidden])
        self._waiting[new.seq] = new
        return len(new.hidden[0])

    def _write(self, seqs: Iterable[SequenceView]) -> None:
        """Write what waits of these sequences to the head's KV."""
        together: list[HiddenInput] = []
        room = self._runner.most_rows
        for each in [self._waiting.pop(seq) for seq in seqs if seq in self._waiting]:
            if not self._runner.skip_missing_kv(each.seq, each.start):
                continue
            if len(each.hidden[0]) > room:
                self._write_together(together)
                together, room = [], self._runner.most_rows
            together.append(each)
            room -= len(each.hidden[0])
        if together:
            self._write_together(together)

    def _write_together(self, some: list[HiddenInput]) -> None:
        states = self._runner.write(some)
        if self._head.head.has_anchor_inputs:
            rows = [stop - 1 for stop in itertools.accumulate(len(each.hidden[0]) for each in some)]
            self._last.update(zip((each.seq for each in some), states[rows].unbind(), strict=True))  # a copy

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        self._write(seq for seq, most in requests if most)
        how = self._min_probability, self._second_best
        chains = [ChainDraft(seq, self._most(seq, most), *how) for seq, most in requests]
        growing = [chain for chain in chains if chain.most > 0]
        if not growing:
            return [chain.draft() for chain in chains]
        out = self._runner.run(self._blocks(growing))
        seqs = [chain.seq for chain in growing]
        if self._sampler.is_chosen(seqs) and not any(seq.has_grammar for seq in seqs):
            self._draw(growing, out)
        else:
            self._draw_apart(growing, out)
        return [chain.draft() for chain in chains]

    def _draw(self, chains: list[ChainDraft], out: DraftOutput) -> None:
        """All tokens of all drafts at once."""
        lengths = np.array([chain.most for chain in chains])
        firsts, depth = np.cumsum(lengths) - lengths, int(lengths.max())
        rows = firsts + np.minimum(np.arange(depth)[:, None], lengths - 1)  # one that has ended goes on in vain
        before = np.array([chain.seq.tokens[-1] for chain in chains])
        how = self._sampler.arrays([chain.seq for chain in chains], range(depth))
        drawn = self._draws.draw(out.logits, before, rows, *how, out.is_replayed)
        for i, chain in enumerate(chains):
            for token, share, *second in zip(*(part[: chain.most, i].tolist() for part in drawn), strict=True):
                if not chain.take(token, share, (second[0], second[1])):
                    break

    def _draw_apart(self, chains: list[ChainDraft], out: DraftOutput) -> None:
        """Depth after depth, where the distributions that tokens are drawn from are wanted too, or a grammar says what
        may follow each."""
        rows = [0, *itertools.accumulate(chain.most for chain in chains)][: len(chains)]
        growing, depth = GrowingChains(self._sampler, chains, self._head.ids), 0
        while rows:
            here, before = [row + depth for row in rows], [chain.last for chain in growing.chains]
            left = growing.grow(self._logits(out.logits[here], before))
            rows, depth = [rows[i] for i in left], depth + 1

    def _most(self, seq: SequenceView, asked: int) -> int:
        """How many tokens a draft may have; none for a sequence of which the head lacks something."""
        if seq.num_draft_cached < len(seq.tokens) - 1:
            return 0
        most: int = self._head.head.num_proposed
        return min(asked, most)

    def _blocks(self, chains: list[ChainDraft]) -> list[DraftInput]:
        """Of each the last token and masks behind it, which all see each other."""
        head, lasts = self._head.head, [chain.seq.tokens[-1] for chain in chains]
        if head.has_anchor_inputs:
            states = torch.stack([self._last[chain.seq] for chain in chains])
            features = self._head.anchor_inputs(np.array(lasts), states)
        found = []
        for i, (chain, last) in enumerate(zip(chains, lasts, strict=True)):
            tokens = [last, *[head.mask_token_id] * (chain.most - head.samples_anchor)]
            own = features[i, : len(tokens)] if head.has_anchor_inputs else None
            start = len(chain.seq.tokens) - 1
            found.append(DraftInput(chain.seq, start, tokens, None, chain.most, own, not head.is_causal, True))
        return found

    def _logits(self, logits: Tensor, before: list[int]) -> Tensor:
        """With what the token before each adds."""
        ops = self._ops
        ids = torch.tensor(before + [0] * (-len(before) % ops.row_multiple), device=ops.device)
        bias: Tensor | None = self._head.bias(ids)
        return logits if bias is None else logits + bias[: len(logits)]
