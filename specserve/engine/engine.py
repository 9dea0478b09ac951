"""One step of the engine: pick, draft, pack, execute, keep, observe. One synchronous thread, no I/O, and no text but
that of beams which stop strings may end."""

from __future__ import annotations

import bisect
import time
from collections import deque
from dataclasses import dataclass

from specserve.cache.cache import KVCache
from specserve.engine.append import append_verdict, event
from specserve.engine.beams import BeamGroup, BeginText, fellows, level
from specserve.engine.counters import Counters
from specserve.engine.request import Limits, Request, sequences
from specserve.engine.scheduler import Scheduler
from specserve.engine.validate import check_first_token
from specserve.errors import ConfigError
from specserve.runtime.executor import Executor, StepOutput
from specserve.runtime.pack import Step, StepInput, pack_step
from specserve.sampling.edits import changes_logits
from specserve.sampling.inputs import num_logit_rows
from specserve.speculation.controller import DraftController
from specserve.speculation.host import DraftHost
from specserve.speculation.weighing import Weighing
from specserve.structured.base import Grammar
from specserve.structured.masks import Masks, advance
from specserve.types import Event, Failure, ScheduledSeq, Sequence, Verdict

_BROKEN_KV = (
    "The model's keys or values of token {} are NaN or infinite: the model or its precision cannot handle this input. "
    "Try another dtype."
)


@dataclass(slots=True)
class _Packed:
    """A step that may begin."""

    step: Step
    inputs: StepInput
    scored: list[Sequence]


@dataclass(slots=True)
class _UnderWay:
    """A step that has begun."""

    step: Step
    scored: list[Sequence]
    masks: Masks
    load: tuple[int, int, int, float]
    is_alone: bool  # so far
    seconds: float  # that its beginning took
    mask_s: float  # that its masks took by now
    num_decoding: int


