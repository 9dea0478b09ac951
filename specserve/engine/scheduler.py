"""Decides who runs in the next step, how many tokens each, and who must wait."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from specserve.cache.cache import KVCache, begun
from specserve.engine.adapters import Adapters
from specserve.parallel.awaiting import Awaiting
from specserve.parallel.overlap import Overlap
from specserve.runtime.cost import StepCost
from specserve.runtime.pack import Step, most_tokens, num_shared_rows
from specserve.types import ScheduledSeq, Sequence

_SLOWDOWN = 2.5  # of a step by chunks of prompts, while others decode: what is aimed at
_WAIT_S = 0.006  # for chunks in a step, for each sequence that decodes: one that is alone waits least
_FOLLOWS = 0.05  # how far the pace goes to that of the newest step
_ALONE_S = 0.25  # of a step in which nobody decodes; after it others may begin, or leave
_LEAST_CHUNK = 8  # tokens: fewer would read the weights, and the context, too often
_ARRIVALS = 16  # sequences that may come later and still run before one, for each step between their priorities
_MOST_STEPS = 64  # from 0; priorities beyond rank as if they ended there


def _rank(seq: Sequence) -> tuple[int, int]:
    """Lower priorities first, first come first served within one: a step counts as so many places in the order of
    arrival. So who waits ages against all that come later, and nobody starves: at most 2 * 64 * 16 of them run first,
    whatever their priorities. A rank never changes."""
    steps = max(-_MOST_STEPS, min(seq.priority, _MOST_STEPS))
    return seq.order + steps * _ARRIVALS, seq.order


class Scheduler:
    """Continuous batching under a token budget.

    Each step: every sequence that is decoding gets its one row, then come prefill chunks, then new sequences; drafts
    share what the budget leaves. When blocks run out, the sequence that ranks last is preempted: its KV is dropped and
    computed again later. The one that ranks first therefore always progresses. One whose KV comes from elsewhere has
    blocks for it, and no seat before it came: see Awaiting.

    Chunks of prompts are as long as their time allows, which `cost` predicts: a step with them aims at `max_step_s`
    seconds, or without a number at 2.5 times what it takes without them for each token that a sequence gets, and no
    more than 6 ms longer for each sequence that decodes, and at 0.25 s where none does. The first one of a step has at
    least 8 tokens whatever they take. Steps under way share that time.

    Where an executor takes several steps at once, those under way have different sequences: one runs on when its step
    has ended, but for a chunk of a prompt, which may follow the one before at once. Sequences that decode are divided
    among as many steps as Overlap says. None that is under way is preempted: who lacks its blocks waits.

    A step has logits for at most `max_logit_rows` rows, if that is not max_num_batched_tokens at least 2 max_num_seqs.
    Each sequence has one row of its own; drafts, and prompts whose log-probabilities are asked for, share the others.
    """

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_logit_rows: int,
        max_step_s: float | None = None,
        adapters: Adapters | None = None,
        most_under_way: int = 1,
    ) -> None:
        self.cache = cache
        self.adapters = adapters or Adapters()  # none
        # Where every row may have logits, the budget of tokens is limit enough.
        self._num_shared_rows = max_logit_rows - (max_num_seqs if max_logit_rows < max_num_batched_tokens else 0)
        self.cost = StepCost()
        self.overlap = Overlap(self.cost.decoding, most_under_way)
        self.under_way: deque[Step] = deque()  # the oldest first
        self.pace = 1.0  # tokens that a decoding sequence got in a step, lately
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_step_s = max_step_s
        self.waiting: list[Sequence] = []  # sorted by rank
        self.running: list[Sequence] = []  # sorted by rank
        self.awaiting = Awaiting(cache, _rank)
        self.num_preemptions = 0
        self._untold: list[Sequence] = []  # preempted, and in no step yet that tells of it
        self._refusal: _Refusal | None = None
        self._passed: Sequence | None = None  # the first that waited for its adapter's slot last, and
        self._num_passed = 0  # how many with adapters have begun before it since

    def add(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that ended, and give its blocks back."""
        if seq in self.running:
            self.running.remove(seq)
            self.adapters.release(seq)
        elif not self.awaiting.discard(seq) and seq in self.waiting:  # and not a beam that is not live
            self.waiting.remove(seq)
        self._refusal = None
        self._passed = None if self._passed is seq else self._passed
        self.cache.free(seq)

    def join(self, beam: Sequence) -> None:
        """A beam of a group that runs has begun: it has KV, and the group a seat and its adapter's slot for it."""
        self.adapters.acquire(beam)
        bisect.insort(self.running, beam, key=_rank)

    def observe(self, num_seqs: int, num_tokens: int) -> None:
        """A step gave so many decoding sequences so many tokens together."""
        if num_seqs:
            self.pace += _FOLLOWS * (num_tokens / num_seqs - self.pace)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.under_way)

    def receive(self) -> None:
        """Let those go on whose KV has come from elsewhere, or will not come."""
        for seq in self.awaiting.receive():
            self._refusal = None
            self.add(seq)

    @property
    def speeds(self) -> tuple[float, float, float]:
        """Seconds, as measured, 0: not yet: of a step for those that run now, without drafts; that a token of a prompt
        adds; and that it adds for each token that it reads."""
        token, context = self.cost.prompt_line
        gain = self.overlap.gain
        return self.cost.decoding.seconds(max(1, len(self.running))) / gain, token / gain, context / gain

    @property
    def backlog_s(self) -> float:
        """Seconds that the prompts take which are not computed yet. Of those that wait as much is expected to be found
        in the prefix cache as was of others, and that those further back are as long as the first ones."""
        cost, stats, first = self.cost, self.cache.stats, self.waiting[: self.max_num_seqs]
        begun = sum(cost.added(left, seq.cached) for seq in self.running if (left := len(seq.tokens) - seq.cached) > 1)
        if not first:
            return begun / self.overlap.gain
        missed = 1.0 - stats.num_prefix_hit_tokens / max(1, stats.num_prefix_query_tokens)
        mean = sum(len(seq.tokens) - seq.cached for seq in first) / len(first)
        waiting = missed * len(self.waiting) * cost.added(round(mean), 0)
        return (begun + waiting) / self.overlap.gain

    def num_steps(self) -> int:
        """How many are to be under way now."""
        if self.overlap.most == 1:
            return 1
        decoding, has_seat = self._decoding, bool(self.waiting) and self._num_seats < self.max_num_seqs
        has_chunks = has_seat or any(len(seq.tokens) - begun(seq) > 1 for seq in self.running)
        chunk_s = self._seconds_for_chunks(decoding) if has_chunks else 0.0
        return self.overlap.choose(len(decoding), sum(seq.cached for seq in decoding), chunk_s)

    def begin(self, step: Step) -> None:
        """It is under way."""
        self.under_way.append(step)
        for each in step.seqs:
            each.seq.under_way += each.num_new

    def end(self) -> None:
        """The oldest step has ended; what it computed is to be kept."""
        for each in self.under_way.popleft().seqs:
            each.seq.under_way -= each.num_new

    def abandon(self) -> None:
        """No step is under way any more, and nothing came of those that were."""
        while self.under_way:
            self.end()

    def pick(self) -> Step:
        """The next step's sequences, with KV slots reserved for their tokens; what is left is for drafts."""
        plan = _Plan(self.max_num_batched_tokens, self._num_shared_rows, self._untold)
        for seq in self._share():
            if seq in self.running:
                self._reserve(plan, seq, 1)
        plan.seconds = self._seconds_for_chunks(self._decoding) / self.overlap.num
        for seq in list(self.running):
            is_chunk = len(seq.tokens) - begun(seq) > 1 and seq in self.running and self._may_run(seq)
            if is_chunk and (count := self._chunk(plan, seq)):
                self._reserve(plan, seq, count)
        # Drafters hear that one was preempted when that step has ended, and before it is in another.
        if not (plan.lacks_blocks or (plan.preempted and self.under_way) or any(s.preempted for s in self.under_way)):
            self._admit(plan)
        step = plan.step(self.running)
        self._untold = [] if step.seqs else step.preempted
        return step

    def follow(self, step: Step) -> Step | None:
        """The step after one under way, in which each sequence gets a token, with slots for these; none are left for
        drafts. None where others run, or may begin, or blocks run out."""
        seqs, has_seat = [each.seq for each in step.seqs], self._num_seats < self.max_num_seqs
        if seqs != self.running or (self.waiting and has_seat) or not all(self.cache.reserve(seq, 1) for seq in seqs):
            return None
        return Step([ScheduledSeq(seq, begun(seq), 1, sampled=True) for seq in seqs], 0, 0)

    @property
    def _decoding(self) -> list[Sequence]:
        """Those that run and have all KV but that of their last token, whether that is under way or not."""
        return [seq for seq in self.running if len(seq.tokens) - seq.cached == 1]

    def _share(self) -> list[Sequence]:
        """Those that decode in the next step: of several under way each has its part. Beams of a group are together."""
        ready = [seq for seq in self.running if len(seq.tokens) - begun(seq) == 1 and self._may_run(seq)]
        most, share = len(ready), list[Sequence]()
        if self.overlap.num > 1:
            most = -(-len(self._decoding) // self.overlap.num)
        for seq in ready:
            if len(share) < max(most, 1) or (seq.beams is not None and seq.beams is share[-1].beams):
                share.append(seq)
        return share

    def _may_run(self, seq: Sequence) -> bool:
        """Whether none of its beams is under way; the search goes on by what comes of all of them."""
        return seq.beams is None or not any(beam.under_way for beam in seq.beams.live)

    def _seconds_for_chunks(self, decoding: Collection[Sequence]) -> float:
        if not decoding:
            return max(_ALONE_S, self.max_step_s or 0.0)
        alone = self.cost.decoding.seconds(len(decoding), sum(seq.cached for seq in decoding))
        if self.max_step_s is not None:
            return self.max_step_s - alone
        return min((_SLOWDOWN * self.pace - 1) * alone, _WAIT_S * len(decoding))

    def _chunk(self, plan: _Plan, seq: Sequence) -> int:
        """How many of its tokens that have no KV yet are computed in this step; takes their time from the plan."""
        wanted = min(len(seq.tokens) - begun(seq), plan.left, most_tokens(seq, plan.logit_rows))
        least = min(wanted, _LEAST_CHUNK)
        count = min(wanted, self.cost.chunk(plan.seconds, begun(seq)))
        if count < least:
            if plan.has_chunks:
                return 0
            count = least
        plan.has_chunks = True
        plan.seconds -= self.cost.added(count, begun(seq))
        return count

    def _reserve(self, plan: _Plan, seq: Sequence, count: int) -> None:
        while not self.cache.reserve(seq, count):
            plan.lacks_blocks = True
            if (late := self.awaiting.withdraw()) is not None:
                self.add(late)
                continue
            last = self.running[-1]
            if self.under_way and (last is seq or last.under_way or not self._may_run(last)):
                return  # what is under way may give some back
            victims = self._preempt(last)
            plan.left += sum(plan.counts.pop(victim, 0) for victim in victims)  # its logits, which are few, go unused
            plan.preempted += victims
            if seq in victims:
                return
        plan.take(seq, count)

    def _preempt(self, seq: Sequence) -> list[Sequence]:
        """Take a sequence's blocks, and those of its fellow beams; returns all that lost theirs. Of beams the first one
        comes back, and the others when it has its KV again."""
        victims = [seq] if seq.beams is None else [beam for beam in seq.beams.live if beam in self.running]
        for victim in victims:
            self.running.remove(victim)
            self.adapters.release(victim)
            self.cache.free(victim)
        first, root = (seq, seq) if seq.beams is None else (seq.beams.live[0], seq.beams.seqs[0])
        root.stats.num_preemptions += 1
        self.num_preemptions += 1
        self.add(first)
        return victims

    def _admit(self, plan: _Plan) -> None:
        """Start waiting sequences in order until seats, budget or blocks run out. Where one waits for a slot of its
        adapter, those pass it that take none from it: without an adapter, or with one that has a slot. Of the latter no
        more than there are seats do, as they keep slots in use, and none of a lower priority."""
        index, blocked = 0, None
        while index < len(self.waiting) and self._has_room(plan):
            seq = self.waiting[index]
            if seq.beams is not None and self._num_seats + seq.beams.width > self.max_num_seqs:
                return
            if blocked is None and not self.adapters.can_acquire(seq):
                blocked = seq
                self._num_passed = self._num_passed if self._passed is seq else 0
                self._passed = seq
            passes = blocked is not None and seq.adapter is not None
            if _awaits_sibling(seq) or (passes and not self._may_pass(seq)):
                index += 1
            elif self._start(plan, index):
                self._num_passed += passes
            else:
                return

    def _may_pass(self, seq: Sequence) -> bool:
        passed = self._passed
        assert passed is not None and seq.adapter is not None, "one waits, and this one may have its slot"
        is_first = seq.priority == passed.priority and self._num_passed < self.max_num_seqs
        return is_first and seq.adapter.slot >= 0

    def _has_room(self, plan: _Plan) -> bool:
        """Whether a step may start one more sequence, as far as can be told without a look at it."""
        has_time = not plan.has_chunks or self.cost.chunk(plan.seconds, 0) >= _LEAST_CHUNK
        return plan.left > 0 and has_time and self._num_seats < self.max_num_seqs

    @property
    def _num_seats(self) -> int:
        """Those that run, and the beams that may yet join them."""
        groups = {seq.beams for seq in self.running if seq.beams is not None}
        beams: int = sum(group.width for group in groups)
        return beams + sum(seq.beams is None for seq in self.running)

    def _start(self, plan: _Plan, index: int) -> bool:
        seq = self.waiting[index]
        if self._refuses_still(seq, plan.left):
            return False
        is_matched = self._share_prefix(seq)
        if is_matched and (begun := self.awaiting.reserve(seq)) is not None:
            if begun:
                del self.waiting[index]
            else:
                self.cache.free(seq)
            return begun
        needed = min(len(seq.tokens) - seq.cached, plan.left)  # whatever the time: blocks for less would be a bad start
        count = self._chunk(plan, seq)
        if not count or not self.cache.reserve(seq, needed):
            cached, shared = seq.cached, len(seq.blocks.ids)
            self.cache.free(seq)
            if count:
                self._refusal = _Refusal(seq, cached, needed, shared, self.cache.num_free)
            return False
        self._refusal = None
        if is_matched:
            own = max(0, seq.cached - seq.stats.num_received_tokens)
            self.cache.count_match(len(seq.tokens), own)
            seq.stats.num_prefix_cached_tokens = max(own, seq.stats.num_prefix_cached_tokens)
        seq.num_elsewhere = 0  # what was not had until now is not asked for later
        seq.stats.first_scheduled = seq.stats.first_scheduled or time.perf_counter()
        del self.waiting[index]
        self.adapters.acquire(seq)
        bisect.insort(self.running, seq, key=_rank)
        plan.take(seq, count)
        return True

    def _refuses_still(self, seq: Sequence, budget: int) -> bool:
        """Whether this sequence was refused, and would be again: nothing has come free since, it would ask for no fewer
        tokens, and no more of its prefix is found. O(1), where to look its prompt up is not."""
        last = self._refusal
        if last is None or last.seq is not seq or not self.running:
            return False
        free, asked = self.cache.num_free, min(len(seq.tokens) - last.cached, budget)
        if free > last.num_free or asked < last.num_asked or self.cache.would_match(seq, last.num_shared):
            return False
        self._refusal = last._replace(num_free=free)
        return True

    def _share_prefix(self, seq: Sequence) -> bool:
        """Give it the KV there is of its tokens; says whether that was looked up in the prefix cache."""
        parent = seq.parent
        if parent is not None and seq.num_output == 0 and parent.cached >= seq.num_prompt:
            self.cache.fork(parent, seq, seq.num_prompt - 1)
        elif seq.params.prompt_logprobs is None or len(seq.prompt_logprobs) == seq.num_prompt:
            self.cache.match_prefix(seq)
            return True
        return False


def _awaits_sibling(seq: Sequence) -> bool:
    """A further completion of a request starts when the first one's prompt is computed, to share it."""
    parent = seq.parent
    return parent is not None and seq.num_output == 0 and not parent.finished and parent.cached < seq.num_prompt


class _Refusal(NamedTuple):
    """A sequence that blocks did not suffice for, and with what: tokens found, tokens asked for, blocks shared and
    blocks free."""

    seq: Sequence
    cached: int
    num_asked: int
    num_shared: int
    num_free: int


class _Plan:
    """A step under construction: who takes how many tokens of the budget, and how many of the rows with logits that are
    nobody's own."""

    def __init__(self, budget: int, logit_rows: int, preempted: list[Sequence]) -> None:
        self.left = budget
        self.logit_rows = logit_rows
        self.seconds = 0.0  # for chunks of prompts
        self.has_chunks = self.lacks_blocks = False
        self.counts: dict[Sequence, int] = {}
        self.preempted = preempted

    def take(self, seq: Sequence, count: int) -> None:
        self.counts[seq] = count
        self.left -= count
        self.logit_rows -= num_shared_rows(seq, count)

    def step(self, running: list[Sequence]) -> Step:
        seqs = [
            ScheduledSeq(seq, begun(seq), count, sampled=begun(seq) + count == len(seq.tokens))
            for seq in running
            if (count := self.counts.get(seq))
        ]
        return Step(seqs, self.left, self.logit_rows, self.preempted)
