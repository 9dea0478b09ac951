"""What asking for drafts and verifying them is expected to pay, and what is learned of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import mul
from types import MappingProxyType
from weakref import WeakKeyDictionary

from specserve.adapters import LoadedAdapter
from specserve.runtime.cost import DecodeCost
from specserve.runtime.pack import Step
from specserve.speculation.constants import FORGETS, HOPE, LASTS, SELDOM, SILENT, WORTH
from specserve.speculation.guard import Load
from specserve.speculation.planner import Outlook, Planner
from specserve.speculation.sources import LOOKUPS, Asked, Source
from specserve.speculation.stats import Acceptance, OwnAcceptance
from specserve.speculation.tree import Proposals
from specserve.types import ScheduledSeq, Sequence, Verdict

Rates = defaultdict[str, Acceptance]  # by drafter
Lengths = Mapping[ScheduledSeq, int]  # tokens of a draft, at most


@dataclass(slots=True)
class _Record:
    """What is known of one sequence, and `shared` with those that have the same adapter: what changes the model's
    answers changes which drafts it accepts."""

    shared: Rates
    own: defaultdict[str, OwnAcceptance] = field(default_factory=lambda: defaultdict(OwnAcceptance))  # by source
    gain: float = HOPE  # tokens that asking gained a step beyond what its rows took, in plain steps' time
    waited: int = 0  # steps since it had a draft
    proposals: Proposals | None = None  # of this step
    nodes: list[int] = field(default_factory=list)  # of these, those in the draft
    asked: dict[str, tuple[int, float]] = field(default_factory=dict)  # sources, for how many tokens, and seconds
    unpaid: float = 0.0  # seconds that its drafter has read for it, and that its drafts have yet to save


class Weighing:
    """Weighs drafts by what steps cost and by what came of earlier ones: whom to ask and for how much (`choose`), which
    nodes to verify (`admit`), and what that has shown (`learn`, `record`)."""

    def __init__(self, cost: DecodeCost, most_under_way: int = 1) -> None:
        self.planner = Planner(cost, most_under_way)
        self.sources: defaultdict[str, Source] = defaultdict(Source)
        self._plain: Rates = defaultdict(Acceptance)
        self._by_adapter: WeakKeyDictionary[LoadedAdapter, Rates] = WeakKeyDictionary()
        self._records: dict[Sequence, _Record] = {}
        self._accepted = 0  # nodes of this step
        self.saved: defaultdict[str, float] = defaultdict(float)  # seconds in this step, by source; see `_credit`
        self._num_steps = 0

    def begin(self, group: Many[Sequence]) -> None:
        adapter = group[0].adapter
        shared = self._plain if adapter is None else self._by_adapter.setdefault(adapter, defaultdict(Acceptance))
        self._records.update((seq, _Record(shared)) for seq in group)

    def end(self, seq: Sequence) -> None:
        record, source = self._records.pop(seq), self.sources[seq.drafter]
        if record.unpaid:
            self.planner.guard.charge(record.unpaid)
        elif record.gain == HOPE and source.gain is not None:  # no draft of it was verified
            source.gain += FORGETS * (HOPE - source.gain)

    def start(self, step: Step) -> None:
        """A new step, before its drafts."""
        decoding = step.decoding
        self._num_steps += 1
        for each in decoding:
            self._records[each.seq].waited += 1
        tokens = sum(each.num_new for each in step.seqs) - len(decoding)
        self.planner.start(Load(len(decoding), sum(len(each.seq.tokens) for each in decoding), tokens))

    @property
    def outlook(self) -> Outlook:
        """Of the step that drafts are chosen for."""
        return self.planner.now

    def resume(self, outlook: Outlook) -> None:
        """What comes now is of the step with that one; others may have begun since."""
        self.planner.now = outlook

    def choose(
        self,
        name: str,
        group: Lengths,
        merged: Mapping[ScheduledSeq, Proposals] | None = None,
        *,
        is_one_pass: bool = False,
        unread: Mapping[Sequence, int] = MappingProxyType({}),
    ) -> dict[ScheduledSeq, int]:
        """For which sequences of the group source `name` is asked, and how long their drafts may be: at most as the
        group says. `merged` is what others proposed for them, where its drafts will be merged and cut, too; those of a
        source with `is_one_pass` take as long at any length. Others are verified as they are. It has yet to read
        `unread` tokens of a sequence. Now and then it is asked where that seems not to pay, so that it shows when it
        would, those first that have waited longest."""
        planner, source = self.planner, self.sources[name]
        lengths: dict[ScheduledSeq, int] = {}
        if not planner.now.plain or (name != LOOKUPS and (planner.now.is_probe or self._is_silent(group))):
            return lengths
        can_draft, seconds = planner.can_draft(), source.cost.of(1, len(group))
        for each in sorted(group, key=lambda each: -self._records[each.seq].waited):
            record = self._records[each.seq]
            if name == LOOKUPS:
                pays = can_draft and record.gain * planner.token > seconds
                lengths[each] = group[each] if pays or source.explores(seconds) else 0
            elif self._may_ask(each.seq, source.cost.reading(unread.get(each.seq, 0))):
                found = None if merged is None else merged[each]
                lengths[each] = self._length(name, record, group[each], len(group), found, is_one_pass)
        return {each: length for each, length in lengths.items() if length}

    def rests(self, name: str, group: Lengths) -> bool:
        """Whether that source is not asked in the next step, which may begin ahead then: no sequence of a group has had
        a draft lately, or asking pays for none of them and is not tried now."""
        can_draft, source = self.planner.can_draft(), self.sources[name]
        if self._is_silent(group):
            return True
        if name != LOOKUPS:
            return not can_draft
        seconds, token = source.cost.of(1, len(group)), self.planner.token
        pays = can_draft and any(self._records[each.seq].gain * token > seconds for each in group)
        return not pays and not source.may_explore(seconds)

    def _is_silent(self, group: Lengths) -> bool:
        """Whether no sequence of a group has had a draft for long, and this is none of the steps for those."""
        return self._num_steps % SELDOM > 0 and all(self._records[each.seq].waited > SILENT for each in group)

    def _length(
        self, name: str, record: _Record, most: int, num_seqs: int, found: Proposals | None, is_one_pass: bool
    ) -> int:
        """How long a draft a source that takes a while is asked for, for one sequence of so many; 0: for none."""
        planner, source, is_whole = self.planner, self.sources[name], found is None
        rates, own = source.acceptance.rates, record.own[name]
        chances = (own.probability(rates[Acceptance.cell(None, depth)]) for depth in range(most))
        likely, there = list(accumulate(chances, mul)), list[float]()  # to be accepted up to each depth
        if found is not None:
            found.compute_survival(record.shared, record.own)
            there = found.by_depth()[:most]
            likely = [max(pair) for pair in zip_longest(likely, there, fillvalue=0.0)]
        speed, length = planner.speed(there) * (1 + WORTH / (planner.now.load.rows if is_whole else 1)), 0
        for n in range(most if is_one_pass and not is_whole else 1, most + 1):
            seconds = source.cost.of(n, num_seqs)
            if not planner.can_draft(seconds, n if is_whole else 1):
                break
            faster = planner.speed(likely[: max(n, len(there))], seconds, is_whole)
            if faster > speed:
                speed, length = faster, n
        longest = 1 if is_whole else most  # all of a draft shows what longer ones would gain
        seconds, more = source.cost.of(length, num_seqs), source.cost.of(longest, num_seqs)
        rows = planner.extra(1) if is_whole else 0.0
        if length < longest and planner.can_draft(more) and source.explores(more - seconds + rows):
            length, seconds = longest, more
        planner.take(seconds, likely[:length] if is_whole else ())
        return length

    def _may_ask(self, seq: Sequence, reading: float) -> bool:
        """Whether a sequence's drafter may be asked, where it has to spend `reading` seconds on the sequence first: if
        drafts are expected to save these, and the guard's allowance is not spent. Of a drafter of which no draft has
        been verified, one sequence at a time is tried."""
        planner, source = self.planner, self.sources[seq.drafter]
        gain = HOPE if source.gain is None else source.gain
        is_tried = source.gain is not None or not source.catching_up
        steps = min(seq.max_tokens - seq.num_output, LASTS)
        pays = planner.guard.allowance > 0 and gain * planner.token * steps > reading
        if reading and is_tried and pays:
            source.catching_up.add(seq)
        return not reading or (is_tried and pays)

    def learn(self, name: str, asked: Mapping[Sequence, Asked], seconds: float) -> None:
        """That source was asked for these drafts, which took so long together."""
        if not asked:
            return
        counted, reading = self.sources[name].cost.learn(list(asked.values()), seconds)
        self.planner.now.drafting += counted
        self.planner.now.reading += sum(reading)
        for (seq, each), read in zip(asked.items(), reading, strict=True):
            record = self._records[seq]
            if name != LOOKUPS:
                record.asked[name] = each.length, counted / len(asked)
            record.unpaid += read

    def admit(self, proposals: Many[tuple[Sequence, Proposals]], most: int) -> list[list[int]]:
        """Which nodes of each sequence's proposals this step shall verify, at most `most` together."""
        for seq, each in proposals:
            each.compute_survival(self._records[seq].shared, self._records[seq].own)
        return self.planner.choose([each for _, each in proposals], most)

    def verify(self, seq: Sequence, proposals: Proposals, nodes: Many[int]) -> None:
        """These nodes of the proposals are the draft; what comes will tell of all."""
        record = self._records[seq]
        if not proposals.survival:  # nobody has weighed it
            proposals.compute_survival(record.shared, record.own)
        record.proposals, record.nodes, record.waited = proposals, list(nodes), 0

    def record(self, verdicts: Mapping[Sequence, Verdict], told: Collection[str] = ()) -> None:
        """Learn from what came of the sequences that sources were asked for, and what those that are `told` saved."""
        self._accepted = sum(len(verdict.path) for verdict in verdicts.values())
        for seq, verdict in verdicts.items():
            record = self._records[seq]
            proposals, record.proposals = record.proposals, None
            asked, record.asked = record.asked, {}
            judged: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            found: dict[tuple[str, int], bool] = {}  # whether a node of a source at a depth was accepted
            for owners, depth, hit in () if proposals is None else proposals.judged(verdict.tokens):
                for source, cell in owners:
                    acceptance = record.shared[source]
                    judged[source][0] += hit
                    judged[source][1] += acceptance.rates[cell]
                    acceptance.count(cell, hit)
                    found[source, depth] = found.get((source, depth), False) or hit
            for source, (length, _) in asked.items():
                if source in judged:
                    depths = range(min(length, len(verdict.tokens)))
                    self.sources[source].count([found.get((source, depth), False) for depth in depths])
                else:  # it has nothing to say of this sequence, perhaps for good
                    judged[source] = [0.0, self.sources[source].acceptance.rates[Acceptance.cell(None, 0)]]
            for source, (hits, expected) in judged.items():
                record.own[source].count(hits, expected)
            if proposals is not None:
                gained = len(verdict.path) - self.planner.price(len(record.nodes))
                if told:
                    self._credit(proposals, record.nodes, verdict)
                record.gain += FORGETS * (gained - record.gain)
                if seq.drafter in asked:
                    self._repay(seq, record, gained, asked[seq.drafter][1])

    def _credit(self, proposals: Proposals, nodes: list[int], verdict: Verdict) -> None:
        """Note for each source what those nodes of a draft saved that nobody else proposed, beyond what they took."""
        own: dict[str, list[bool]] = {}  # whether each was accepted
        for place, node in enumerate(nodes):
            if len(owners := proposals.owners[node]) == 1:
                said = verdict.tokens[min(proposals.depths[node], len(verdict.tokens) - 1)]
                own.setdefault(owners[0][0], []).append(place in verdict.path and proposals.tokens[node] == said)
        for source, hits in own.items():
            rows = self.planner.price(len(nodes)) - self.planner.price(len(nodes) - len(hits))
            self.saved[source] += (sum(hits) - rows) * self.planner.token

    def _repay(self, seq: Sequence, record: _Record, gained: float, asking: float) -> None:
        """A draft that was verified whole has gained so many tokens, but for the seconds of asking for it."""
        source = self.sources[seq.drafter]
        token = self.planner.token or asking
        saved = gained * token - asking
        before = HOPE if source.gain is None else source.gain
        source.gain = before + FORGETS * (saved / token - before)
        repaid = min(record.unpaid, max(saved, 0.0))
        self.planner.guard.charge(repaid)  # it was lent
        record.unpaid -= repaid

    def end_step(self, drafted: int, seconds: float, telling: float = 0.0) -> None:
        """The step with so many draft rows is over; telling drafters of it took `telling` of its seconds. Those
        of reading are lent: what drafts of their sequences save pays them back, and the rest counts when these end."""
        planner, guard, now = self.planner, self.planner.guard, self.planner.now
        if drafted and now.load.tokens:
            guard.charge(planner.extra(drafted) - self._accepted * planner.token)
        guard.took(now.load, drafted, self._accepted, seconds - now.reading, now.drafting + telling)
        for source in self.sources.values():
            source.end_step(seconds)
            source.catching_up = {s for s in source.catching_up if s in self._records and self._records[s].unpaid}
