"""Where prompts are computed: by the engine that answers, or by one that computes prompts for others."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.cluster.prefill import TransferCost, Ways
from specserve.cluster.router import Load, Router
from specserve.engine.request import Request


class PromptRouter:
    """Chooses for each request. Prompts of at least `least_tokens` tokens that are not cached where they are answered
    go elsewhere; None: where to compute these costs more than to send their KV."""

    def __init__(self, num_engines: int, block_size: int, least_tokens: int | None) -> None:
        self.num_not_computed = 0  # prompts that were sent elsewhere for nothing
        self._least_tokens = least_tokens
        self._cost, self._ways = TransferCost(), Ways()
        self.resize(num_engines, block_size)

    def resize(self, num_engines: int, block_size: int) -> None:
        """So many engines, with blocks of that size. Nothing is known of what they have cached."""
        self._router, self._block_size = Router(num_engines, block_size), block_size

    def add_engine(self) -> None:
        self._router.add_engine()

    def forget(self, number: int) -> None:
        """What this engine has cached is nothing that is known; it may be another one."""
        self._router.forget(number)
        self._ways.forget(number)

    def choose(
        self, request: Request, adapter: str, target: int, load: Load, num_uncached: int, loads: Sequence[Load | None]
    ) -> int | None:
        """Who computes the prompt of a request that engine `target` answers, which has this load and lacks so many
        tokens; None: that does itself. `loads` are those of the engines that compute prompts, `adapter` is a digest."""
        free = [
            each if each is not None and not each.num_waiting and self._ways.is_open(source, target) else None
            for source, each in enumerate(loads)
        ]
        if not any(free) or num_uncached <= self._block_size:
            return None
        if self._least_tokens is None:
            pays = self._cost.pays(num_uncached, load.prompt_token_ms)
        else:
            pays = num_uncached >= self._least_tokens
        return self._router.choose(request.prompt_ids, request.salt, free, adapter) if pays else None

    def told(self, source: int, target: int) -> TransferLog:
        return TransferLog(self, self._cost, self._ways, source, target)


class TransferLog:
    """What becomes of one prompt that is computed elsewhere: a Told."""

    def __init__(self, owner: PromptRouter, cost: TransferCost, ways: Ways, source: int, target: int) -> None:
        self._owner, self._cost, self._ways, self._way = owner, cost, ways, (source, target)

    def transferred(self, num_tokens: int, milliseconds: float) -> None:
        self._cost.observe(num_tokens, milliseconds)
        self._ways.succeeded(*self._way)

    def failed(self) -> None:
        self._ways.failed(*self._way)

    def not_computed(self) -> None:
        self._owner.num_not_computed += 1
