"""Decides who drafts for a sequence, and how much: the only place that does. See `Policy`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import takewhile

from torch import Tensor

from specserve.cache.cache import KVCache
from specserve.config import DEFAULT_NUM_SPECULATIVE_TOKENS
from specserve.errors import ConfigError, InputError, unknown
from specserve.explained import Explained
from specserve.registry import AUTO, DRAFTERS, NONE, RUNS_MODEL
from specserve.runtime.pack import Step
from specserve.speculation.adaptive import Adaptive
from specserve.speculation.context import TargetContext
from specserve.speculation.draft_cost import Asked
from specserve.speculation.grammar import constrain
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import makers
from specserve.speculation.tree import Proposals
from specserve.types import JUMP_FORWARD, PREDICTION, Draft, Ids, ScheduledSeq, Sequence, Verdict

MOST_JUMP_FORWARD = 16  # tokens of a draft; a step of so many rows takes about half as long again as one of one


class Policy:
    """Drafts for all sequences of an engine. Its own drafter, of `num_tokens` a draft, is for requests that name none
    and predict nothing; "none" is no drafter. A request may name another: any file of drafters/ whose options all have
    defaults, which drafts `num_tokens` as well, or 5 where that is 0. Tokens that a grammar leaves no choice of are
    drafted whoever drafts, as they are seldom rejected, unless the request names "none" or wants drafts of 0 tokens.

    With `adaptive` drafts are weighed. Drafters of ours that look things up all propose, and of the tree that their
    proposals make together a step verifies what pays. Any other drafter is asked for as many tokens as would have paid
    before, and these are verified whatever they are: who shortens a sampled draft by the tokens that are in it changes
    what is generated. Without `adaptive` every draft is as long as it may be.

    Drafts take what a step's own tokens leave of its budget, and free blocks alone: nobody is preempted for a guess.
    Each drafter is called once a step with its own sequences in their order, so one that fails loses its own drafts and
    no others.
    """

    def __init__(
        self,
        own: DraftHost,
        num_tokens: int,
        cache: KVCache,
        max_model_len: int,
        context: TargetContext,
        timed: Callable[[str], AbstractContextManager[None]],
        adaptive: Adaptive | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.context = context  # for drafters that requests name
        self.adaptive = adaptive
        self.draft_seconds: defaultdict[str, float] = defaultdict(float)  # that asking and telling each drafter took
        self._asking = self._telling = 0.0  # seconds of this step
        self._own = own
        self._cache = cache
        self._max_model_len = max_model_len
        self._timed = timed
        self._hosts = _named(own)
        self._num_seqs: Counter[DraftHost] = Counter()  # of hosts that have any
        self._parts: dict[Sequence, list[DraftHost]] = {}  # who drafts for it
        self._num_dropped_before = 0  # by drafters that were replaced

    @property
    def num_dropped(self) -> int:
        """Lost drafts of all drafters, replaced ones included."""
        return self._num_dropped_before + sum(host.num_dropped for host in self._hosts.values())

    def replace(self, own: DraftHost, num_tokens: int, adaptive: Adaptive | None = None) -> None:
        """Close all drafters and go on with another one as the engine's own. Only while there is no sequence."""
        assert not self._num_seqs, "a sequence must end with the drafter it began with"
        self.close()
        self._num_dropped_before = self.num_dropped
        self._own, self.num_tokens, self.adaptive = own, num_tokens, adaptive
        self._hosts = _named(own)

    def admit(self, group: list[Sequence], drafter: str | None) -> None:
        """Settle who drafts for the completions of a request, which names `drafter` or, with None, leaves it to us.
        Raises InputError for a name that does not exist (with near misses) or a drafter that no request can bring
        about; then nothing changed."""
        predicted = drafter is None and group[0].prediction and PREDICTION not in {p.name for p in self._own.parts}
        named = PREDICTION if predicted else drafter
        host = self._own if named is None else self._host(named)
        most = self.num_tokens if self.num_tokens or named is None else DEFAULT_NUM_SPECULATIVE_TOKENS
        for seq in group:
            seq.drafter = host.name
            seq.draft_limit = most if host.active else 0
            seq.jump_forward = drafter != NONE
            seq.stats.drafter = host.name
            longest = MOST_JUMP_FORWARD if seq.grammar is not None and seq.jump_forward else 0
            seq.stats.longest_draft = max(longest, seq.draft_limit)
            if self.adaptive is not None:
                self.adaptive.begin(seq)
            self._parts[seq] = [part for part in host.parts if seq.prediction or part.name != PREDICTION]
            for part in self._parts[seq]:
                self._num_seqs[part] += 1
                part.begin(seq)

    def draft(self, step: Step) -> None:
        """Give every sequence that decodes in a step its draft, with slots for all of its nodes."""
        adaptive = self.adaptive
        limits = {each: limit for each in step.decoding if each.seq.num_output > 0 and (limit := self._limit(each.seq))}
        asked: defaultdict[str, dict[Sequence, Asked]] = defaultdict(dict)
        whole: list[ScheduledSeq] = []
        weighed: list[ScheduledSeq] = []
        for each in limits:
            (weighed if adaptive is not None and self._hosts[each.seq.drafter].is_trimmable else whole).append(each)
        budgets: dict[ScheduledSeq, int] = {}
        if adaptive is not None:
            adaptive.start(step)
            selected = adaptive.select([each for each in weighed if each.seq.draft_limit])
            budgets = {each: min(limits[each], each.seq.draft_limit) for each in selected}
        for each in whole:
            seq, runs_model = each.seq, self._hosts[each.seq.drafter].needs.cost_class == "model"
            unread = max(0, seq.cached - seq.draft_cached) if runs_model else 0  # by the drafter's own model
            length = limits[each] if adaptive is None else adaptive.length(each.seq, limits[each], unread)
            budgets[each] = self._reserve(step, each, length)
            asked[each.seq.drafter][each.seq] = Asked(budgets[each], unread)
        begun = time.perf_counter()
        with self._timed("draft"):
            hosts = [host for host in self._num_seqs if host.active]
            is_head = [adaptive is not None and host.is_trimmable and host.is_head for host in hosts]
            drafts, took = self._propose(
                [h for h, late in zip(hosts, is_head, strict=True) if not late], step.seqs, budgets
            )
            proposals = {each: Proposals(drafts.pop(each, ())) for each in weighed}
            seconds = time.perf_counter() - begun
            if adaptive is not None:
                for host in (host for host, late in zip(hosts, is_head, strict=True) if late):
                    took[host.name] = self._ask_head(host, step, proposals, adaptive, limits)
        self._asking = time.perf_counter() - begun
        for each, found in drafts.items():
            self._keep_whole(each, found, budgets[each])
        if adaptive is not None and whole:
            for name, group in asked.items():
                if group := {seq: each for seq, each in group.items() if each.length}:
                    spent = sum(took[part.name] for part in self._hosts[name].parts)
                    adaptive.record_draft_time(name, group, spent)
                    seconds -= spent
        if adaptive is not None and proposals:
            self._weigh(step, proposals, adaptive, limits, seconds)
        for each in (each for each in step.seqs if each.seq.explained is not None):  # and tell who asked
            merged = proposals.get(each) or Proposals(drafts.get(each, ()))
            proposed = merged.by_source() | Counter({JUMP_FORWARD: len(each.draft.jump_forward)})
            nodes, own = sum(len(other.draft) for other in step.seqs), sum(other.num_new for other in step.seqs)
            costs = adaptive.planner.forecast(nodes, sum(took.values())) if adaptive is not None else ()
            each.seq.explained = Explained(budgets.get(each, 0), proposed, own + nodes, *costs)

    def end_step(self, step: Step, seconds: float) -> float:
        """The step is over and took so long. Returns what of it was not for asking drafters."""
        if self.adaptive is not None:
            self.adaptive.end_step(sum(len(each.draft) for each in step.seqs), seconds, self._telling)
        return seconds - self._asking

    def observe(
        self,
        step: Step,
        verdicts: Mapping[Sequence, Verdict],
        hidden: Mapping[int, Tensor],
        top: Ids | None = None,
    ) -> None:
        """Tell the drafters what a step has done."""
        self._telling = 0.0
        for host in (host for host in self._num_seqs if host.active):
            begun = time.perf_counter()
            own = [s for s in step.seqs if host in self._parts[s.seq]]
            host.observe(own, verdicts, hidden, step.preempted, top)
            took = time.perf_counter() - begun
            self.draft_seconds[host.name] += took
            self._telling += took
        if self.adaptive is not None:
            self.adaptive.observe(verdicts)

    def end(self, seq: Sequence) -> None:
        if self.adaptive is not None:
            self.adaptive.end(seq)
        for part in self._parts.pop(seq):
            self._num_seqs[part] -= 1
            part.end(seq)
        self._num_seqs += Counter()  # drops what is zero

    def close(self) -> None:
        """Let go of all drafters and their threads. Sequences may still end."""
        for host in self._hosts.values():
            host.close()

    def _limit(self, seq: Sequence) -> int:
        """How many tokens a draft may have. A step emits one token more than the draft, and none past max_tokens or the
        context."""
        host = self._hosts[seq.drafter]
        limit = seq.draft_limit if host.active else 0
        if seq.grammar is not None and seq.jump_forward:
            with self._timed("mask"):
                limit = max(limit, min(len(seq.grammar.jump_forward()), MOST_JUMP_FORWARD))
        if seq.params.num_speculative_tokens is not None:
            limit = min(limit, seq.params.num_speculative_tokens)
        left = min(seq.max_tokens - seq.num_output, self._max_model_len - len(seq.tokens)) - 1
        return max(0, min(limit, left))

    def _reserve(self, step: Step, each: ScheduledSeq, count: int) -> int:
        """Take slots for that many nodes from the step's budget and the cache, or for fewer; returns how many."""
        count = min(count, step.num_tokens_left, step.num_logits_left)
        while count and not self._cache.reserve(each.seq, each.num_new + count):
            count //= 2
        step.num_tokens_left -= count
        step.num_logits_left -= count
        return count

    def _propose(
        self, hosts: list[DraftHost], step: list[ScheduledSeq], budgets: Mapping[ScheduledSeq, int]
    ) -> tuple[dict[ScheduledSeq, list[tuple[str, Draft]]], defaultdict[str, float]]:
        """What these drafters propose for the sequences that have a budget, each with its drafter's name; and the
        seconds that each drafter took."""
        drafts: dict[ScheduledSeq, list[tuple[str, Draft]]] = {each: [] for each in budgets}
        took: defaultdict[str, float] = defaultdict(float)
        for host in hosts:
            begun = time.perf_counter()
            share = [each for each in step if host in self._parts[each.seq]]
            found = host.propose([each.seq for each in share], [budgets.get(each, 0) for each in share])
            for each, draft in zip(share, found, strict=True):
                if len(draft):
                    drafts[each].append((host.name, draft))
            took[host.name] += time.perf_counter() - begun
            self.draft_seconds[host.name] += took[host.name]
        return drafts, took

    def _ask_head(
        self,
        host: DraftHost,
        step: Step,
        proposals: Mapping[ScheduledSeq, Proposals],
        adaptive: Adaptive,
        limits: Mapping[ScheduledSeq, int],
    ) -> float:
        """Add what a drafter that takes a while proposes, where that is worth asking it. Returns the seconds."""
        host.begin_pending([e.seq for e in step.seqs if host in self._parts[e.seq]])
        own = {e: found for e, found in proposals.items() if e.seq.draft_limit and host in self._parts[e.seq]}
        longest = {e: min(limits[e], e.seq.draft_limit) for e in own}
        asked = adaptive.select_for_head(host.name, own, longest, host.needs.cost_class == "pass")
        budgets = {e: self._reserve(step, e, length) for e, length in asked.items()}
        if not any(budgets.values()):
            return 0.0
        drafts, took = self._propose([host], step.seqs, budgets)
        for each, found in drafts.items():
            for source, draft in found:
                proposals[each].add(source, draft)
        for count in budgets.values():  # the step takes what it verifies
            step.num_tokens_left += count
            step.num_logits_left += count
        adaptive.record_head_time(host.name, {each: count for each, count in budgets.items() if count}, took[host.name])
        return took[host.name]

    def _keep_whole(self, each: ScheduledSeq, found: list[tuple[str, Draft]], budget: int) -> None:
        """The draft that a sequence's drafter made, as its grammar leaves it. Of several under one name those with the
        highest priority come first."""
        seq, proposed = each.seq, found[0][1] if found else Draft.empty()
        if found and found[0][0] != seq.drafter:
            names = [part.name for part in self._parts[seq]]
            merged = Proposals(sorted(found, key=lambda one: names.index(one[0])))
            proposed = merged.draft(range(min(len(merged), budget)))
        each.draft = proposed
        if budget and seq.grammar is not None:
            with self._timed("mask"):
                each.draft = constrain(seq, proposed, budget)
        if each.draft is not proposed:
            _forget_others(seq, proposed, each.draft)
        if self.adaptive is not None and len(proposed):
            unsure = Draft(proposed.tokens, proposed.parents)  # `length` knows no confidence
            self.adaptive.verify(seq, Proposals([(seq.drafter, unsure)]), range(len(proposed)))

    def _weigh(
        self,
        step: Step,
        proposals: dict[ScheduledSeq, Proposals],
        adaptive: Adaptive,
        limits: Mapping[ScheduledSeq, int],
        seconds: float,
    ) -> None:
        """Verify what pays of the proposals, as grammars leave them; asking for them took `seconds`."""
        with self._timed("mask"):
            for each, found in proposals.items():
                if each.seq.grammar is not None:
                    proposals[each] = found.constrained(
                        constrain(each.seq, found.draft(range(len(found))), limits[each])
                    )
        with self._timed("draft"):
            there = {each: found for each, found in proposals.items() if len(found)}
            most = min(step.num_tokens_left, step.num_logits_left)
            chosen = adaptive.choose([(each.seq, found) for each, found in there.items()], most, seconds)
        for (each, found), nodes in zip(there.items(), chosen, strict=True):
            kept = nodes[: self._reserve(step, each, len(nodes))]
            adaptive.verify(each.seq, found, kept)
            each.draft = found.draft(kept)

    def nameable(self) -> dict[str, str | None]:
        """All drafters that there are, by name: why a request may not name one, None where it may. Those that run no
        model are made to find that out, and not kept."""
        refused: dict[str, str | None] = {}
        running = DRAFTERS.stating(RUNS_MODEL)  # refused also where they have a part in "auto"
        for name in sorted({NONE, AUTO, self._own.name, *DRAFTERS.files()}):
            before, refused[name] = dict(self._hosts), None
            if name in running and name != self._own.name:
                refused[name] = f"Drafter {name!r} runs a model: it must be the engine's --drafter."
                continue
            try:
                self._host(name)
            except InputError as error:
                refused[name] = str(error)
            for host in set(self._hosts.values()).difference(before.values()):
                host.close()
            self._hosts = before
        return refused

    def _host(self, name: str) -> DraftHost:
        """The drafter of that name, made if there is none yet. Only of drafters/, as a request shall not decide whose
        code is run. Whatever goes wrong is the request's error: it may end nothing else."""
        if not isinstance(name, str):
            raise InputError(f"drafter is {name!r}; it must be the name of a drafter.", "drafter")
        if name in self._hosts:
            return self._hosts[name]
        known = DRAFTERS.files()
        if name not in {NONE, AUTO, *known}:
            hint = "One of another package must be the engine's --drafter."
            message = unknown("drafter", name, {NONE, AUTO, self._own.name, *known})
            raise InputError(f"{message} {hint}", "drafter")
        try:
            own = self._own
            found = makers(name, None)
            host = DraftHost.of(name, found, self.context, own.vocab_size, own.timeout_s, self._hosts)
            shown = own.needs  # by the step as it was recorded
            if not set(host.needs.hidden_layers) <= set(shown.hidden_layers):
                raise ConfigError(f"Drafter {name!r} reads layers of the target: it must be the engine's --drafter.")
            if host.needs.top_k > shown.top_k:
                reads = "reads the target's best tokens"
                raise ConfigError(f"Drafter {name!r} {reads}: it must be the engine's --drafter.")
            allowed, new = self.context.memory_bytes, [part for part in host.parts if part.name not in self._hosts]
            if allowed is not None and (taken := sum(part.needs.memory_bytes for part in new)) > allowed:
                reason = f"takes {taken} bytes beside which the KV cache was not sized"
                raise ConfigError(f"Drafter {name!r} {reason}: it must be the engine's --drafter.")
        except ConfigError as error:
            raise InputError(str(error), "drafter") from error
        except Exception as error:
            raise InputError(f"Drafter {name!r} cannot be made: {type(error).__name__}: {error}.", "drafter") from error
        self._hosts |= _named(host)
        return host


def _named(host: DraftHost) -> dict[str, DraftHost]:
    return {part.name: part for part in host.parts} | {host.name: host}


def _forget_others(seq: Sequence, proposed: Draft, kept: Draft) -> None:
    """A grammar has changed a draft: what a drafter's model computed of nodes that are others now is not theirs."""
    pairs = zip(_nodes(proposed), _nodes(kept), strict=False)
    same = list(takewhile(lambda pair: pair[0] == pair[1], pairs))
    seq.draft_cached = min(seq.draft_cached, len(seq.tokens) + len(same))


def _nodes(draft: Draft) -> list[tuple[int, int]]:
    return list(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True))
