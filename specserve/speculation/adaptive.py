"""Which sequences' drafters are asked in a step, what of their proposals is verified, and what is learned of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass, field

from specserve.runtime.pack import Step
from specserve.speculation.cost import DecodeCost
from specserve.speculation.planner import Load, Planner
from specserve.speculation.stats import Acceptance, Agreement, OwnAcceptance
from specserve.speculation.tree import Proposals
from specserve.types import ScheduledSeq, Sequence, Verdict

_SHADOW = 0.005  # of a step's time for asking drafters that gained nothing lately, so that it shows when they would
_MOST_SHADOWS = 4.0  # such questions that may be saved up
_FORGETS = 0.1  # of what a sequence gained, each time it is asked
_HOPE = 0.5  # tokens a step that a new sequence is expected to gain
_LOOKS_AGAIN = 32  # steps without a draft
_HELD_UP = 8.0  # times what asking takes: more was a pause of the machine


@dataclass(slots=True)
class _Record:
    """What is known of one sequence."""

    own: defaultdict[str, OwnAcceptance] = field(default_factory=lambda: defaultdict(OwnAcceptance))  # by source
    gain: float = _HOPE  # tokens that asking gained a step beyond what its rows took, in plain steps' time
    waited: int = 0  # steps since it was asked
    proposals: Proposals | None = None  # of this step
    nodes: list[int] = field(default_factory=list)  # of these, those in the draft


class Adaptive:
    """Asks for proposals where they pay for the asking, verifies those that pay for their rows, and learns from what
    comes: see Planner, Ledger and Acceptance."""

    def __init__(self, cost: DecodeCost) -> None:
        self.planner = Planner(cost)
        self._acceptance: defaultdict[str, Acceptance] = defaultdict(Acceptance)  # by source
        self._records: dict[Sequence, _Record] = {}
        self._asking = 0.0  # seconds for one sequence
        self._asking_whole: dict[str, float] = {}  # the same by drafter, of those whose drafts are verified whole
        self._shadows = 0.0  # seconds for asking those that gain nothing
        self._drafting = 0.0  # seconds in this step
        self._accepted = 0  # nodes

    def begin(self, seq: Sequence) -> None:
        self._records[seq] = _Record()

    def end(self, seq: Sequence) -> None:
        self._records.pop(seq, None)

    def start(self, step: Step) -> None:
        """A new step, before its drafts."""
        decoding = [each for each in step.seqs if each.num_new == 1]
        tokens = sum(each.num_new for each in step.seqs) - len(decoding)
        self.planner.start(Load(len(decoding), sum(len(each.seq.tokens) for each in decoding), tokens))
        self._drafting = 0.0

    def asked(self, decoding: list[ScheduledSeq]) -> list[ScheduledSeq]:
        """Of sequences that could have a draft in this step, those whose drafters are asked for one."""
        if not decoding or not self.planner.plain:
            return []
        token = self.planner.plain / self.planner.load.rows  # seconds
        can_draft = self.planner.can_draft()
        asked: list[ScheduledSeq] = []
        others: list[ScheduledSeq] = []
        for each in decoding:
            record = self._records[each.seq]
            record.waited += 1
            (asked if can_draft and record.gain * token > self._asking else others).append(each)
        others.sort(key=lambda each: -self._records[each.seq].waited)
        for each in others:
            if self._shadows < self._asking:
                break
            self._shadows -= self._asking
            asked.append(each)
        return asked

    def choose(self, proposals: Many[tuple[Sequence, Proposals]], most: int, seconds: float) -> list[list[int]]:
        """Which nodes of each sequence's proposals this step shall verify, at most `most` together; asking for them
        took `seconds`."""
        if not proposals:
            return []
        self._asking = self._took(seconds, len(proposals), self._asking)
        for seq, each in proposals:
            each.settle(self._acceptance, self._records[seq].own)
        return self.planner.choose([each for _, each in proposals], most)

    def length(self, seq: Sequence, limit: int) -> int:
        """How long a draft would have paid for itself by what is known of earlier ones, for a drafter whose drafts are
        not looked into; now and then a short one where none would, so that it shows when that changes."""
        record = self._records[seq]
        record.waited += 1
        rates = self._acceptance[seq.drafter].rates
        chain = Proposals.chain(
            [
                record.own[seq.drafter].probability(rates[Acceptance.cell(Acceptance.UNSURE, depth, Agreement.ALONE)])
                for depth in range(limit)
            ]
        )
        asking = self._asking_whole.get(seq.drafter, 0.0)
        (nodes,) = self.planner.choose([chain], limit, asking)
        if not nodes and limit and record.waited >= _LOOKS_AGAIN and self.planner.can_draft(asking):
            self.planner.admit(chain.survival[0], asking)
            return 1
        return len(nodes)

    def asked_whole(self, drafter: str, num_seqs: int, seconds: float) -> None:
        """That drafter was asked for drafts of `length` for so many sequences, which took so long."""
        self._asking_whole[drafter] = self._took(seconds, num_seqs, self._asking_whole.get(drafter, 0.0))

    def _took(self, seconds: float, num_seqs: int, before: float) -> float:
        """What asking for one sequence takes, now that asking for some took so long."""
        per_seq = seconds / num_seqs
        per_seq = min(per_seq, _HELD_UP * before) if before else per_seq
        self._drafting += per_seq * num_seqs
        return before + 0.1 * (per_seq - before) if before else per_seq

    def verify(self, seq: Sequence, proposals: Proposals, nodes: Many[int]) -> None:
        """These nodes of the proposals are the draft; what comes will tell of all."""
        record = self._records[seq]
        if not proposals.survival:  # nobody has weighed it
            proposals.settle(self._acceptance, record.own)
        record.proposals, record.nodes, record.waited = proposals, list(nodes), 0

    def observe(self, verdicts: Mapping[Sequence, Verdict]) -> None:
        """What came of the sequences that were asked."""
        self._accepted = sum(len(verdict.path) for verdict in verdicts.values())
        for seq, verdict in verdicts.items():
            record = self._records[seq]
            proposals, record.proposals = record.proposals, None
            if proposals is None:
                continue
            judged: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for node, hit in proposals.judged(verdict.tokens):
                for source, cell in proposals.owners[node]:
                    acceptance = self._acceptance[source]
                    judged[source][0] += hit
                    judged[source][1] += acceptance.rates[cell]
                    acceptance.count(cell, hit)
            for source, (hits, expected) in judged.items():
                record.own[source].count(hits, expected)
            gained = len(verdict.path) - self.planner.price(len(record.nodes))
            record.gain += _FORGETS * (gained - record.gain)

    def settle(self, drafted: int, seconds: float) -> None:
        """The step with so many draft rows is over."""
        self.planner.settle(drafted, self._accepted, self._drafting, seconds)
        self._shadows = min(self._shadows + _SHADOW * seconds, _MOST_SHADOWS * self._asking)
