"""Drives a drafter without an engine, along sequences that the caller extends: for replays of recordings, and tests."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from specserve.errors import ConfigError
from specserve.speculation.base import Drafter, DraftRequest, SequenceReport, SequenceView, StepReport
from specserve.speculation.check import checked
from specserve.types import Draft, Ids, Sequence, Verdict


class NoTarget:
    """A DraftContext without a model. Whatever needs one raises ConfigError."""

    vocab_size = 2**31  # of any width
    max_model_len = 2**31
    verification = "coupled"
    memory_bytes: int | None = None

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"This drafter needs the target model (its {name}), and there is none.")


class Driver:
    """Says to a drafter what an engine would say of some sequences."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self._views: dict[Sequence, SequenceView] = {}

    def begin(self, seq: Sequence) -> None:
        self._views[seq] = SequenceView(seq, 0)
        self.drafter.begin(self._views[seq])

    def propose(self, seqs: Many[Sequence], num_tokens: Many[int]) -> list[Draft]:
        asked = zip(seqs, num_tokens, strict=True)
        return self.drafter.propose([DraftRequest(self._views[seq]._update(), count) for seq, count in asked])

    def observe(
        self,
        seqs: Many[Sequence],
        verdicts: Many[Verdict],
        drafts: Many[Draft] | None = None,
        top: Ids | None = None,
    ) -> None:
        """What the target said of drafts, which is in the sequences' tokens already; `top` as StepReport has it, of all
        rows of a sequence, its last token and the draft's nodes, after those of the one before."""
        reports: list[SequenceReport] = []
        row = 0
        for seq, verdict, draft in zip(seqs, verdicts, drafts or [Draft.empty()] * len(seqs), strict=True):
            start = len(seq.tokens) - len(verdict.tokens) - 1
            reports.append(SequenceReport(self._views[seq]._update(), start, 1, draft, verdict, row, row))
            row += 1 + len(draft)
        self.drafter.observe(StepReport(reports, top=top))

    def end(self, seq: Sequence) -> None:
        self.drafter.end(self._views.pop(seq)._update())


def fault(draft: Any, budget: int, vocab_size: int) -> str | None:
    """The word for what is wrong with a draft, as `checked` has it; None for one that may be verified."""
    found = checked(draft, budget, vocab_size, is_ours=True)
    return found if isinstance(found, str) else None
