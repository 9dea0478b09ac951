"""Drafts the tokens that a sequence's grammar leaves no choice of, as the tokenizer would split them, and nothing else.

The engine itself puts such jump-forward tokens into the drafts of every drafter; this one is for measuring them alone.
"""

from __future__ import annotations

from specserve.speculation.base import DraftContext, DraftRequest, Needs, SequenceView, StepReport
from specserve.types import Draft


class GrammarDrafter:
    """Chains of jump-forward tokens. Right unless the model prefers another spelling of the same text."""

    needs = Needs()

    def __init__(self, context: DraftContext) -> None: ...

    def begin(self, seq: SequenceView) -> None: ...

    def propose(self, requests: list[DraftRequest]) -> list[Draft]:
        return [Draft.chain(seq.jump_forward()[:most], own=range(most)) for seq, most in requests]

    def observe(self, step: StepReport) -> None: ...

    def end(self, seq: SequenceView) -> None: ...