class Engine:
    """Generates tokens for all sequences together. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        executor: Executor,
        cache: KVCache,
        scheduler: Scheduler,
        drafting: DraftController,
        limits: Limits,
        counters: Counters,
        begin_text: BeginText,
    ) -> None:
        self.executor = executor
        self.cache = cache
        self.scheduler = scheduler
        self.adapters = scheduler.adapters
        self.drafting = drafting
        self.policy = drafting.policy
        self.limits = limits
        self.counters = counters
        self._begin_text = begin_text
        # Whether a step may begin before the last one is spoken of.
        self.begins_ahead = executor.is_asynchronous and executor.most_under_way == 1
        self.requests: dict[str, list[Sequence]] = {}  # waiting or running
        self._num_arrived = 0
        self._under_way: deque[_UnderWay] = deque()

    def use(self, drafter: DraftHost, num_speculative_tokens: int, adaptive: bool = False) -> None:
        """Draft with another drafter from now on, where a request names none; with `adaptive` what pays of its drafts,
        as DraftController says. Raises ConfigError while a request is running."""
        if self.requests:
            raise ConfigError("The drafter can only be changed while no request is running.")
        while self._under_way:  # of requests that were aborted
            self._end_step()
        self.cache.pool.forget_drafted()
        self.cache.reads_next = drafter.needs.reads_next
        self.executor.set_outputs(drafter.needs.hidden_layers, drafter.needs.top_k)
        most = self.executor.most_under_way
        weighing = Weighing(self.scheduler.cost.decoding, most) if adaptive else None
        self.drafting.use(drafter, num_speculative_tokens, weighing)

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request; `grammar` is its params.structured, compiled. Raises InputError; then nothing remains."""
        assert request.id not in self.requests, "whoever drives the engine gives each request an id of its own"
        adapter = None if request.adapter is None else self.adapters.find(request.adapter)
        group = sequences(request, self.limits, grammar, adapter)
        check_first_token(group[0], self.limits.vocab_size)
        beams = None if request.params.beam_width is None else BeamGroup(group, self.policy.reopen, self._begin_text)
        if beams is not None:
            beams.check(self.cache, self.scheduler.max_num_seqs)
        self.drafting.begin(group, request.drafter)
        self.requests[request.id] = list(group)
        for seq in group:
            seq.order = self._num_arrived
            self._num_arrived += beams is None  # beams have one place together
            self.adapters.open(seq)
            if beams is None:
                self.scheduler.add(seq)
        if beams is not None:
            self._num_arrived += 1
            self.scheduler.add(group[0])

    def abort(self, request_id: str, index: int | None = None) -> list[Event]:
        """End a request, or one of its completions, at any moment. An unknown id is no error: it just finished. One
        completion is ended by who reads its text, where a stop string came: that is an end, and not counted here."""
        group = self.requests.get(request_id, ())
        if group and (beams := group[0].beams) is not None:
            events: list[Event] = beams.abort()
            for seq in beams.seqs:
                self._end(seq)
            self.counters.num_aborted += beams.width
            return events
        doomed = [s for s in group if index is None or s.index == index]
        for seq in doomed:
            seq.finish_reason = "abort"
            self._end(seq)
        self.counters.num_aborted += len(doomed) if index is None else 0
        return [event(seq, []) for seq in doomed]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def receive(self) -> None:
        """Between steps: let requests go on that awaited KV from another engine."""
        self.scheduler.receive()

    def step(self) -> list[Event]:
        """Verify one draft, possibly empty, of every sequence of a step whose prompt is computed; returns what each
        said. Others may be under way then, which later calls end: where the executor takes several steps at once, or
        the next one has begun before this one is spoken of."""
        try:
            num_steps = self.scheduler.num_steps()
            while len(self._under_way) < num_steps and self._begin():
                pass
            return self._end_step() if self._under_way else []
        except BaseException:  # as if those had not begun
            self._under_way.clear()
            self.scheduler.abandon()
            self.executor.abandon()
            raise

    def _begin(self) -> bool:
        """Begin a step; says whether there is any: all that wait may lack blocks, which others have that await KV."""
        begun = self._times()
        with self.counters.timed("total"):
            step = self.scheduler.pick()
            if not step.seqs:
                return False
            self.drafting.draft(step)
            level(step)
            self._start(_Packed(step, *pack_step(step, self.executor.row_multiple)), begun)
        return True

    def _start(self, packed: _Packed, begun: tuple[float, float]) -> None:
        """A step is under way from now on, that was begun at these times."""
        step = packed.step
        self.executor.start(packed.inputs)
        masks = Masks(step.sampled, -(-self.limits.vocab_size // 32))
        with self.counters.timed("mask"):
            masks.fill()
        self.scheduler.begin(step)
        load, is_alone = step_load(step), not self._under_way
        for other in self._under_way:
            other.is_alone = False
        now, mask_s = self._times()
        took = now - begun[0], mask_s - begun[1]
        self._under_way.append(_UnderWay(step, packed.scored, masks, load, is_alone, *took, len(step.decoding)))

    def _times(self) -> tuple[float, float]:
        """Now, and how long masks took until now."""
        return time.perf_counter(), self.counters.seconds["mask"]

    def _end_step(self) -> list[Event]:
        """Finish the oldest step under way, keep what it said, and tell everybody of it, each once."""
        timed, (begun, mask_begun) = self.counters.timed, self._times()
        ending = self._under_way[0]
        step = ending.step
        with timed("total"):
            following = self._pack_ahead(step) if self.begins_ahead else None
            out = self.executor.finish(ending.masks.finish)
            self._under_way.popleft()
            self.scheduler.end()
            for seq, scores in zip(ending.scored, out.sampled.scores, strict=True):
                seq.prompt_logprobs += [None] * (not seq.prompt_logprobs)  # nothing predicts the first token
                seq.prompt_logprobs += scores
            for own in (each for each in step.sampled if each.seq.embeds):
                assert out.hidden is not None, "an executor shows states"
                own.seq.embedding = out.hidden[own.logits_start].cpu().numpy().tobytes()
            results = dict(zip((each.seq for each in step.sampled), out.sampled.results, strict=True))
            results.update(_broken(step, out))
            drafted = sum(len(each.draft) for each in step.seqs)
            step.seqs = [each for each in step.seqs if not each.seq.finished]  # what ended since is spoken of no more
            events, verdicts = self._keep(step, results)
            with timed("draft"):
                self.drafting.observe(step, verdicts, out.taps, out.top)
            ended = time.perf_counter()
            follows = following is not None and self._follow(following)
            self._close(step)
        seconds = ending.seconds + (ended if follows else time.perf_counter()) - begun
        seconds = self._alone(ending, seconds if ending.is_alone else seconds + out.more_s)
        for each in events:
            if each.explained is not None:
                each.explained.seconds = seconds
        without_asking = self.drafting.end_step(drafted, seconds)
        decoding = [verdicts[each.seq] for each in step.decoding if each.seq in verdicts]
        self.scheduler.observe(len(decoding), sum(len(verdict.tokens) for verdict in decoding))
        self.scheduler.cost.observe(*ending.load, without_asking)
        constrained = [each for each in step.sampled if each.seq.grammar is not None]
        mask_s = ending.mask_s + self.counters.seconds["mask"] - mask_begun
        self.counters.end_step(mask_s, num_logit_rows(constrained))
        if follows:
            self.drafting.draft(self._under_way[-1].step)  # it is under way, and so gets none
            self._under_way[-1].seconds = time.perf_counter() - ended  # what came since is of its time
        return events

    def _pack_ahead(self, step: Step) -> _Packed | None:
        """Pack what follows the step under way, while that is computed: all but the tokens that it gives, one to each
        sequence. None where more hangs on them, or others may join."""
        goes_on = all(map(_goes_on, step.seqs)) and self.drafting.rests(step)
        following = self.scheduler.follow(step) if goes_on else None
        return None if following is None else _Packed(following, *pack_step(following, self.executor.row_multiple))

    def _follow(self, packed: _Packed) -> bool:
        """Begin it with the tokens that there are now, before callers hear of them; says whether: not where a sequence
        has ended."""
        seqs = [each.seq for each in packed.step.seqs]
        if any(seq.finished for seq in seqs):
            return False
        packed.inputs.token_ids[: len(seqs)] = [seq.tokens[-1] for seq in seqs]
        self._start(packed, self._times())
        return True

    def _alone(self, ending: _UnderWay, seconds: float) -> float:
        """What a step would have taken alone that took so long in all stages."""
        overlap, cost, asking_s = self.scheduler.overlap, self.scheduler.cost, ending.step.asking_s
        if overlap.most == 1:
            return seconds
        expected, is_alone = cost.seconds(*ending.load), ending.is_alone
        seconds = overlap.ended(ending.load[0], ending.num_decoding, expected, seconds - asking_s, is_alone) + asking_s
        if not self.has_work:
            overlap.pause()
        return seconds

    def _keep(
        self, step: Step, results: dict[Sequence, Verdict | Failure]
    ) -> tuple[list[Event], dict[Sequence, Verdict]]:
        """Commit what the target said, tokens to the sequences and their KV to the cache; a failure ends its own."""
        events: list[Event] = []
        verdicts: dict[Sequence, Verdict] = {}
        groups: dict[BeamGroup, dict[Sequence, ScheduledSeq]] = {}
        for each in step.seqs:
            seq, result = each.seq, results.get(each.seq)
            if result is not None and seq.beams is not None:
                groups.setdefault(seq.beams, {})[seq] = each
            elif result is None:
                self.cache.keep(seq, each.num_new)
            elif isinstance(result, Failure):
                events.append(_failed(seq, [], result))
            else:
                self.cache.keep(seq, each.num_new, result.path, result.tokens)
                tokens = append_verdict(seq, each.draft, result)
                fault = None
                if seq.grammar is not None:
                    with self.counters.timed("mask"):
                        fault = advance(seq, tokens)
                events.append(event(seq, tokens) if fault is None else _failed(seq, tokens, fault))
                verdicts[seq] = result
        for beams, shares in groups.items():
            found, said = beams.keep(shares, results, self.cache, self.scheduler)
            events += found
            verdicts |= said
        return events, verdicts

    def _close(self, step: Step) -> None:
        """Count the step, then let go of what finished in it."""
        counters = self.counters
        for each in step.seqs:
            seq = each.seq
            if seq.cached > seq.furthest:
                counters.num_advanced += seq.cached - seq.furthest
                seq.furthest = seq.cached
            counters.num_rows += each.num_new + len(each.draft)
            counters.num_prefill_chunks += not each.sampled
        counters.num_steps += 1
        counters.num_preemptions = self.scheduler.num_preemptions
        counters.num_drafts_dropped = self.policy.num_dropped
        counters.draft_seconds = self.drafting.draft_seconds
        usage = self.cache.usage()
        counters.live_tokens += usage.live_tokens
        counters.allocated_tokens += usage.allocated_tokens
        for seq in [*dict.fromkeys(seq for each in step.seqs for seq in fellows(each.seq))]:
            if seq.finished:
                self._end(seq)

    def _end(self, seq: Sequence) -> None:
        seq.stats.finished = time.perf_counter()
        self.counters.num_jump_forward_tokens += seq.stats.num_jump_forward_tokens
        self.counters.num_accepted_jump_forward_tokens += seq.stats.num_accepted_jump_forward_tokens
        self.scheduler.remove(seq)
        self.adapters.close(seq)
        self.drafting.end(seq)
        siblings = self.requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request_id]


def _goes_on(each: ScheduledSeq) -> bool:
    """Whether the next step of a sequence is known but for the token that this one gives, unless that ends it."""
    seq = each.seq
    is_alike = not (seq.finished or seq.embeds or seq.grammar or seq.beams or seq.explained or changes_logits(seq))
    return is_alike and each.sampled and not len(each.draft) and seq.num_output + 1 < seq.max_tokens


def step_load(step: Step) -> tuple[int, int, int, float]:
    """Rows of decoding, drafts included, and the tokens of their sequences; tokens of chunks, and how many tokens those
    read on average."""
    rows, context, tokens, read = 0, 0, 0, 0.0
    for each in step.seqs:
        if each.sampled and each.num_new == 1:
            rows += 1 + len(each.draft)
            context += each.start
        else:
            tokens += each.num_new
            read += each.num_new * (each.start + each.num_new / 2)
    return rows, context, tokens, read / max(tokens, 1)


def _broken(step: Step, out: StepOutput) -> dict[Sequence, Failure]:
    """The sequences whose own tokens could not be computed. Draft nodes that could not are rejected as bad rows."""
    found: dict[Sequence, Failure] = {}
    for row in out.broken:
        each = step.seqs[bisect.bisect_right(step.seqs, row, key=lambda s: s.first_row) - 1]
        if row < each.first_row + each.num_new:
            found.setdefault(each.seq, Failure(_BROKEN_KV.format(each.start + row - each.first_row)))
    return found


def _failed(seq: Sequence, tokens: list[int], failure: Failure) -> Event:
    """Its last event. A grammar that failed knows better why nothing may come."""
    seq.finish_reason = "error"
    fault = None if seq.grammar is None else seq.grammar.fault
    return event(seq, tokens, fault or failure)
