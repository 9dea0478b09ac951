"""One step of the engine: pick, propose, pack, run, judge, keep, commit. One synchronous thread, no I/O, no text."""

from __future__ import annotations

import bisect
import time

from torch import Tensor

from specserve.cache.cache import KVCache
from specserve.config import DEFAULT_NUM_SPECULATIVE_TOKENS
from specserve.engine.beginning import check_beginning
from specserve.engine.commit import event, extend
from specserve.engine.counters import Counters
from specserve.engine.request import Limits, Request, sequences
from specserve.engine.scheduler import Scheduler
from specserve.errors import ConfigError, InputError
from specserve.runtime.batch import Batch, Rows, Work, pack
from specserve.runtime.runner import Output, Runner
from specserve.sampling.sampler import Sampler
from specserve.speculation.base import NONE, DraftHost
from specserve.speculation.drafters import Drafters
from specserve.structured import masks
from specserve.structured.base import Grammar
from specserve.types import Draft, Event, Failure, Ids, Sequence, Verdict

_BROKEN_KV = (
    "The model's keys or values of token {} are NaN or infinite: the model or its precision cannot handle this input. "
    "Try another dtype."
)
MOST_FORCED = 16  # tokens of a draft; a step of so many rows takes about half as long again as one of one


class Engine:
    """Generates tokens for all sequences together. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        scheduler: Scheduler,
        sampler: Sampler,
        drafters: Drafters,
        limits: Limits,
        num_speculative_tokens: int,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.scheduler = scheduler
        self.sampler = sampler
        self.drafters = drafters
        self.limits = limits
        self.num_speculative_tokens = num_speculative_tokens
        self.counters = Counters()
        self.requests: dict[str, list[Sequence]] = {}  # waiting or running
        self._num_arrived = 0

    def use(self, drafter: DraftHost, num_speculative_tokens: int) -> None:
        """Draft with another drafter from now on, where a request names none. Raises ConfigError while a request is
        running."""
        if self.has_work:
            raise ConfigError("The drafter can only be changed while no request is running.")
        self.drafters.replace(drafter)
        self.num_speculative_tokens = num_speculative_tokens

    def add(self, request: Request, grammar: Grammar | None = None) -> None:
        """Queue a request; `grammar` is its params.structured, compiled. Raises InputError; then nothing remains."""
        if request.id in self.requests:
            raise InputError(f"Request id {request.id!r} is in use; every running request needs its own.", "request_id")
        group = sequences(request, self.limits, grammar)
        check_beginning(group[0], self.limits.vocab_size)
        self.drafters.require(group[0].drafter)
        self.requests[request.id] = list(group)
        for seq in group:
            seq.order = self._num_arrived
            self._num_arrived += 1
            self.drafters.begin(seq)
            seq.stats.drafter, seq.stats.longest_draft = self.drafters.name_of(seq), self._longest_draft(seq)
            self.scheduler.add(seq)

    def abort(self, request_id: str, index: int | None = None) -> list[Event]:
        """End a request, or one of its completions, at any moment. An unknown id is no error: it just finished."""
        doomed = [s for s in self.requests.get(request_id, ()) if index is None or s.index == index]
        for seq in doomed:
            seq.finish_reason = "abort"
            self._end(seq)
        self.counters.num_aborted += len(doomed)
        return [event(seq, []) for seq in doomed]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[Event]:
        """Verify one draft, possibly empty, of every sequence whose prompt is computed; returns what each said."""
        timed, mask_s, begun = self.counters.timed, -self.counters.seconds["mask"], time.perf_counter()
        with timed("total"):
            work = self.scheduler.pick(self._draft_limit)
            with timed("draft"):
                drafts = self.drafters.propose(work.seqs, work.budgets)
            with timed("mask"):
                drafts = self._guide(work, drafts)
            batch = pack(work, drafts, self.runner.ops.row_multiple)
            out, allowed = self._forward(batch)
            with timed("sample"):
                results = self._judge(batch, out, allowed) | _broken(work, batch, out)
            events, verdicts = self._keep(work, batch.rows, results)
            with timed("draft"):
                self.drafters.commit(list(verdicts), list(verdicts.values()), self._hidden(batch.rows, verdicts, out))
            self._close(work, batch)
        self.scheduler.cost.observe(*_load(work, batch), time.perf_counter() - begun)
        self.counters.settle(mask_s + self.counters.seconds["mask"], _num_masked(batch.rows))
        return events

    def _draft_limit(self, seq: Sequence) -> int:
        """How many tokens its draft may have. A drafter that the request names drafts although the engine's number is
        0, which stands for those that name none. What a grammar forces is drafted unless the request wants no drafts:
        it is seldom rejected."""
        return max(self._num_forced(seq), self._num_proposed(seq))

    def _longest_draft(self, seq: Sequence) -> int:
        """The highest that `_draft_limit` may ever be."""
        may_force = seq.grammar is not None and seq.drafter != NONE
        return max(MOST_FORCED if may_force else 0, self._num_proposed(seq))

    def _num_proposed(self, seq: Sequence) -> int:
        if not self.drafters.can_draft(seq):
            return 0
        count = self.num_speculative_tokens
        return count if count or seq.drafter is None else DEFAULT_NUM_SPECULATIVE_TOKENS

    def _num_forced(self, seq: Sequence) -> int:
        if seq.grammar is None or seq.drafter == NONE:
            return 0
        with self.counters.timed("mask"):
            return min(len(seq.grammar.forced()), MOST_FORCED)

    def _guide(self, work: Work, drafts: list[Draft]) -> list[Draft]:
        """The drafts as grammars leave them."""
        return [
            draft if seq.grammar is None or not budget else masks.guide(seq, draft, budget)
            for seq, draft, budget in zip(work.seqs, drafts, work.budgets, strict=True)
        ]

    def _forward(self, batch: Batch) -> tuple[Output, Ids | None]:
        """What the target says, and the bits of what grammars allow: they are asked while it works."""
        timed, own = self.counters.timed, masks.Masks(batch.rows, -(-self.limits.vocab_size // 32))
        with timed("forward"):
            self.runner.start(batch)
        with timed("mask"):
            own.fill()
        with timed("forward"):
            out = self.runner.finish()
        with timed("mask"):
            return out, own.finish(out.best)

    def _judge(self, batch: Batch, out: Output, allowed: Ids | None) -> dict[Sequence, Verdict | Failure]:
        """What the target says of each draft, and of the prompt tokens whose log-probabilities are asked for."""
        logits = out.logits
        results = self.sampler(logits, batch.rows, allowed, out.best) if batch.rows.seqs else []
        start = batch.rows.num_rows
        for seq, targets in batch.scored:
            scores = self.sampler.score(logits[start : start + len(targets)], targets, seq.params.prompt_logprobs or 0)
            seq.prompt_logprobs += [None] * (not seq.prompt_logprobs)  # nothing predicts the first token
            seq.prompt_logprobs += scores
            start += len(targets)
        return dict(zip(batch.rows.seqs, results, strict=True))

    def _keep(
        self, work: Work, rows: Rows, results: dict[Sequence, Verdict | Failure]
    ) -> tuple[list[Event], dict[Sequence, Verdict]]:
        """Commit what the target said, tokens to the sequences and their KV to the cache; a failure ends its own."""
        drafts = dict(zip(rows.seqs, rows.drafts, strict=True))
        events: list[Event] = []
        verdicts: dict[Sequence, Verdict] = {}
        for seq, count in zip(work.seqs, work.counts, strict=True):
            result = results.get(seq)
            if result is None:
                self.cache.keep(seq, count)
            elif isinstance(result, Failure):
                events.append(_failed(seq, [], result))
            else:
                self.cache.keep(seq, count, result.path, result.tokens)
                tokens = extend(seq, drafts[seq], result)
                fault = self._advance(seq, tokens)
                events.append(event(seq, tokens) if fault is None else _failed(seq, tokens, fault))
                verdicts[seq] = result
        return events, verdicts

    def _advance(self, seq: Sequence, tokens: list[int]) -> Failure | None:
        """Why a sequence's grammar cannot follow it, None where it can or there is none."""
        if seq.grammar is None:
            return None
        with self.counters.timed("mask"):
            return masks.advance(seq, tokens)

    def _hidden(self, rows: Rows, verdicts: dict[Sequence, Verdict], out: Output) -> Tensor | None:
        """The hidden states that judged each emitted token, sequence after sequence, for drafters that want them."""
        if not self.drafters.wants_hidden:
            return None
        judged = [
            (start, verdicts[seq].path) for seq, start in zip(rows.seqs, rows.starts, strict=True) if seq in verdicts
        ]
        return out.hidden[[start + row for start, path in judged for row in (0, *(node + 1 for node in path))]]

    def _close(self, work: Work, batch: Batch) -> None:
        """Count the step, then let go of what finished in it."""
        counters = self.counters
        for seq in work.seqs:
            if seq.cached > seq.furthest:
                counters.num_advanced += seq.cached - seq.furthest
                seq.furthest = seq.cached
        counters.num_steps += 1
        counters.num_rows += batch.query_starts[-1]
        counters.num_prefill_chunks += len(work.seqs) - len(batch.rows.seqs)
        counters.num_preemptions = self.scheduler.num_preemptions
        counters.num_drafts_dropped = self.drafters.num_dropped
        usage = self.cache.usage()
        counters.live_tokens += usage.live_tokens
        counters.allocated_tokens += usage.allocated_tokens
        for seq in work.seqs:
            if seq.finished:
                self._end(seq)

    def _end(self, seq: Sequence) -> None:
        seq.stats.finished = time.perf_counter()
        self.counters.num_forced_tokens += seq.stats.num_forced_tokens
        self.counters.num_accepted_forced_tokens += seq.stats.num_accepted_forced_tokens
        self.scheduler.remove(seq)
        self.drafters.end(seq)
        siblings = self.requests[seq.request_id]
        siblings.remove(seq)
        if not siblings:
            del self.requests[seq.request_id]


