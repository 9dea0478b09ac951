"""A drafter that proposes nothing and keeps the hidden states that it is shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence as Many
from typing import Any

import torch
from torch import Tensor

from specserve.machine.worker import Outcome
from specserve.speculation.base import DraftRequest, Needs, SequenceView, StepReport
from specserve.speculation.host import DraftHost
from specserve.types import Draft


class DirectHost(DraftHost):
    """Calls its drafter on the engine's thread, as the engine calls those of drafters/."""

    def _call(self, function: Callable[[], Any], num_drafts: int = 1) -> Outcome:
        return Outcome(function(), None)


def rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`; what is beyond its largest number becomes that."""
    largest = torch.finfo(dtype).max
    return states.clamp(-largest, largest).to(dtype)


class Recorder:
    """Keeps the residual stream behind `layers` of every sequence that ends, until it is taken."""

    def __init__(self, layers: Many[int], dtype: torch.dtype = torch.float32) -> None:
        self.needs = Needs(hidden_layers=tuple(sorted(set(layers))))
        self._layers, self._dtype = tuple(layers), dtype
        self._pieces: dict[SequenceView, list[tuple[int, Tensor]]] = {}
        self._ended: defaultdict[tuple[int, ...], list[tuple[int, Tensor]]] = defaultdict(list)

    def begin(self, seq: SequenceView) -> None:
        self._pieces[seq] = []

    def observe(self, step: StepReport) -> None:
        for seq in step.preempted:
            self._pieces[seq] = []
        if not step.seqs:
            return
        states = rounded(torch.stack([step.hidden[layer] for layer in self._layers], 1), self._dtype).cpu()
        for report in step.seqs:
            self._pieces[report.seq].append((report.start, states[report.kept_rows]))

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [Draft.empty()] * len(requests)

    def end(self, seq: SequenceView) -> None:
        pieces = self._pieces.pop(seq)
        if pieces:
            self._ended[tuple(seq.tokens)].append((pieces[0][0], torch.cat([states for _, states in pieces])))

    def take(self, tokens: Many[int]) -> tuple[int, Tensor]:
        """Of a sequence that ended with these tokens, prompt and output: which was the first that was computed, as
        those before it were in the prefix cache, and the states from there on, [n, layers, hidden]; the last token has
        none."""
        found = self._ended[tuple(tokens)]
        taken = found.pop()
        if not found:
            del self._ended[tuple(tokens)]
        return taken
