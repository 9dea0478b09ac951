"""An EAGLE head guesses the target's next hidden state, and with it the token behind, again and again; see
arXiv 2401.15077, 2406.16858 (EAGLE-1, 2) and 2503.01840 (EAGLE-3)."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.speculation.base import (
    DraftContext,
    DraftInput,
    DraftRequest,
    DraftRunner,
    Needs,
    SequenceReport,
    SequenceView,
    StepReport,
)
from specserve.speculation.drawing import Drawing, checked_probability
from specserve.speculation.likeliest import Passes, checked_top_k
from specserve.types import Draft

_MOST_UNREAD = 4  # rows of a sequence that wait for its next draft's first pass, which reads them on the way

RUNS_MODEL = True


class EagleDrafter:
    """Drafts with `head`, a folder or repository of an EAGLE head that was made for the target; by default the one
    that comes along in the zoo, where there is one for it.

    The head's one layer has its keys and values beside the target's. At position i it reads the target's hidden state
    there and token i + 1; behind what the target has computed its own output stands in for the hidden state, and is
    replaced by the true one when that is known. Each token of a draft is one pass over all sequences that still want
    one. A draft ends before a token to which the head gives less than `min_probability`. Sequences whose prompt was
    computed while another drafter ran get no drafts. Raises ModelError for a head that cannot be run or was made for
    another target.
    """

    def __init__(
        self, context: DraftContext, head: str | None = None, min_probability: float = 0.0, top_k: int = 1
    ) -> None:
        self._min_probability, self._top_k = checked_probability(min_probability), checked_top_k(top_k)
        self._context = context
        self._head = context.load_head(head, "eagle")
        self._layers: tuple[int, ...] = self._head.head.hidden_layers or (context.num_layers - 1,)
        self.needs = Needs(hidden_layers=tuple(sorted(set(self._layers))), cost_class="model")
        self._drawing = Drawing(context.verification, context.vocab_size, context.ops)
        self._runner = context.runner(self._head)
        self._known: dict[SequenceView, _Known] = {}

    def begin(self, seq: SequenceView) -> None:
        self._known[seq] = _Known()

    def end(self, seq: SequenceView) -> None:
        self._known.pop(seq, None)

    def observe(self, step: StepReport) -> None:
        for seq in step.preempted:
            self._known[seq] = _Known()
        rows = [report.kept_rows for report in step.seqs]
        if not rows:
            return
        states = self._states(step.hidden, [row for some in rows for row in some])
        waiting: list[DraftInput] = []
        for report, own in zip(step.seqs, torch.split(states, [len(some) for some in rows]), strict=True):
            known = self._known[report.seq]
            known.add(report, own, self._runner)
            if known.num_unread > (_MOST_UNREAD if report.num_new == 1 else 0):
                waiting.append(known.read(report.seq))
        self._read(waiting)

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        growing = [each for each in requests if each.num_tokens > 0 and self._known[each.seq].is_whole]
        if not growing:
            return [Draft.empty()] * len(requests)
        passes = Passes(self._drawing, growing, self._top_k, self._min_probability, self._head.ids, reads_hidden=True)
        known = [(self._known[seq], seq) for seq in passes.seqs]
        if sum(max(each.num_unread, 1) for each, _ in known) > self._runner.most_rows:
            self._read([each.read(seq) for each, seq in known if each.num_unread])
        out = self._runner.run([each.read(seq, 1) for each, seq in known])
        while inputs := passes.after(out):
            out = self._runner.run(inputs)
        drafts = passes.drafts()
        return [drafts.get(each.seq, Draft.empty()) for each in requests]

    def _read(self, inputs: list[DraftInput]) -> None:
        """As many at once as the runner takes."""
        while inputs:
            rows = list(itertools.accumulate(len(each.tokens) for each in inputs))
            count = max(1, bisect.bisect_right(rows, self._runner.most_rows))
            self._runner.run(inputs[:count])
            inputs = inputs[count:]

    def _states(self, hidden: Mapping[int, Tensor], rows: list[int]) -> Tensor:
        """The head's own hidden states of some rows of a step."""
        shown = [hidden[layer][rows] for layer in self._layers]
        if not self._head.head.hidden_layers:
            shown = [self._context.final_norm(shown[0])]
        states: Tensor = self._head.states(shown)
        return states


class _Known:
    """The head's hidden states of a sequence's tokens: those that it has not read yet, or else the one that it read
    last, from which a draft begins."""

    def __init__(self) -> None:
        self.is_whole = True  # all that stands before has been read, but for a few
        self.num_unread = 0
        self._start: int | None = None  # of the first row
        self._rows: list[Tensor] = []

    def add(self, report: SequenceReport, states: Tensor, runner: DraftRunner) -> None:
        if self._start is None:
            self._start = report.start
            self.is_whole = runner.pass_over(report.seq, report.start)
        states = states[: max(0, len(report.seq.tokens) - 1 - report.start)]  # what ended it has nothing behind
        if not self.is_whole or not len(states):
            return
        if not self.num_unread:
            self._start, self._rows = report.start, []
        self._rows.append(states.clone())
        self.num_unread += len(states)

    def read(self, seq: SequenceView, num_logits: int = 0) -> DraftInput:
        """All that was not read, or the last row again. Behind each row stands a token."""
        assert self._start is not None, "there are rows"
        start, states = self._start, torch.cat(self._rows)
        self._start, self._rows, self.num_unread = start + len(states) - 1, [states[-1:]], 0
        tokens = seq.tokens[start + 1 : start + 1 + len(states)]
        return DraftInput(seq, start, tokens, num_logits=num_logits, features=states)
