"""Calls drafters so that nothing they do can end or alter a request: a drafter that fails costs speed only."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Many
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from specserve.config import VERIFICATIONS
from specserve.machine.worker import Outcome, Stuck, Worker, run
from specserve.registry import DRAFTERS, NONE
from specserve.speculation.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    Needs,
    SequenceReport,
    SequenceView,
    StepReport,
)
from specserve.speculation.check import checked
from specserve.speculation.lookup import PartMaker
from specserve.types import Draft, Ids, ScheduledSeq, Sequence, Verdict

_log = logging.getLogger(__name__)
D = TypeVar("D", bound=Drafter)


class DraftHost:
    """One drafter: every draft of it is copied and checked, and one that breaks a rule, or never comes, is replaced by
    an empty one and counted. What it is shown is copied, too, but for a step's tensors where it is ours.

    A drafter from another package runs on a thread of its own, all calls in order, and a call that takes longer than
    `timeout_s` seconds switches it off for good. One of drafters/ is ours and is called directly: two hand-overs
    between threads a step cost a small model a tenth of its speed. Without a drafter every method returns at once.

    `name` is what requests and logs call the drafter; without one, "none" or the name of its class. `parts` are the
    hosts of the drafters that draft under this name together: itself alone, but for "auto". `is_trimmable`: whether
    drafts may be cut and merged with others, `is_head`: whether asking takes long enough to think first; `is_fixed`
    says that verification asks for no distribution that a model's drafts were drawn from. `active`: whether a proposal
    can come, as there is a drafter that was neither switched off nor closed. `dropped` counts lost drafts by reason:
    those of `check.checked`, "count" (not one draft for each sequence), "exception" and "timeout"; a begin, observe,
    end or close that failed counts one.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        vocab_size: int,
        timeout_s: float,
        name: str | None = None,
        parts: Many[DraftHost] = (),
        is_fixed: bool = False,
    ) -> None:
        self.name = name or (NONE if drafter is None else type(drafter).__name__)
        self.parts = tuple(parts) or (self,)
        self.active = drafter is not None or bool(parts)
        self.vocab_size = vocab_size
        self.timeout_s = timeout_s
        self.needs: Needs = Needs.of([part.needs for part in parts] or [getattr(drafter, "needs", Needs())])
        self.is_head = self.needs.cost_class in ("pass", "passes")
        self.is_resting = False  # as it does not pay for being told of steps: it has no sequences
        self.dropped: Counter[str] = Counter()
        self.make: PartMaker | None = None  # another one, with the same options
        self._drafter = drafter
        self._expected: set[Sequence] = set()  # that have not been scheduled
        self._views: dict[Sequence, SequenceView] = {}  # of those that have begun
        self._is_ours = type(drafter).__module__.startswith(f"{DRAFTERS.package}.")
        is_foreign = drafter is not None and not self._is_ours
        self._worker = Worker("specserve-drafter", timeout_s, torch.no_grad) if is_foreign else None
        # What ours look up is one token for sure, at any length: it may be cut, and merged with what others found.
        # So is what a head guesses where verification asks for no distribution.
        is_sure = self._is_ours and (self.needs.cost_class == "free" or (self.is_head and is_fixed))
        self.is_trimmable: bool = all(part.is_trimmable for part in parts) and (is_sure or drafter is None)

    @property
    def expects(self) -> bool:
        """Whether it is to hear of sequences, once they are proposed for."""
        return bool(self._expected)

    @property
    def num_dropped(self) -> int:
        return self.dropped.total()

    @classmethod
    def of(
        cls,
        name: str,
        makers: Mapping[str, PartMaker],
        context: DraftContext,
        vocab_size: int,
        timeout_s: float,
        there: Mapping[str, DraftHost] = MappingProxyType({}),
    ) -> DraftHost:
        """What drafts under a name, of what makes its drafters; those that are `there` already are not made again."""
        is_fixed = context.verification == VERIFICATIONS[0]
        parts = []
        for part, make in makers.items():
            if part in there:
                parts.append(there[part])
            elif (drafter := make(context)) is not None:
                parts.append(cls(drafter, vocab_size, timeout_s, part, is_fixed=is_fixed))
                parts[-1].make = make
        is_one = parts and list(makers) == [name]
        return parts[0] if is_one else cls(None, vocab_size, timeout_s, name, parts)

    def split(self, wrap: Callable[[Any], D]) -> D:
        """Let what `wrap` makes of the drafter take its place, which calls it as it is called. Between steps."""
        found = wrap(self._drafter)
        self._drafter = found
        return found

    def begin(self, seq: Sequence) -> None:
        """Expect a sequence. The drafter hears of it with the first step that it has a part in, and never if it ends
        before: what waits costs nothing. One whose begin fails gets no drafts, and is not spoken of again."""
        if self._drafter is not None:
            self._expected.add(seq)

    def propose(self, seqs: list[Sequence], budget: list[int]) -> list[Draft]:
        """One draft for each sequence of a step, of at most budget[i] tokens; the drafter is asked for those with a
        budget, and told first of those that it has not heard of."""
        for seq in seqs if self._expected else ():
            if seq in self._expected:  # none is any more where the drafter was switched off by the one before
                self._expected.remove(seq)
                view = self._views[seq] = SequenceView(seq, self.vocab_size)
                if self._tell("begin", [view], view).error is not None:
                    self._forget(seq)
        drafts = [Draft.empty()] * len(seqs)
        asked = [i for i, seq in enumerate(seqs) if budget[i] > 0 and seq in self._views]
        if asked:
            requests = [DraftRequest(self._views[seqs[i]], budget[i]) for i in asked]
            propose = partial(_propose, self._drafter, requests, self.vocab_size, self._is_ours)
            for i, answer in zip(asked, self._call(propose, len(asked)).value or (), strict=False):  # (): it failed
                if isinstance(answer, Draft):
                    drafts[i] = answer
                else:
                    self._drop(answer, "a draft broke a rule of the contract")
        return drafts

    def observe(
        self,
        step: list[ScheduledSeq],
        verdicts: Mapping[Sequence, Verdict],
        hidden: Mapping[int, Tensor],
        preempted: list[Sequence],
        top: Ids | None = None,
    ) -> None:
        """Tell the drafter what a step did for its sequences, but for those that failed in it, with the layers'
        hidden states [rows of the step, hidden] and as many of the best tokens [rows of logits, any number] as it
        needs."""
        if self._drafter is None or not self.needs.observes:
            return
        views = self._views
        reports = [
            SequenceReport(views[s.seq], s.start, s.num_new, s.draft, verdicts.get(s.seq), s.first_row, s.logits_start)
            for s in step
            if s.seq in views and (s.seq in verdicts or not s.sampled)
        ]
        lost = [views[seq] for seq in preempted if seq in views]
        if reports or lost:
            shown = {layer: hidden[layer] for layer in self.needs.hidden_layers}
            best = top[:, : self.needs.top_k] if top is not None and self.needs.top_k else None
            told = StepReport(reports, shown, lost, best)
            self._tell("observe", [report.seq for report in reports], told if self._is_ours else _copied(told))

    def end(self, seq: Sequence) -> None:
        self._expected.discard(seq)
        if (view := self._views.get(seq)) is not None:
            self._tell("end", [view], view)
            self._forget(seq)

    def close(self) -> None:
        """Let go of the drafter and its thread, when it has closed. It has `timeout_s` seconds for that; one of ours is
        called on a thread, too, as it may write a file."""
        if self.active and callable(getattr(type(self._drafter), "close", None)):
            self._worker = self._worker or Worker("specserve-drafter", self.timeout_s, torch.no_grad)
            self._tell("close", ())
        self._let_go()

    def _let_go(self) -> None:
        self._drafter = self._worker = None
        self.active = False
        self._expected.clear()
        for seq in list(self._views):
            self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        if (view := self._views.pop(seq, None)) is not None:
            view._live = None

    def _tell(self, verb: str, seqs: Many[SequenceView], *args: Any) -> Outcome:
        """Call a method of the drafter, of which `seqs` are told what is new of them."""
        return self._call(partial(_told, self._drafter, verb, seqs, *args))

    def _call(self, function: Callable[[], Any], num_drafts: int = 1) -> Outcome:
        """Run `function`, on the thread if there is one; a failure is counted `num_drafts` times."""
        outcome = run(function) if self._worker is None else self._worker.call(function)
        if type(outcome.error) is Stuck:
            self._drop("timeout", f"{outcome.error}, so the drafter is switched off", num_drafts)
            self._let_go()
        elif outcome.error is not None:
            self._drop("exception", "the drafter failed", num_drafts, "\n" + outcome.told)
        return outcome

    def _drop(self, reason: str, what: str, num_drafts: int = 1, traceback: str = "") -> None:
        """Count by reason; the first of each reason is logged, with the traceback if there is one."""
        if reason not in self.dropped:
            _log.warning("Drafter %s, draft dropped (%s): %s.%s", self.name, reason, what, traceback)
        self.dropped[reason] += num_drafts


