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
_MOST_BLOCKS = 512  # leading blocks of a prompt that are looked at: about 0.4 ms of work
_MOST_KNOWN = 2**14  # blocks that are remembered of an engine, however many its cache has: about 2 MB
_MOST_TENANTS = 4096
_DIGEST_BYTES = 8  # two prompts that have the same cost a prefill, and no more


@dataclass(frozen=True, slots=True)
class Load:
    """An engine that takes requests. Of `num_open` completions that were sent there and have not ended `num_waiting`
    have no place among the `num_places` that run at once. `step_ms` is a step at this load and `prompt_token_ms` what a
    token of a prompt adds, both as the engine measured them; 0: not yet. `num_blocks`: of its prefix cache."""

    num_open: int
    num_waiting: int
    num_places: int
    step_ms: float = 0.0
    prompt_token_ms: float = 0.0
    num_blocks: int = 0

    @property
    def is_full(self) -> bool:
        """Whether another completion would wait."""
        return self.num_waiting > 0 or self.num_open >= self.num_places


class Router:
    """Remembers which engine got which prompts; what the engines do at the moment it is told with each request.

    A request waits only where all would let it wait. Among the others it goes where the steps that it shares with other
    completions and the tokens of its prompt that are not cached there cost least. So a prefix draws requests as long as
    it saves more than the load costs, and no longer. Where several cost the same, an engine comes that the tenant's
    last request went to (its drafters have learned from that), else the next in turn.

    A prefix is a number of whole blocks of `block_size` tokens. What is remembered is bounded, and forgotten from the
    end of the least recently used prompt on, as a prefix cache does.
    """

    def __init__(self, num_engines: int, block_size: int) -> None:
        self._block_size = block_size
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]
        self._homes: OrderedDict[bytes, int] = OrderedDict()  # the engine of a tenant's last request
        self._last = num_engines - 1

    def choose(self, prompt_ids: Sequence[int], salt: bytes, loads: Sequence[Load | None], adapter: str = "") -> int:
        """The number of an engine, which is taken to get the request. `loads` has None for those that take none; there
        must be another. Prompts of another `salt` or `adapter` share no prefix. `salt` is the tenant's name, too; b"":
        nobody's."""
        taking = [i for i, load in enumerate(loads) if load is not None]
        free = [i for i in taking if not _of(loads, i).is_full] or taking
        digests = self._digests(prompt_ids, salt, adapter)
        known = [_of(loads, i) for i in taking]
        step_ms = _mean((load.step_ms for load in known), 1.0)
        prompt_token_ms = _mean(
            (load.prompt_token_ms for load in known), 0.0
        )  # of equal engines: noise decides nothing

        def cost(engine: int) -> float:
            load = _of(loads, engine)
            num_steps = _STEPS_OF_WAITING * load.num_waiting + load.num_open - load.num_waiting
            cached = self._block_size * sum(1 for _ in takewhile(self._known[engine].__contains__, digests))
            return num_steps * (load.step_ms or step_ms) + (len(prompt_ids) - cached) * prompt_token_ms

        costs = {engine: cost(engine) for engine in free}
        least = min(costs.values())
        chosen = self._of_equals([engine for engine in free if costs[engine] == least], salt)
        self._remember(chosen, digests, _of(loads, chosen).num_blocks)
        return chosen

    def forget(self, engine: int) -> None:
        """Its caches are empty: another process has taken its place, or it was told to."""
        self._known[engine].clear()

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


def _of(loads: Sequence[Load | None], engine: int) -> Load:
    load = loads[engine]
    assert load is not None, "it takes requests"
    return load


def _mean(values: Iterable[float], otherwise: float) -> float:
    """Of what has been measured."""
    measured = [value for value in values if value]
    return fmean(measured) if measured else otherwise
