"""Chooses the engine that a request goes to: the one where it is expected to cost the fewest milliseconds."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean

_STEPS_OF_WAITING = 4  # that a request in the queue counts as; one that runs counts as one
# benchmarks/cluster_sim.py (LOG, 2026-11-27): with 0 a prefix is computed everywhere once all are busy, with 1 requests
# queue where it is.
_DELAYED = 0.3  # of the completions of an engine wait as long as a prompt is computed there
_MOST_BLOCKS = 512  # leading blocks of a prompt that are looked at: about 0.4 ms of work
_MOST_KNOWN = 2**14  # blocks that are remembered of an engine, however many its cache has: about 2 MB
_MOST_TENANTS = 4096
_DIGEST_BYTES = 8  # two prompts that have the same cost a prefill, and no more


@dataclass(frozen=True, slots=True)
class Load:
    """An engine that takes requests. Of `num_open` completions that were sent there and have not ended `num_waiting`
    do not run yet. `step_ms` is a step at this load, `prompt_token_ms` what a token of a prompt adds to it and
    `context_token_ms` what it adds for each token that it reads, all as the engine measured them; 0: not yet. After its
    last step, the `num_steps`-th, `backlog_ms` of prompts were not computed. `num_blocks`: of its prefix cache."""

    num_open: int
    num_waiting: int = 0
    step_ms: float = 0.0
    prompt_token_ms: float = 0.0
    context_token_ms: float = 0.0
    backlog_ms: float = 0.0
    num_steps: int = 0
    num_blocks: int = 0

    @classmethod
    def after(
        cls,
        num_steps: int,
        num_waiting: int,
        seconds: Sequence[float],
        *,
        num_open: int,
        num_places: int,
        num_blocks: int,
    ) -> Load:
        """Of an engine as it was after a step, to which more may have been sent since: `num_places` run at once.
        `seconds` are of a step, of a token of a prompt, of what that reads, and of the backlog."""
        num_waiting = min(num_open, max(num_open - num_places, num_waiting))
        step_ms, token_ms, context_ms, backlog_ms = (1e3 * each for each in seconds)
        return cls(num_open, num_waiting, step_ms, token_ms, context_ms, backlog_ms, num_steps, num_blocks)

    @property
    def num_shared_steps(self) -> int:
        """That another completion shares with those that are there."""
        return _STEPS_OF_WAITING * self.num_waiting + self.num_open - self.num_waiting

    @property
    def wait_ms(self) -> float:
        """What those that are there take before another has what it would have alone; 0 where no step was measured."""
        return self.num_shared_steps * self.step_ms + self.backlog_ms


class Router:
    """Remembers which engine got which prompts; what the engines do at the moment it is told with each request.

    A request goes where it is expected to cost the fewest milliseconds: the steps that it shares with other
    completions, four for each that waits there; the prompts that are computed before its own; and the tokens of its own
    that are not cached there. The latter count the more the more completions an engine has on average, as each waits
    while they are computed: so a prefix draws requests as long as it saves more than the load costs, and no longer.
    Where several cost the same, an engine comes that the tenant's last request went to (its drafters have learned from
    that), else the next in turn.

    A prefix is a number of whole blocks of `block_size` tokens. What is remembered is bounded, and forgotten from the
    end of the least recently used prompt on, as a prefix cache does. `num_uncached` are the tokens of the last prompt
    that are thought to be cached nowhere on the engine that was chosen.
    """

    def __init__(self, num_engines: int, block_size: int) -> None:
        self._block_size = block_size
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]
        self._sent: list[list[tuple[int, float]]] = [[] for _ in range(num_engines)]  # step that tells of it, prompt_ms
        self._homes: OrderedDict[bytes, int] = OrderedDict()  # the engine of a tenant's last request
        self._last = num_engines - 1
        self.num_uncached = 0

    def choose(self, prompt_ids: Sequence[int], salt: bytes, loads: Sequence[Load | None], adapter: str = "") -> int:
        """The number of an engine, which is taken to get the request. `loads` has None for those that take none; there
        must be another. Prompts of another `salt` or `adapter` share no prefix. `salt` is the tenant's name, too; b"":
        nobody's."""
        taking = {engine: load for engine, load in enumerate(loads) if load is not None}
        digests = self._digests(prompt_ids, salt, adapter)
        known = taking.values()  # of equal engines: the noise of what each measured decides nothing
        step_ms = _mean((load.step_ms for load in known), 1.0)
        token_ms = _mean((load.prompt_token_ms for load in known), 0.0)
        context_ms = _mean((load.context_token_ms for load in known), 0.0)
        weight = 1.0 + _DELAYED * fmean(load.num_open for load in known)
        prompt_ms, costs = {}, {}
        for engine, load in taking.items():
            cached = self._num_cached(engine, digests)
            num_new = len(prompt_ids) - cached
            prompt_ms[engine] = num_new * (token_ms + context_ms * (cached + num_new / 2))
            before = load.num_shared_steps * (load.step_ms or step_ms) + load.backlog_ms + self._unseen_ms(engine, load)
            costs[engine] = before + weight * prompt_ms[engine]
        least = min(costs.values())
        chosen = self._of_equals([engine for engine, cost in costs.items() if cost == least], salt)
        self.num_uncached = len(prompt_ids) - self._num_cached(chosen, digests)
        self._remember(chosen, digests, taking[chosen].num_blocks)
        seen = taking[chosen].num_steps + (2 if taking[chosen].num_open else 1)  # not by a step that runs already
        self._sent[chosen].append((seen, prompt_ms[chosen]))
        return chosen

    def _unseen_ms(self, engine: int, load: Load) -> float:
        """Of prompts that were sent there and that its backlog has not."""
        sent = self._sent[engine] = [each for each in self._sent[engine] if each[0] > load.num_steps]
        return sum(prompt_ms for _, prompt_ms in sent)

    def add_engine(self) -> None:
        """One more, which has the next number."""
        self._known.append(OrderedDict())
        self._sent.append([])

    def forget(self, engine: int) -> None:
        """Its caches are empty: another process has taken its place, or it was told to."""
        self._known[engine].clear()
        self._sent[engine].clear()

    def _num_cached(self, engine: int, digests: Sequence[bytes]) -> int:
        """Leading tokens of a prompt that its engine got before."""
        return self._block_size * sum(1 for _ in takewhile(self._known[engine].__contains__, digests))

    def _of_equals(self, engines: Sequence[int], tenant: bytes) -> int:
        if not tenant:
            chosen = min(engines, key=lambda engine: (engine - self._last - 1) % len(self._known))
            self._last = chosen
            return chosen
        home = self._homes.pop(tenant, None)
        chosen = home if home is not None and home in engines else self._of_equals(engines, b"")
        self._homes[tenant] = chosen
        if len(self._homes) > _MOST_TENANTS:
            self._homes.popitem(last=False)
        return chosen

    def _digests(self, ids: Sequence[int], salt: bytes, adapter: str) -> list[bytes]:
        """Of the leading blocks of a prompt, each of a block and all before it."""
        size = 8 * self._block_size  # bytes
        num_blocks = min(len(ids) // self._block_size, _MOST_BLOCKS)
        tokens = array("q", ids[: num_blocks * self._block_size]).tobytes()
        running = hashlib.blake2b(salt, key=adapter.encode()[:64], digest_size=_DIGEST_BYTES)
        found: list[bytes] = []
        for begin in range(0, len(tokens), size):
            running.update(tokens[begin : begin + size])
            found.append(running.digest())
        return found

    def _remember(self, engine: int, digests: Sequence[bytes], num_blocks: int) -> None:
        known = self._known[engine]
        for digest in reversed(digests):  # the first block is forgotten last
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > min(num_blocks, _MOST_KNOWN):
            known.popitem(last=False)


def _mean(values: Iterable[float], otherwise: float) -> float:
    """Of what has been measured."""
    measured = [value for value in values if value]
    return fmean(measured) if measured else otherwise
