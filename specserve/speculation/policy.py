"""Decides who may draft for a sequence, and how many tokens at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

from specserve.config import DEFAULT_NUM_SPECULATIVE_TOKENS
from specserve.errors import ConfigError, InputError, unknown
from specserve.registry import AUTO, DRAFTERS, NONE, RUNS_MODEL
from specserve.speculation.base import Needs
from specserve.speculation.constants import MOST_JUMP_FORWARD
from specserve.speculation.context import TargetContext
from specserve.speculation.host import DraftHost
from specserve.speculation.lookup import makers
from specserve.types import PREDICTION, Sequence


class Policy:
    """The drafters of an engine. Its own, of `num_tokens` a draft, is for requests that name none and predict nothing;
    "none" is no drafter. A request may name another: any file of drafters/ whose options all have defaults, which
    drafts `num_tokens` as well, or 5 where that is 0. Tokens that a grammar leaves no choice of are drafted whoever
    drafts, as they are seldom rejected, unless the request names "none" or wants drafts of 0 tokens."""

    def __init__(
        self,
        own: DraftHost,
        num_tokens: int,
        max_model_len: int,
        context: TargetContext,
        timed: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.num_tokens = num_tokens
        self.context = context  # for drafters that requests name
        self.parts: dict[Sequence, list[DraftHost]] = {}  # who drafts for it
        self.own = own
        self._max_model_len = max_model_len
        self._timed = timed
        self.hosts = _named(own)  # all that were made, by name
        self._num_seqs: Counter[DraftHost] = Counter()  # of hosts that have any
        self._num_dropped_before = 0  # by drafters that were replaced

    @property
    def num_dropped(self) -> int:
        """Lost drafts of all drafters, replaced ones included."""
        return self._num_dropped_before + sum(host.num_dropped for host in self.hosts.values())

    @property
    def active(self) -> list[DraftHost]:
        """Drafters that have sequences and may propose."""
        return [host for host in self._num_seqs if host.active]

    def host(self, seq: Sequence) -> DraftHost:
        """What drafts for it, under the name that it has there."""
        return self.hosts[seq.drafter]

    def replace(self, own: DraftHost, num_tokens: int) -> None:
        """Close all drafters and go on with another one as the engine's own. Only while there is no sequence."""
        assert not self._num_seqs, "a sequence must end with the drafter it began with"
        self.close()
        self._num_dropped_before = self.num_dropped
        self.own, self.num_tokens, self.hosts = own, num_tokens, _named(own)

    def admit(self, group: list[Sequence], drafter: str | None) -> None:
        """Choose who drafts for the completions of a request, which names `drafter` or, with None, leaves it to us.
        Raises InputError for a name that does not exist (with near misses) or a drafter that no request can bring
        about; then nothing changed."""
        predicted = drafter is None and group[0].prediction and PREDICTION not in {p.name for p in self.own.parts}
        named = PREDICTION if predicted else drafter
        host, of_beams = self.own if named is None else self._host(named), group[0].params.beam_width is not None
        if of_beams and host.active and not (host.is_trimmable and any(map(_reads_own_text, host.parts))):
            if named is not None:
                reason = f"drafter: {named!r} drafts no beams, as ngram and prediction do."
                raise InputError(f"{reason} Name one of these, or none.", "drafter")
            host = self._host(NONE)
        most = self.num_tokens if self.num_tokens or named is None else DEFAULT_NUM_SPECULATIVE_TOKENS
        for seq in group:
            seq.drafter = seq.stats.drafter = host.name
            seq.draft_limit = most if host.active else 0
            seq.jump_forward = drafter != NONE
            longest = MOST_JUMP_FORWARD if seq.grammar is not None and seq.jump_forward else 0
            seq.stats.longest_draft = max(longest, seq.draft_limit)
            self.parts[seq] = []
            for part in host.parts:
                if (seq.prediction or part.name != PREDICTION) and (not of_beams or _reads_own_text(part)):
                    self._join(seq, part)

    def limit(self, seq: Sequence) -> int:
        """How many tokens a draft may have. A step emits one token more than the draft, and none past max_tokens or the
        context."""
        limit = seq.draft_limit if self.host(seq).active else 0
        if seq.grammar is not None and seq.jump_forward:
            with self._timed("mask"):
                forced = len(seq.grammar.jump_forward()) if seq.beams is None else seq.beams.num_forced()
                limit = max(limit, min(forced, MOST_JUMP_FORWARD))
        if seq.params.num_speculative_tokens is not None:
            limit = min(limit, seq.params.num_speculative_tokens)
        left = min(seq.max_tokens - seq.num_output, self._max_model_len - len(seq.tokens)) - 1
        return max(0, min(limit, left))

    def reopen(self, seq: Sequence) -> None:
        """A beam has other tokens than it had."""
        for part in self.parts[seq]:
            part.end(seq)
            part.begin(seq)

    def rest(self, part: DraftHost) -> None:
        """Let it have no sequences until it wakes."""
        part.is_resting = True
        for seq, parts in self.parts.items():
            if part in parts:
                parts.remove(part)
                self._num_seqs[part] -= 1
                part.end(seq)
        self._num_seqs += Counter()

    def wake(self, part: DraftHost) -> None:
        """Let it have sequences again: those that come, and where it needs nothing of the steps that it was not told of
        those that are there."""
        part.is_resting = False
        for seq in self.parts:
            if part in self.host(seq).parts and not part.needs.hidden_layers and seq.params.beam_width is None:
                self._join(seq, part)
                self.parts[seq].sort(key=self.host(seq).parts.index)

    def _join(self, seq: Sequence, part: DraftHost) -> None:
        if not part.is_resting:
            self.parts[seq].append(part)
            self._num_seqs[part] += 1
            part.begin(seq)

    def end(self, seq: Sequence) -> None:
        for part in self.parts.pop(seq):
            self._num_seqs[part] -= 1
            part.end(seq)
        self._num_seqs += Counter()  # drops what is zero

    def close(self) -> None:
        """Let go of all drafters and their threads. Sequences may still end."""
        for host in self.hosts.values():
            host.close()

    def nameable(self) -> dict[str, str | None]:
        """All drafters that there are, by name: why a request may not name one, None where it may. Those that run no
        model are made to find that out, and not kept."""
        refused: dict[str, str | None] = {}
        running = DRAFTERS.stating(RUNS_MODEL)  # refused also where they have a part in "auto"
        for name in sorted({NONE, AUTO, self.own.name, *DRAFTERS.files()}):
            before, refused[name] = dict(self.hosts), None
            if name in running and name != self.own.name:
                refused[name] = f"Drafter {name!r} runs a model: it must be the engine's --drafter."
                continue
            try:
                self._host(name)
            except InputError as error:
                refused[name] = str(error)
            for host in set(self.hosts.values()).difference(before.values()):
                host.close()
            self.hosts = before
        return refused

    def _host(self, name: str) -> DraftHost:
        """The drafter of that name, made if there is none yet. Only of drafters/, as a request shall not decide whose
        code is run. Whatever goes wrong is the request's error: it may end nothing else."""
        if not isinstance(name, str):
            raise InputError(f"drafter is {name!r}; it must be the name of a drafter.", "drafter")
        if name in self.hosts:
            return self.hosts[name]
        known = DRAFTERS.files()
        if name not in {NONE, AUTO, *known}:
            hint = "One of another package must be the engine's --drafter."
            message = unknown("drafter", name, {NONE, AUTO, self.own.name, *known})
            raise InputError(f"{message} {hint}", "drafter")
        try:
            own = self.own
            found = makers(name, None)
            host = DraftHost.of(name, found, self.context, own.vocab_size, own.timeout_s, self.hosts)
            reason, new = "", [part for part in host.parts if part.name not in self.hosts]
            allowed, taken = self.context.memory_bytes, sum(part.needs.memory_bytes for part in new)
            if not set(host.needs.hidden_layers) <= set(own.needs.hidden_layers):  # the step as it was recorded
                reason = "reads layers of the target"
            elif host.needs.top_k > own.needs.top_k:
                reason = "reads the target's best tokens"
            elif allowed is not None and taken > allowed:
                reason = f"takes {taken} bytes beside which the KV cache was not sized"
            if reason:
                raise ConfigError(f"Drafter {name!r} {reason}: it must be the engine's --drafter.")
        except ConfigError as error:
            raise InputError(str(error), "drafter") from error
        except Exception as error:
            raise InputError(f"Drafter {name!r} cannot be made: {type(error).__name__}: {error}.", "drafter") from error
        self.hosts |= _named(host)
        return host


def _reads_own_text(host: DraftHost) -> bool:
    """Whether it drafts from nothing but the sequence: from what it was told, others would learn of beams that end."""
    return host.needs == Needs(observes=False)


def _named(host: DraftHost) -> dict[str, DraftHost]:
    return {part.name: part for part in host.parts} | {host.name: host}
