"""Calls a drafter so that nothing it does can end or alter a request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specserve.registry import DRAFTERS
from specserve.speculation.check import fault
from specserve.speculation.worker import Inline, Outcome, Stuck, Worker
from specserve.types import Draft, Drafter, Sequence, Verdict

NONE = "none"  # the name of plain decoding

_log = logging.getLogger(__name__)


class DraftHost:
    """Calls a drafter so that nothing it does can end or alter a request: every draft is checked, and one that breaks a
    rule, or never comes, is replaced by an empty one and counted.

    A drafter from another package runs on a thread of its own, all calls in order, and a call that takes longer than
    `timeout_s` seconds switches it off for good. One of drafters/ is ours and is called directly: two hand-overs
    between threads a step cost a small model a tenth of its speed. Without a drafter every method returns at once.

    `name` is what requests and logs call the drafter; without one, "none" or the name of its class. `active`: whether a
    proposal can come, as there is a drafter that was neither switched off nor closed. `dropped` counts lost drafts by
    reason: those of `check.fault`, "count" (not one draft for each sequence), "exception" and "timeout"; a begin,
    commit or end that failed counts one.
    """

    def __init__(self, drafter: Drafter | None, vocab_size: int, timeout_s: float, name: str | None = None) -> None:
        self.name = name or (NONE if drafter is None else type(drafter).__name__)
        self.active = drafter is not None
        self.vocab_size = vocab_size
        self.timeout_s = timeout_s
        self.wants_hidden = bool(getattr(drafter, "wants_hidden", False))
        self.dropped: Counter[str] = Counter()
        self.num_dropped = 0  # the sum of `dropped`
        self._drafter = drafter
        self._expected: set[Sequence] = set()  # that have not been scheduled
        self._begun: set[Sequence] = set()
        self._worker: Worker | Inline | None = None
        if drafter is not None:
            is_ours = type(drafter).__module__.startswith(f"{DRAFTERS.package}.")
            self._worker = Inline() if is_ours else Worker("specserve-drafter", timeout_s)

    def begin(self, seq: Sequence) -> None:
        """Expect a sequence. The drafter hears of it with the first step that it has a part in, and never if it ends
        before: what waits costs nothing. One whose begin fails gets no drafts, and is not spoken of again."""
        if self._drafter is not None:
            self._expected.add(seq)

    def _begin(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            if seq in self._expected:
                self._expected.remove(seq)
                if self._drafter is not None and self._call(partial(self._drafter.begin, seq)).error is None:
                    self._begun.add(seq)

    def propose(self, seqs: list[Sequence], budget: list[int]) -> list[Draft]:
        """One draft for each sequence of a step, of at most budget[i] tokens; the drafter is asked for those with a
        budget."""
        if self._expected:
            self._begin(seqs)
        drafts = [Draft.empty()] * len(seqs)
        if self._drafter is None:
            return drafts
        asked = [i for i, seq in enumerate(seqs) if budget[i] > 0 and seq in self._begun]
        if not asked:
            return drafts
        limits = [budget[i] for i in asked]
        propose = partial(_propose, self._drafter, [seqs[i] for i in asked], limits, self.vocab_size)
        for i, answer in zip(asked, self._call(propose, len(asked)).value or (), strict=False):  # (): the call failed
            if isinstance(answer, Draft):
                drafts[i] = answer
            else:
                self._drop(answer, "a draft broke a rule of the contract")
        return drafts

    def commit(self, seqs: list[Sequence], verdicts: list[Verdict], hidden: torch.Tensor | None) -> None:
        """Tell the drafter what the target said. Sequences whose begin failed are left out, except when there are
        hidden states: their rows belong to all of `seqs`."""
        if self._drafter is None:
            return
        if hidden is None and not self._begun.issuperset(seqs):
            known = [i for i, seq in enumerate(seqs) if seq in self._begun]
            seqs, verdicts = [seqs[i] for i in known], [verdicts[i] for i in known]
        if seqs:
            self._call(partial(self._drafter.commit, seqs, verdicts, hidden))

    def end(self, seq: Sequence) -> None:
        self._expected.discard(seq)
        if seq in self._begun:
            self._begun.remove(seq)
            if self._drafter is not None:
                self._call(partial(self._drafter.end, seq))

    def close(self) -> None:
        """Let go of the drafter and its thread."""
        if self._worker is not None:
            self._worker.stop()
        self._drafter = self._worker = None
        self.active = False
        self._expected.clear()
        self._begun.clear()

    def _call(self, function: Callable[[], Any], num_drafts: int = 1) -> Outcome:
        """Run `function` on the thread; a failure is counted `num_drafts` times."""
        assert self._worker is not None
        outcome = self._worker.call(function)
        if isinstance(outcome.error, Stuck):
            self._drop("timeout", f"{outcome.error}, so the drafter is switched off", num_drafts)
            self.close()
        elif outcome.error is not None:
            self._drop("exception", "the drafter failed", num_drafts, outcome.error)
        return outcome

    def _drop(self, reason: str, what: str, num_drafts: int = 1, error: BaseException | None = None) -> None:
        """Count by reason; the first of each reason is logged, with the traceback if there is one."""
        if reason not in self.dropped:
            _log.warning("Drafter %s, draft dropped (%s): %s.", self.name, reason, what, exc_info=error)
        self.dropped[reason] += num_drafts
        self.num_dropped += num_drafts


def _propose(drafter: Drafter, seqs: list[Sequence], budget: list[int], vocab_size: int) -> list[Draft | str]:
    """For each sequence its draft, or the word for what is wrong with it. Runs on the drafter's thread, where even the
    checks of a foreign object may fail or hang."""
    drafts: Any = drafter.propose(seqs, list(budget))
    if not isinstance(drafts, list):
        return ["type"] * len(budget)
    if len(drafts) != len(budget):
        return ["count"] * len(budget)
    return [fault(draft, limit, vocab_size) or draft for draft, limit in zip(drafts, budget, strict=True)]
