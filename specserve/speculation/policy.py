"""Decides who drafts for a sequence, and how much: the only place that does. See `Policy`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from specserve.cache.cache import KVCache
from specserve.config import DEFAULT_NUM_SPECULATIVE_TOKENS
from specserve.errors import ConfigError, InputError, unknown
from specserve.registry import DRAFTERS
from specserve.runtime.pack import Step
from specserve.speculation.base import DraftContext
from specserve.speculation.grammar import guide
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import NONE, prepare
from specserve.types import Draft, ScheduledSeq, Sequence, Verdict

MOST_JUMP_FORWARD = 16  # tokens of a draft; a step of so many rows takes about half as long again as one of one
PREDICTION = "prediction"  # the drafter of a request that has a prediction and names none


class Policy:
    """Drafts for all sequences of an engine. Its own drafter, of `num_tokens` a draft, is for requests that name none
    and predict nothing; "none" is no drafter. A request may name another: any file of drafters/ whose options all have
    defaults, which drafts `num_tokens` as well, or 5 where that is 0. Tokens that a grammar leaves no choice of are
    drafted whoever drafts, as they are seldom rejected, unless the request names "none" or wants drafts of 0 tokens.

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
        context: DraftContext,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.num_tokens = num_tokens
        self.context = context  # for drafters that requests name
        self._own = own
        self._cache = cache
        self._max_model_len = max_model_len
        self._timed = timed
        self._hosts = {own.name: own}
        self._num_seqs: Counter[DraftHost] = Counter()  # of hosts that have any
        self._num_dropped_before = 0  # by drafters that were replaced

    @property
    def num_dropped(self) -> int:
        """Lost drafts of all drafters, replaced ones included."""
        return self._num_dropped_before + sum(host.num_dropped for host in self._hosts.values())

    def replace(self, own: DraftHost, num_tokens: int) -> None:
        """Close all drafters and go on with another one as the engine's own. Only while there is no sequence."""
        assert not self._num_seqs, "a sequence must end with the drafter it began with"
        self.close()
        self._num_dropped_before = self.num_dropped
        self._own, self.num_tokens = own, num_tokens
        self._hosts = {own.name: own}

    def admit(self, group: list[Sequence], drafter: str | None) -> None:
        """Settle who drafts for the completions of a request, which names `drafter` or, with None, leaves it to us.
        Raises InputError for a name that does not exist (with near misses) or a drafter that no request can bring
        about; then nothing changed."""
        named = PREDICTION if drafter is None and group[0].prediction else drafter
        host = self._own if named is None else self._host(named)
        most = self.num_tokens if self.num_tokens or named is None else DEFAULT_NUM_SPECULATIVE_TOKENS
        for seq in group:
            seq.drafter = host.name
            seq.draft_limit = most if host.active else 0
            seq.jump_forward = drafter != NONE
            seq.stats.drafter, seq.stats.predicted = host.name, host.name == PREDICTION and bool(seq.prediction)
            longest = MOST_JUMP_FORWARD if seq.grammar is not None and seq.jump_forward else 0
            seq.stats.longest_draft = max(longest, seq.draft_limit)
            self._num_seqs[host] += 1
            host.begin(seq)

    def draft(self, step: Step) -> None:
        """Give every sequence that decodes in a step its draft, with slots for all of its nodes."""
        decodes = [each.num_new == 1 and each.seq.num_output > 0 for each in step.seqs]
        budgets = [
            self._reserve(step, each) if decoding else 0 for each, decoding in zip(step.seqs, decodes, strict=True)
        ]
        with self._timed("draft"):
            drafts = self._propose(step.seqs, budgets)
        with self._timed("mask"):
            for each, draft, budget in zip(step.seqs, drafts, budgets, strict=True):
                each.draft = guide(each.seq, draft, budget) if budget and each.seq.grammar is not None else draft
                if each.draft is not draft:
                    _forget_others(each.seq, draft, each.draft)

    def observe(
        self,
        step: Step,
        verdicts: Mapping[Sequence, Verdict],
        hidden: Mapping[int, Tensor],
    ) -> None:
        """Tell the drafters what a step has done."""
        for host in self._num_seqs:
            host.observe([s for s in step.seqs if s.seq.drafter == host.name], verdicts, hidden, step.preempted)

    def end(self, seq: Sequence) -> None:
        host = self._hosts[seq.drafter]
        self._num_seqs[host] -= 1
        self._num_seqs += Counter()  # drops what is zero
        host.end(seq)

    def close(self) -> None:
        """Let go of all drafters and their threads. Sequences may still end."""
        for host in self._hosts.values():
            host.close()

    def _reserve(self, step: Step, each: ScheduledSeq) -> int:
        """How many tokens a draft may have that slots are now reserved for. A step emits one token more than the draft,
        and none past max_tokens or the context."""
        seq = each.seq
        limit = seq.draft_limit if self._hosts[seq.drafter].active else 0
        if seq.grammar is not None and seq.jump_forward:
            with self._timed("mask"):
                limit = max(limit, min(len(seq.grammar.jump_forward()), MOST_JUMP_FORWARD))
        if seq.params.num_speculative_tokens is not None:
            limit = min(limit, seq.params.num_speculative_tokens)
        if not limit:
            return 0
        left = min(seq.max_tokens - seq.num_output, self._max_model_len - len(seq.tokens)) - 1
        count = max(0, min(limit, left, step.num_tokens_left, step.num_logits_left))
        while count and not self._cache.reserve(seq, each.num_new + count):
            count //= 2
        step.num_tokens_left -= count
        step.num_logits_left -= count
        return count

    def _propose(self, step: list[ScheduledSeq], budgets: list[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(step)
        for host in self._num_seqs:
            if not host.active:
                continue
            share = [i for i, each in enumerate(step) if each.seq.drafter == host.name]
            found = host.propose([step[i].seq for i in share], [budgets[i] for i in share])
            for i, draft in zip(share, found, strict=True):
                drafts[i] = draft
        return drafts

    def _host(self, name: str) -> DraftHost:
        """The drafter of that name, made if there is none yet. Only of drafters/, as a request shall not decide whose
        code is run. Whatever goes wrong is the request's error: it may end nothing else."""
        if not isinstance(name, str):
            raise InputError(f"drafter is {name!r}; it must be the name of a drafter.", "drafter")
        if name in self._hosts:
            return self._hosts[name]
        known = DRAFTERS.files()
        if name not in {NONE, *known}:
            hint = "One of another package must be the engine's --drafter."
            message = unknown("drafter", name, {NONE, self._own.name, *known})
            raise InputError(f"{message} {hint}", "drafter")
        try:
            make = prepare(name, None)
            drafter = None if make is None else make(self.context)
            host = DraftHost(drafter, self._own.vocab_size, self._own.timeout_s, name)
            if host.needs.hidden_layers:  # the step that was recorded shows it none
                raise ConfigError(f"Drafter {name!r} reads layers of the target: it must be the engine's --drafter.")
        except ConfigError as error:
            raise InputError(str(error), "drafter") from error
        except Exception as error:
            raise InputError(f"Drafter {name!r} cannot be made: {type(error).__name__}: {error}.", "drafter") from error
        self._hosts[name] = host
        return host


def _forget_others(seq: Sequence, proposed: Draft, kept: Draft) -> None:
    """A grammar has changed a draft: what a drafter's model computed of nodes that are others now is not theirs."""
    same = 0
    for a, b in zip(_nodes(proposed), _nodes(kept), strict=False):
        if a != b:
            break
        same += 1
    seq.draft_cached = min(seq.draft_cached, len(seq.tokens) + same)


def _nodes(draft: Draft) -> list[tuple[int, int]]:
    return list(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True))
