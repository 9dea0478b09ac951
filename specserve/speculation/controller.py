"""Drafts for all sequences of an engine: chooses whom to ask, merges what they propose, verifies what pays, learns from
what comes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import takewhile

from torch import Tensor

from specserve.cache.cache import KVCache
from specserve.explained import Explained
from specserve.runtime.pack import Step
from specserve.speculation.host import DraftHost
from specserve.speculation.policy import Policy
from specserve.speculation.sources import LOOKUPS, Asked
from specserve.speculation.tree import Proposals
from specserve.speculation.upkeep import Upkeep
from specserve.speculation.weighing import Lengths, Weighing
from specserve.structured.constrain import constrain
from specserve.types import JUMP_FORWARD, Draft, Ids, ScheduledSeq, Sequence, Verdict


class DraftController:
    """One way for all drafters. A source is what is asked together: all drafters of ours that look things up, or one
    that takes a while. In each step the controller

    - chooses for each source the sequences it is asked for, and how long their drafts may be: as long as is expected to
      give the most tokens a second by what the source takes and by what came of it, or nothing;
    - lets each drafter propose once for all its sequences in their order, so one that fails loses its own drafts alone;
    - merges what they say of a sequence into one tree, as its grammar leaves it;
    - admits the nodes of all sequences that pay together; what draws its drafts from a distribution, or is another
      package's, is verified as it is: who shortens a sampled draft by the tokens that are in it changes what is
      generated;
    - records what came of it, and what it took; a drafter that is told of steps and saves less than that takes rests.

    Without `weighing` every draft is as long as may be. Drafts take what a step's own tokens leave of its budget, and
    free blocks alone: nobody is preempted for a guess.
    """

    def __init__(
        self,
        policy: Policy,
        cache: KVCache,
        timed: Callable[[str], AbstractContextManager[None]],
        weighing: Weighing | None = None,
    ) -> None:
        self.policy, self.weighing = policy, weighing
        self.upkeep: dict[str, Upkeep] = {}  # by drafter, of those that are told of steps
        self.keep_for_next_start: Callable[[Mapping[str, Upkeep]], None] | None = None
        self.draft_seconds: defaultdict[str, float] = defaultdict(float)  # that asking and telling each drafter took
        self._cache, self._timed = cache, timed
        self._asking = self._telling = 0.0  # seconds of the step that has ended

    def use(self, own: DraftHost, num_tokens: int, weighing: Weighing | None) -> None:
        """Go on with other drafters, of which nothing is known. Only while there is no sequence."""
        self._keep_upkeep()
        self.policy.replace(own, num_tokens)
        self.weighing = weighing
        self.upkeep.clear()

    def recall(self, num_failed: Mapping[str, int]) -> None:
        """So many trials of these drafters have failed before: those of the engine rest at first."""
        for part in self.policy.own.parts:
            if part.needs.observes and num_failed.get(part.name) and self.weighing is not None:
                self.upkeep[part.name] = Upkeep(num_failed[part.name], is_resting=True)
                self.policy.rest(part)

    def close(self) -> None:
        """Let go of all drafters. Sequences may still end."""
        self.policy.close()
        self._keep_upkeep()

    def _keep_upkeep(self) -> None:
        """Of the drafters that the engine was made with, once."""
        keep, self.keep_for_next_start = self.keep_for_next_start, None
        if keep is not None:
            keep(self.upkeep)

    def begin(self, group: list[Sequence], drafter: str | None) -> None:
        """Choose who drafts for the completions of a request, as Policy.admit does."""
        self.policy.admit(group, drafter)
        if self.weighing is not None:
            self.weighing.begin(group)

    def end(self, seq: Sequence) -> None:
        if self.weighing is not None:
            self.weighing.end(seq)
        self.policy.end(seq)

    def draft(self, step: Step) -> None:
        """Give every sequence that decodes in a step its draft, with slots for all of its nodes."""
        ready = [e for e in step.decoding if e.seq.num_output > 0 and not e.seq.under_way]
        limits = {e: most for e in ready if (most := self.policy.limit(e.seq))}
        weighing, active = self.weighing, self.policy.active
        if weighing is not None:
            weighing.start(step)
            step.outlook = weighing.outlook
        groups, whole = self._groups(limits)
        heads = [host for host in active if host.name in groups and host.name not in whole]
        budgets: dict[ScheduledSeq, int] = {}
        asked: dict[str, dict[Sequence, Asked]] = {}
        for name, group in groups.items():
            if name in [head.name for head in heads]:
                continue  # once it is known what others propose
            host = whole.get(name)
            reads = host is not None and host.needs.cost_class == "model"
            unread = {e.seq: max(0, e.seq.cached - e.seq.draft_cached) if reads else 0 for e in group}
            lengths = group if weighing is None else weighing.choose(name, group, unread=unread)
            lengths = lengths if host is None else {each: self._reserve(step, each, n) for each, n in lengths.items()}
            asked[name] = {e.seq: Asked(n if host else 1, unread[e.seq]) for e, n in lengths.items() if n}
            budgets |= lengths
        begun = time.perf_counter()
        with self._timed("draft"):
            found, took = self._ask(step, [host for host in active if host not in heads], budgets)
            merged = {each: Proposals(found[each]) for each in limits if each.seq.drafter not in whole}
            spent = {name: sum(took.get(part.name, 0.0) for part in host.parts) for name, host in whole.items()}
            spent[LOOKUPS] = time.perf_counter() - begun - sum(spent.values())
            if weighing is not None:
                for name, those in asked.items():
                    weighing.learn(name, those, spent[name])
            for host in heads:
                took |= self._ask_head(step, host, groups[host.name], merged)
        step.asking_s = time.perf_counter() - begun
        for each in limits:
            if each not in merged:
                self._keep_whole(each, found[each], budgets.get(each, 0))
        if merged:
            self._keep_what_pays(step, merged, limits)
        for each in (each for each in step.seqs if each.seq.explained is not None):  # and tell who asked
            proposals = merged.get(each) or Proposals(found[each])
            proposed = proposals.by_source() | Counter({JUMP_FORWARD: len(each.draft.jump_forward)})
            nodes, own = sum(len(other.draft) for other in step.seqs), sum(other.num_new for other in step.seqs)
            costs = () if weighing is None else weighing.planner.forecast(nodes, sum(took.values()))
            each.seq.explained = Explained(budgets.get(each, 0), proposed, own + nodes, *costs)

    def rests(self, step: Step) -> bool:
        """Whether the step after one under way has no drafts, whatever that one says of its sequences."""
        limits = {each: most for each in step.seqs if (most := self.policy.limit(each.seq))}
        if self.weighing is None or not limits:
            return not limits
        return all(self.weighing.rests(name, group) for name, group in self._groups(limits)[0].items())

    def observe(
        self,
        step: Step,
        verdicts: Mapping[Sequence, Verdict],
        hidden: Mapping[int, Tensor],
        top: Ids | None = None,
    ) -> None:
        """Tell the drafters what a step has done, and learn from it."""
        self._asking = step.asking_s
        if self.weighing is not None:
            self.weighing.resume(step.outlook)
        begun = last = time.perf_counter()
        for host in self.policy.active:
            own = [each for each in step.seqs if host in self.policy.parts[each.seq]]
            host.observe(own, verdicts, hidden, step.preempted, top)
            now = time.perf_counter()
            self._spend(host, now - last)
            last = now
        self._telling = last - begun
        if self.weighing is not None:
            self.weighing.record(verdicts, self.upkeep)

    def end_step(self, drafted: int, seconds: float) -> float:
        """The step with so many draft rows is over and took so long. Returns what of it was not for asking drafters."""
        if self.weighing is not None:
            self.weighing.end_step(drafted, seconds, self._telling)
            self._weigh_upkeep(self.weighing, seconds)
        return seconds - self._asking

    def _spend(self, host: DraftHost, seconds: float) -> None:
        """Asking or telling a drafter took so long."""
        self.draft_seconds[host.name] += seconds
        if host.needs.observes and self.weighing is not None:
            self.upkeep.setdefault(host.name, Upkeep()).charge(seconds)

    def _weigh_upkeep(self, weighing: Weighing, seconds: float) -> None:
        """After a step: let drafters rest that do not pay for being told of steps, and try them again."""
        for name in self.upkeep.keys() & self.policy.hosts.keys():
            upkeep, host = self.upkeep[name], self.policy.hosts[name]
            upkeep.took(weighing.saved.get(name, 0.0), seconds, weighing.planner.now.plain)
            if upkeep.is_resting != host.is_resting:
                (self.policy.rest if upkeep.is_resting else self.policy.wake)(host)
        weighing.saved.clear()

    def _groups(self, limits: Lengths) -> tuple[dict[str, dict[ScheduledSeq, int]], dict[str, DraftHost]]:
        """By source the sequences that it may be asked for, and how long their drafts may be; and the drafters, by
        name, whose drafts are verified as they are."""
        groups: defaultdict[str, dict[ScheduledSeq, int]] = defaultdict(dict)
        whole: dict[str, DraftHost] = {}
        for each, limit in limits.items():
            seq, host = each.seq, self.policy.host(each.seq)
            if self.weighing is None or not (host.is_trimmable or host.is_resting):
                groups[host.name][each], whole[host.name] = limit, host
            elif seq.draft_limit:
                for part in self.policy.parts[seq]:
                    groups[part.name if part.is_head else LOOKUPS][each] = min(limit, seq.draft_limit)
        return groups, whole

    def _reserve(self, step: Step, each: ScheduledSeq, count: int) -> int:
        """Take slots for that many nodes from the step's budget and the cache, or for fewer; returns how many."""
        count = min(count, step.num_tokens_left, step.num_logits_left)
        while count and not self._cache.reserve(each.seq, each.num_new + count):
            count //= 2
        step.num_tokens_left -= count
        step.num_logits_left -= count
        return count

    def _ask(
        self, step: Step, hosts: list[DraftHost], budgets: Lengths
    ) -> tuple[dict[ScheduledSeq, list[tuple[str, Draft]]], dict[str, float]]:
        """What these drafters propose for the sequences of a step, each with its drafter's name; and the seconds that
        each drafter took."""
        found: dict[ScheduledSeq, list[tuple[str, Draft]]] = {each: [] for each in step.seqs}
        took: dict[str, float] = {}
        for host in hosts:
            begun = time.perf_counter()
            share = [each for each in step.seqs if host in self.policy.parts[each.seq]]
            if not host.expects and not any(budgets.get(each) for each in share):
                continue
            drafts = host.propose([each.seq for each in share], [budgets.get(each, 0) for each in share])
            for each, draft in zip(share, drafts, strict=True):
                if len(draft):
                    found[each].append((host.name, draft))
            took[host.name] = time.perf_counter() - begun
            self._spend(host, took[host.name])
        return found, took

    def _ask_head(
        self, step: Step, host: DraftHost, group: Lengths, merged: Mapping[ScheduledSeq, Proposals]
    ) -> dict[str, float]:
        """Add what a drafter that takes a while proposes, where that is worth asking it."""
        weighing = self.weighing
        assert weighing is not None, "else drafts are verified whole"
        lengths = weighing.choose(host.name, group, merged, is_one_pass=host.needs.cost_class == "pass")
        lengths = {each: self._reserve(step, each, length) for each, length in lengths.items()}
        found, took = self._ask(step, [host], lengths)
        for each, drafts in found.items():
            for source, draft in drafts:
                merged[each].add(source, draft)
        step.num_tokens_left += sum(lengths.values())  # the step takes what it verifies
        step.num_logits_left += sum(lengths.values())
        weighing.learn(host.name, {each.seq: Asked(n) for each, n in lengths.items() if n}, took.get(host.name, 0.0))
        return took

    def _keep_whole(self, each: ScheduledSeq, found: list[tuple[str, Draft]], budget: int) -> None:
        """The draft that a sequence's drafter made, as its grammar leaves it. Of several under one name those with the
        highest priority come first."""
        seq, proposed = each.seq, found[0][1] if found else Draft.empty()
        if found and found[0][0] != seq.drafter:
            names = [part.name for part in self.policy.parts[seq]]
            merged = Proposals(sorted(found, key=lambda one: names.index(one[0])))
            proposed = merged.draft(range(min(len(merged), budget)))
        each.draft = proposed
        if budget and seq.grammar is not None:
            with self._timed("mask"):
                each.draft = constrain(seq, proposed, budget)
        if each.draft is not proposed:
            _forget_others(seq, proposed, each.draft)
        if self.weighing is not None and len(proposed):
            unsure = Draft(proposed.tokens, proposed.parents)  # `choose` knows no confidence
            self.weighing.verify(seq, Proposals([(seq.drafter, unsure)]), range(len(proposed)))

    def _keep_what_pays(self, step: Step, merged: dict[ScheduledSeq, Proposals], limits: Lengths) -> None:
        """Of proposals, as grammars leave them, what pays."""
        weighing = self.weighing
        assert weighing is not None, "else drafts are verified whole"
        with self._timed("mask"):
            for each, found in merged.items():
                if each.seq.grammar is not None:
                    draft = constrain(each.seq, found.draft(range(len(found))), limits[each])
                    merged[each] = found.constrained(draft)
        with self._timed("draft"):
            there = {each: found for each, found in merged.items() if len(found)}
            most = min(step.num_tokens_left, step.num_logits_left)
            chosen = weighing.admit([(each.seq, found) for each, found in there.items()], most)
        for (each, found), nodes in zip(there.items(), chosen, strict=True):
            kept = nodes[: self._reserve(step, each, len(nodes))]
            weighing.verify(each.seq, found, kept)
            each.draft = found.draft(kept)


def _forget_others(seq: Sequence, proposed: Draft, kept: Draft) -> None:
    """A grammar has changed a draft: what a drafter's model computed of nodes that are others now is not theirs."""
    nodes = (zip(each.tokens.tolist(), each.parents.tolist(), strict=True) for each in (proposed, kept))
    same = list(takewhile(lambda pair: pair[0] == pair[1], zip(*nodes, strict=False)))
    seq.draft_cached = min(seq.draft_cached, len(seq.tokens) + len(same))