def _told(drafter: Any, verb: str, seqs: Many[SequenceView], *args: Any) -> Any:
    """Runs on the drafter's thread, where even the look at a foreign object's attributes may fail or hang."""
    for seq in seqs:
        seq._update()
    return getattr(drafter, verb)(*args)


def _propose(drafter: Any, requests: list[DraftRequest], vocab_size: int, is_ours: bool) -> list[Draft | str]:
    """For each request a copy of its draft, or the word for what is wrong with it. Runs on the drafter's thread."""
    drafts = _told(drafter, "propose", [seq for seq, _ in requests], requests[:])
    if not isinstance(drafts, list):
        return ["type"] * len(requests)
    if len(drafts := list(drafts)) != len(requests):
        return ["count"] * len(requests)
    found = zip(drafts, requests, strict=True)
    return [checked(draft, request.num_tokens, vocab_size, is_ours) for draft, request in found]


def _copied(step: StepReport) -> StepReport:
    """With nothing that the engine, or its next step, uses."""
    reports = []
    for each in step.seqs:
        draft, said = each.draft, each.verdict
        own = Draft(draft.tokens.copy(), draft.parents.copy(), draft.q, draft.jump_forward)
        reports.append(each._replace(draft=own, verdict=said and Verdict(said.tokens[:], said.path[:])))
    hidden = {layer: rows.clone() for layer, rows in step.hidden.items()}
    return StepReport(reports, hidden, step.preempted, None if step.top is None else step.top.copy())
