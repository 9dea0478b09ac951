"""The drafters of one engine: its own, and those that requests name. Knows which sequence is whose; never what a draft
holds."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter

import torch

from specserve.errors import ConfigError, InputError, unknown
from specserve.speculation.base import NONE, DraftHost, files, find
from specserve.types import Draft, Drafter, Sequence, Verdict


class Drafters:
    """One DraftHost for each drafter in use: the engine's own, and others as soon as a request names them. A step calls
    each once, with its own sequences in their order, so a drafter that fails loses its own drafts and no others.

    A request may name any file of drafters/ whose options all have defaults, "none", and the engine's own drafter
    whatever it is. `wants_hidden`: whether the drafter of any sequence between begin and end does.
    """

    def __init__(self, own: DraftHost) -> None:
        self.wants_hidden = False
        self._own = own
        self._hosts = {own.name: own}
        self._host_of: dict[Sequence, DraftHost] = {}
        self._num_seqs: Counter[DraftHost] = Counter()  # of hosts that have any
        self._only: DraftHost | None = None  # the host of all sequences, if it is one: the usual case, and a short path
        self._num_dropped_before = 0  # by drafters that were replaced

    @property
    def active(self) -> bool:
        """Whether drafts can come for a sequence that names no drafter."""
        return self._own.active

    @property
    def num_dropped(self) -> int:
        """Lost drafts of all drafters, replaced ones included."""
        total = self._num_dropped_before
        for host in self._hosts.values():
            total += host.num_dropped
        return total

    def replace(self, own: DraftHost) -> None:
        """Close all drafters and go on with another one as the engine's own. Only while there is no sequence."""
        assert not self._host_of, "a sequence must end with the drafter it began with"
        self.close()
        self._num_dropped_before = self.num_dropped
        self._own = own
        self._hosts = {own.name: own}

    def require(self, name: str | None) -> None:
        """Make the drafter of that name if there is none yet; None is the engine's own. Raises InputError for a name
        that does not exist (with near misses) or a drafter that no request can bring about; then nothing changed."""
        if name is None or (isinstance(name, str) and name in self._hosts):
            return
        drafter = _make(name, [NONE, self._own.name])
        self._hosts[name] = DraftHost(drafter, self._own.vocab_size, self._own.timeout_s, name)

    def can_draft(self, seq: Sequence) -> bool:
        """Whether a draft can come for this sequence, which has begun."""
        return self._host_of[seq].active

    def name_of(self, seq: Sequence) -> str:
        """The drafter of a sequence that has begun."""
        return self._host_of[seq].name

    def begin(self, seq: Sequence) -> None:
        """Hand a sequence to its drafter, which `require` has made. It hears of one that is scheduled."""
        host = self._own if seq.drafter is None else self._hosts[seq.drafter]
        self._host_of[seq] = host
        self._num_seqs[host] += 1
        self._look_round()
        host.begin(seq)

    def propose(self, seqs: list[Sequence], budget: list[int]) -> list[Draft]:
        """One draft for each sequence, of at most budget[i] tokens."""
        if self._only is not None:
            return self._only.propose(seqs, budget)
        drafts = [Draft.empty()] * len(seqs)
        for host, share in self._shares(seqs).items():
            found = host.propose([seqs[i] for i in share], [budget[i] for i in share])
            for i, draft in zip(share, found, strict=True):
                drafts[i] = draft
        return drafts

    def commit(self, seqs: list[Sequence], verdicts: list[Verdict], hidden: torch.Tensor | None) -> None:
        """Tell every drafter what the target said of its sequences, with their rows of `hidden`
        [sum of len(verdict.tokens), hidden size] if it wants them."""
        if self._only is not None:
            self._only.commit(seqs, verdicts, hidden)
            return
        for host, share in self._shares(seqs).items():
            rows = _rows(hidden, verdicts, share) if hidden is not None and host.wants_hidden else None
            host.commit([seqs[i] for i in share], [verdicts[i] for i in share], rows)

    def end(self, seq: Sequence) -> None:
        host = self._host_of.pop(seq)
        self._num_seqs[host] -= 1
        self._look_round()
        host.end(seq)

    def close(self) -> None:
        """Let go of all drafters and their threads. Sequences may still end."""
        for host in self._hosts.values():
            host.close()

    def _look_round(self) -> None:
        """Who has sequences now."""
        self._num_seqs += Counter()  # drops what is zero
        self._only = next(iter(self._num_seqs)) if len(self._num_seqs) == 1 else None
        self.wants_hidden = any(host.wants_hidden for host in self._num_seqs)

    def _shares(self, seqs: list[Sequence]) -> dict[DraftHost, list[int]]:
        """For each host which of `seqs` are its own, as indexes in order."""
        shares: dict[DraftHost, list[int]] = {}
        for i, seq in enumerate(seqs):
            shares.setdefault(self._host_of[seq], []).append(i)
        return shares


def _rows(hidden: torch.Tensor, verdicts: list[Verdict], share: list[int]) -> torch.Tensor:
    """The rows that belong to the verdicts of a share; verdict i has one for each of its tokens."""
    ends = list(itertools.accumulate(len(verdict.tokens) for verdict in verdicts))
    return hidden[[row for i in share for row in range(ends[i] - len(verdicts[i].tokens), ends[i])]]


def _make(name: str, known: list[str]) -> Drafter | None:
    """A drafter with its default options; None for "none". Only of drafters/, as a request shall not decide whose code
    is run. Whatever goes wrong is the request's error: it may end nothing else."""
    if not isinstance(name, str):
        raise InputError(f"drafter is {name!r}; it must be the name of a drafter.", "drafter")
    if name == NONE:
        return None
    if name not in files():
        hint = "One of another package must be the engine's --drafter."
        raise InputError(f"{unknown('drafter', name, {*known, *files()})} {hint}", "drafter")
    try:
        found = find(name)
        needed = _required(found)
        drafter = None if needed else found()
    except ConfigError as error:
        raise InputError(str(error), "drafter") from error
    except Exception as error:
        raise InputError(f"Drafter {name!r} cannot be made: {type(error).__name__}: {error}.", "drafter") from error
    if drafter is None:
        reason = f"needs {', '.join(needed)}, which no request can give"
        raise InputError(f"Drafter {name!r} {reason}: it must be the engine's --drafter.", "drafter")
    return drafter


def _required(drafter: type[Drafter]) -> list[str]:
    """The options without a default."""
    parameters = inspect.signature(drafter).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in several]
