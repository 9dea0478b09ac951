"""Drafts with a head that guesses the target's next hidden state, and with it the token behind, again and again."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from specserve.speculation.base import DraftRequest, Needs, SequenceReport, SequenceView, StepReport
from specserve.speculation.draft_sampler import DraftSampler, checked_flag, checked_probability
from specserve.speculation.likeliest import Passes, checked_top_k
from specserve.speculation.models import MOST_MISSING, DraftInput, DraftOutput, DraftRunner, ModelContext
from specserve.types import Draft


class FeatureDrafter:
    """Drafts with a head of `kind`, that which context.load_head finds by the option `head`.

    The head's layers have their keys and values beside the target's. At position i it reads the target's hidden state
    there and token i + 1; behind what the target has computed its own output stands in for the hidden state, and is
    replaced by the true one when that is known. Each token of a draft is one pass over all sequences that still want
    one. A draft ends before a token to which the head gives less than `min_probability`. It is a chain with the second
    best tokens beside it, unless `second_best` is false, or a tree of `top_k` candidates behind each node. Sequences
    whose prompt was computed while another drafter ran get no drafts. Raises ModelError for a head that cannot be run
    or was made for another target.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        context: ModelContext,
        head: str | None = None,
        min_probability: float = 0.0,
        top_k: int = 1,
        second_best: bool = True,
    ) -> None:
        self._min_probability, self._top_k = checked_probability(min_probability), checked_top_k(top_k)
        self._second_best = checked_flag(second_best)
        self._context = context
        self._head = context.load_head(head, self.kind)
        self._layers: tuple[int, ...] = self._head.head.hidden_layers or (context.num_layers - 1,)
        self.needs = Needs(hidden_layers=tuple(sorted(set(self._layers))), cost_class="passes", reads_next=True)
        self._sampler = DraftSampler(context.verification, context.vocab_size, context.ops)
        self._runner = context.runner(self._head)
        self._known: dict[SequenceView, _Known] = {}

    def begin(self, seq: SequenceView) -> None:
        self._known[seq] = _Known()

    def end(self, seq: SequenceView) -> None:
        self._known.pop(seq, None)

    def observe(self, step: StepReport) -> None:
        for seq in step.preempted:
            self._known[seq] = _Known()
        full = []
        for report in step.seqs:
            if rows := report.kept_rows:
                known, one_piece = self._known[report.seq], slice(rows[0], rows[-1] + 1)
                kept = one_piece if rows[-1] - rows[0] == len(rows) - 1 else rows  # a view, but behind a tree
                known.add(report, [step.hidden[layer][kept] for layer in self._layers], self._runner)
                if known.num_unread >= (MOST_MISSING if report.num_new == 1 else 1):
                    full.append(report.seq)
        self._read(full)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        growing = [each for each in requests if each.num_tokens > 0 and self._known[each.seq].is_whole]
        if not growing:
            return [Draft.empty()] * len(requests)
        how = self._top_k, self._min_probability, self._head.ids
        passes = Passes(self._sampler, growing, *how, reads_hidden=True, second_best=self._second_best)
        if sum(max(self._known[seq].num_unread, 1) for seq in passes.seqs) > self._runner.most_rows:
            self._read(passes.seqs)
        out = self._pass([(seq, self._known[seq].num_unread) for seq in passes.seqs], num_logits=1)
        if not passes.write_chains(self._runner, out):
            while inputs := passes.after(out):
                out = self._runner.run(inputs)
        drafts = passes.drafts()
        return [drafts.get(each.seq, Draft.empty()) for each in requests]

    def _read(self, seqs: list[SequenceView]) -> None:
        """All that these sequences have unread, as many rows at once as the runner takes."""
        while left := [seq for seq in seqs if self._known[seq].num_unread]:
            room, some = self._runner.most_rows, []
            for seq in left:
                if count := min(room, self._known[seq].num_unread):
                    some.append((seq, count))
                    room -= count
            self._pass(some)

    def _pass(self, some: list[tuple[SequenceView, int]], num_logits: int = 0) -> DraftOutput:
        """One over so many unread rows of each sequence, or over the last row again where there are none."""
        waiting = [self._known[seq].first(count) for seq, count in some if count]
        states = self._states(waiting) if waiting else torch.empty(0, 1)
        inputs, start = [], 0
        for seq, count in some:
            inputs.append(self._known[seq].read(seq, states[start : start + count], num_logits))
            start += count
        return self._runner.run(inputs)

    def _states(self, some: list[list[Tensor]]) -> Tensor:
        """The head's own hidden states of rows of which it is shown the target's, by layer, for some sequences."""
        shown = some[0] if len(some) == 1 else [torch.cat(parts) for parts in zip(*some, strict=True)]
        if not self._head.head.hidden_layers:
            shown = [self._context.final_norm(shown[0])]
        states: Tensor = self._head.states(shown)
        return states


class _Known:
    """What the target says of a sequence's tokens that the head has not read yet, and the head's hidden state of the
    last one that it has, from which a draft begins where none is unread."""

    def __init__(self) -> None:
        self.is_whole = True  # all that stands before has been read, but for a few
        self._start: int | None = None  # of the first row that is unread
        self._unread: list[Tensor] = []  # by layer [rows, target's hidden]
        self._last: Tensor | None = None  # [1, hidden]

    @property
    def num_unread(self) -> int:
        return len(self._unread[0]) if self._unread else 0

    def add(self, report: SequenceReport, hidden: list[Tensor], runner: DraftRunner) -> None:
        if self._start is None:
            self._start = report.start
            self.is_whole = runner.skip_missing_kv(report.seq, report.start)
        count = max(0, len(report.seq.tokens) - 1 - report.start)  # what ended it has nothing behind
        if not self.is_whole or not count:
            return
        if self.num_unread:
            self._unread = [torch.cat((own, new[:count])) for own, new in zip(self._unread, hidden, strict=True)]
        else:
            self._unread = [new[:count].clone() for new in hidden]

    def first(self, count: int) -> list[Tensor]:
        """So many unread rows."""
        return [each[:count] for each in self._unread]

    def read(self, seq: SequenceView, states: Tensor, num_logits: int) -> DraftInput:
        """The unread rows with these states, which are read then, or the last row again. Behind each row stands a
        token."""
        assert self._start is not None, "there are rows"
        count = len(states)
        if count:
            self._last = states[-1:].clone()
            self._start, self._unread = self._start + count, [each[count:] for each in self._unread]
        assert self._last is not None, "it was read"
        start, features = (self._start - count, states) if count else (self._start - 1, self._last)
        tokens = seq.tokens[start + 1 : start + 1 + len(features)]
        return DraftInput(seq, start, tokens, num_logits=num_logits, features=features)
