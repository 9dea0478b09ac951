"""Which sequences' drafters are asked in a step, what of their proposals is verified, and what is learned of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence as Many
from dataclasses import dataclass, field

from specserve.runtime.pack import Step
from specserve.speculation.cost import DecodeCost
from specserve.speculation.draft_cost import Asked, DraftCost, SharedDraftCost
from specserve.speculation.guard import Load
from specserve.speculation.planner import Planner
from specserve.speculation.stats import Acceptance, OwnAcceptance
from specserve.speculation.tree import Proposals
from specserve.types import ScheduledSeq, Sequence, Verdict

_SHADOW = 0.005  # of a step's time for asking drafters that gained nothing lately, so that it shows when they would
_MOST_SHADOWS = 4.0  # such questions that may be saved up
_FORGETS = 0.1  # of what a sequence gained, each time it is asked
_HOPE = 0.5  # tokens a step that a new sequence is expected to gain
_LOOKS_AGAIN = 32  # steps without a draft
_HELD_UP = 8.0  # times what asking takes: more was a pause of the machine
_LASTS = 64  # steps that a sequence is expected to go on, at most
_MOST_UNPAID = 1.5  # times what catching up took
_WORTH = 1.04  # times the tokens a second: a model that is asked slows other things down, too
_SURELY = 2.0  # times what reading takes must be expected to come back


@dataclass(slots=True)
class _Record:
    """What is known of one sequence."""

    own: defaultdict[str, OwnAcceptance] = field(default_factory=lambda: defaultdict(OwnAcceptance))  # by source
    gain: float = _HOPE  # tokens that asking gained a step beyond what its rows took, in plain steps' time
    waited: int = 0  # steps since it was asked
    proposals: Proposals | None = None  # of this step
    nodes: list[int] = field(default_factory=list)  # of these, those in the draft
    heads: dict[str, int] = field(default_factory=dict)  # which heads drafted in this step, and for how many tokens
    asking: float = 0.0  # seconds that asking for this step's draft took, where it is verified whole
    catch_up_cost: float = 0.0  # seconds that its drafter has read for it, and
    unpaid: float = 0.0  # how many of these its drafts have yet to save


@dataclass(slots=True)
class _Head:
    """What is known of a drafter that takes a while."""

    acceptance: Acceptance = field(default_factory=Acceptance)  # by depth alone, as nothing else is known before
    cost: SharedDraftCost = field(default_factory=SharedDraftCost)
    num_answers: int = 0
    shadows: float = 0.0  # seconds for asking it where it gains nothing

    def count(self, hits: Many[bool]) -> None:
        """Whether one of the nodes at each depth of a draft, of which there may be none, was accepted."""
        for depth, hit in enumerate(hits):
            self.acceptance.count(Acceptance.unsure(depth), hit)
            if not hit:
                break


class Adaptive:
    """Asks for proposals where they pay for the asking, verifies those that pay for their rows, and learns from what
    comes: see Planner, Guard and Acceptance."""

    def __init__(self, cost: DecodeCost) -> None:
        self.planner = Planner(cost)
        self._acceptance: defaultdict[str, Acceptance] = defaultdict(Acceptance)  # by source
        self._records: dict[Sequence, _Record] = {}
        self._asking = 0.0  # seconds for one sequence
        self._heads: defaultdict[str, _Head] = defaultdict(_Head)  # by source
        self._asking_whole: defaultdict[str, DraftCost] = defaultdict(DraftCost)  # of drafts that are verified whole
        self._gains: dict[str, float] = {}  # of these, by drafter: tokens that a draft gained beyond what it took
        self._catching_up: set[Sequence] = set()
        self._shadows = 0.0  # seconds for asking those that gain nothing
        self._drafting = 0.0  # seconds in this step
        self._reading = self._repaid = 0.0
        self._accepted = 0  # nodes

    def begin(self, seq: Sequence) -> None:
        self._records[seq] = _Record()

    def end(self, seq: Sequence) -> None:
        record = self._records.pop(seq, None)
        if record is not None and record.unpaid:
            self.planner.guard.charge(record.unpaid)
        elif record is not None and record.gain == _HOPE and seq.drafter in self._gains:  # no draft of it was verified
            self._gains[seq.drafter] += _FORGETS * (_HOPE - self._gains[seq.drafter])

    def start(self, step: Step) -> None:
        """A new step, before its drafts."""
        decoding = step.decoding
        tokens = sum(each.num_new for each in step.seqs) - len(decoding)
        self.planner.start(Load(len(decoding), sum(len(each.seq.tokens) for each in decoding), tokens))
        self._drafting = self._reading = self._repaid = 0.0

    def select(self, decoding: list[ScheduledSeq]) -> list[ScheduledSeq]:
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

    def select_for_head(
        self,
        source: str,
        proposals: Mapping[ScheduledSeq, Proposals],
        limits: Mapping[ScheduledSeq, int],
        is_one_pass: bool,
    ) -> dict[ScheduledSeq, int]:
        """Of sequences with what was proposed for them so far, those that are expected to gain by asking `source` too,
        which takes a while; with the length of the draft that gains most, or the longest of a drafter that makes all of
        a draft in one pass."""
        planner, head, spent = self.planner, self._heads[source], 0.0
        asked: dict[ScheduledSeq, int] = {}
        if not planner.plain or planner.is_probe:
            return asked
        for each, found in proposals.items():
            record, limit = self._records[each.seq], limits[each]
            found.compute_survival(self._acceptance, record.own)
            there = found.by_depth()[:limit]
            survival, likely = 1.0, there + [0.0] * (limit - len(there))
            best, length = 0.0, 0
            for depth in range(limit):
                survival *= record.own[source].probability(head.acceptance.rates[Acceptance.unsure(depth)])
                likely[depth] = max(survival, likely[depth])
                if depth + 1 == limit or not is_one_pass:
                    speed = planner.speed(likely[: max(depth + 1, len(there))], head.cost.of(depth + 1, len(proposals)))
                    if speed > best:
                        best, length = speed, depth + 1
            seconds, longest = (head.cost.of(count, len(proposals)) for count in (length, limit))
            if not planner.can_draft(spent + seconds):
                break
            is_better = best > _WORTH * planner.speed(there)
            shadow = longest - (seconds if is_better else 0.0)  # all of it shows what longer ones would gain
            if head.shadows > shadow > 0.0 and planner.can_draft(spent + longest):
                head.shadows -= shadow
                length, seconds, is_better = limit, longest, True
            if is_better:
                asked[each], spent = length, spent + seconds
        return asked

    def record_head_time(self, source: str, lengths: Mapping[ScheduledSeq, int], seconds: float) -> None:
        """Asking it for drafts of these lengths together took so long."""
        head = self._heads[source]
        for each, length in lengths.items():
            self._records[each.seq].heads[source] = length
        head.num_answers += 1
        if head.num_answers == 1:  # it takes many times longer, and nothing is known of it
            self._drafting += seconds
        else:
            self._drafting += head.cost.learn(list(lengths.values()), seconds)

    def choose(self, proposals: Many[tuple[Sequence, Proposals]], most: int, seconds: float) -> list[list[int]]:
        """Which nodes of each sequence's proposals this step shall verify, at most `most` together; asking for them
        took `seconds`."""
        if not proposals:
            return []
        self._asking = self._took(seconds, len(proposals), self._asking)
        for seq, each in proposals:
            each.compute_survival(self._acceptance, self._records[seq].own)
        return self.planner.choose([each for _, each in proposals], most)

    def length(self, seq: Sequence, limit: int, unread: int = 0) -> int:
        """How long a draft would have paid for itself by what is known of earlier ones, for a drafter whose drafts are
        not looked into; now and then a short one where none would, so that it shows when that changes. Its drafter has
        `unread` tokens to read first."""
        record = self._records[seq]
        record.waited += 1
        asking = self._asking_whole[seq.drafter]
        if asking.has_to_read(unread) and not self._may_catch_up(seq, asking.reading(unread)):
            return 0
        rates = self._acceptance[seq.drafter].rates
        chain = Proposals.chain(
            [record.own[seq.drafter].probability(rates[Acceptance.unsure(depth)]) for depth in range(limit)]
        )
        (nodes,) = self.planner.choose([chain], limit, [asking.of(count) for count in range(limit + 1)])
        if not nodes and limit and record.waited >= _LOOKS_AGAIN and self.planner.can_draft(asking.of(1)):
            self.planner.admit(chain.survival[0], asking.of(1))
            return 1
        return len(nodes)

    def _may_catch_up(self, seq: Sequence, seconds: float) -> bool:
        """Whether a sequence's drafts are expected to save what reading it takes, and there is no debt. Of a drafter
        that has not shown it yet, one sequence at a time is tried."""
        is_tried = seq.drafter in self._gains or not self._catching_up
        gain = self._gains.get(seq.drafter, _HOPE)
        token = self.planner.plain / max(self.planner.load.rows, 1)
        steps = min(seq.max_tokens - seq.num_output, _LASTS)
        if is_tried and self.planner.guard.allowance > 0 and gain * token * steps > _SURELY * seconds:
            self._catching_up.add(seq)
            return True
        return False

    def record_draft_time(self, drafter: str, asked: Mapping[Sequence, Asked], seconds: float) -> None:
        """That drafter was asked for these drafts, which took so long together."""
        counted, reading = self._asking_whole[drafter].learn(list(asked.values()), seconds)
        self._drafting += counted
        self._reading += sum(reading)
        for seq, read in zip(asked, reading, strict=True):
            record = self._records[seq]
            record.asking = counted / len(asked)
            if read:
                record.unpaid += read
                record.catch_up_cost += read

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
            proposals.compute_survival(self._acceptance, record.own)
        record.proposals, record.nodes, record.waited = proposals, list(nodes), 0

    def observe(self, verdicts: Mapping[Sequence, Verdict]) -> None:
        """What came of the sequences that were asked."""
        self._accepted = sum(len(verdict.path) for verdict in verdicts.values())
        for seq, verdict in verdicts.items():
            record = self._records[seq]
            proposals, record.proposals = record.proposals, None
            asking, record.asking = record.asking, 0.0
            select_for_head, record.heads = record.heads, {}
            judged: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            found: dict[tuple[str, int], bool] = {}  # whether a node of a source at a depth was accepted
            for owners, depth, hit in () if proposals is None else proposals.judged(verdict.tokens):
                for source, cell in owners:
                    acceptance = self._acceptance[source]
                    judged[source][0] += hit
                    judged[source][1] += acceptance.rates[cell]
                    acceptance.count(cell, hit)
                    found[source, depth] = found.get((source, depth), False) or hit
            for source, length in select_for_head.items():
                if source in judged:
                    depths = range(min(length, len(verdict.tokens)))
                    self._heads[source].count([found.get((source, depth), False) for depth in depths])
                else:  # it has nothing to say of this sequence, perhaps for good
                    judged[source] = [0.0, self._heads[source].acceptance.rates[Acceptance.unsure(0)]]
            for source, (hits, expected) in judged.items():
                record.own[source].count(hits, expected)
            if proposals is None:
                continue
            gained = len(verdict.path) - self.planner.price(len(record.nodes))
            record.gain += _FORGETS * (gained - record.gain)
            if asking:
                self._repay(seq, record, gained, asking)

    def _repay(self, seq: Sequence, record: _Record, gained: float, asking: float) -> None:
        """A draft that was verified whole has gained so many tokens, but for the seconds of asking for it."""
        token = self.planner.plain / self.planner.load.rows if self.planner.plain else asking
        saved = gained * token - asking
        before = self._gains.get(seq.drafter, _HOPE)
        self._gains[seq.drafter] = before + _FORGETS * (saved / token - before)
        if record.unpaid:  # what single drafts lose until it is paid back counts too, up to a point
            unpaid = min(max(record.unpaid - saved, 0.0), _MOST_UNPAID * record.catch_up_cost)
            self._repaid += record.unpaid - unpaid
            record.unpaid = unpaid

    def end_step(self, drafted: int, seconds: float, telling: float = 0.0) -> None:
        """The step with so many draft rows is over; telling drafters of it took `telling` of its seconds."""
        self.planner.end_step(drafted, self._accepted, self._drafting + telling, seconds, self._reading, self._repaid)
        if self._catching_up:
            self._catching_up = {seq for seq in self._catching_up if seq in self._records and self._records[seq].unpaid}
        self._shadows = min(self._shadows + _SHADOW * seconds, _MOST_SHADOWS * self._asking)
        for head in self._heads.values():
            head.shadows = min(head.shadows + _SHADOW * seconds, _MOST_SHADOWS * head.cost.newest)