def _load(work: Work, batch: Batch) -> tuple[int, int, float]:
    """Rows of decoding, drafts included; tokens of chunks, and how many tokens those read on average."""
    rows, tokens, read = 0, 0, 0.0
    for i, count in enumerate(work.counts):
        if count == 1:
            rows += batch.query_starts[i + 1] - batch.query_starts[i]
        else:
            tokens += count
            read += count * (batch.cached[i] + count / 2)
    return rows, tokens, read / max(tokens, 1)


def _broken(work: Work, batch: Batch, out: Output) -> dict[Sequence, Failure]:
    """The sequences whose own tokens could not be computed. Draft nodes that could not are rejected as bad rows."""
    found: dict[Sequence, Failure] = {}
    for row in out.broken:
        i = bisect.bisect_right(batch.query_starts, row) - 1
        seq, offset = work.seqs[i], row - batch.query_starts[i]
        if offset < work.counts[i]:
            found.setdefault(seq, Failure(_BROKEN_KV.format(seq.cached + offset)))
    return found


def _num_masked(rows: Rows) -> int:
    """How many rows have a grammar's bits."""
    return sum(len(draft) + 1 for seq, draft in zip(rows.seqs, rows.drafts, strict=True) if seq.grammar is not None)


def _failed(seq: Sequence, tokens: list[int], failure: Failure) -> Event:
    """Its last event. A grammar that failed knows better why nothing may come."""
    seq.finish_reason = "error"
    fault = None if seq.grammar is None else seq.grammar.fault
    return event(seq, tokens, fault or failure)
