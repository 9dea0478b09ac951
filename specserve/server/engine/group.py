"""Engines that serve together, wherever they run: a request goes where the router says, adapters to all of them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from specserve.adapters import AdapterInfo, AdapterSource
from specserve.cluster.router import Load, Router
from specserve.engine.port import RequestPort
from specserve.engine.request import Request
from specserve.errors import EngineError, InputError, SpecserveError
from specserve.server.engine.client import EngineClient, UnknownAdapterError
from specserve.server.engine.handoff import Handoff
from specserve.server.engine.keeper import EngineKeeper, State
from specserve.server.engine.messages import Gauges, Ready, Role
from specserve.server.engine.prefill import PromptRouter
from specserve.server.metrics_totals import Engines, ReplicaStatus, summed
from specserve.server.wire.errors import unavailable

_log = logging.getLogger(__name__)
ONLY_PREFILL = "those that are ready have --role prefill. Start one with --role decode, or both."
_BEST_FIRST = (State.READY, State.RESTARTING, State.LOADING, State.FAILED, State.STOPPED)


class Member(EngineKeeper):
    """One of several engines, however it is run: for a class that is an EngineKeeper of its own."""

    def join(self, group: ReplicaGroup[Any], number: int) -> None:
        """Belong to a group, as the first step of a start."""
        self.number = number
        self.num_requests = 0
        self.totals = Engines()
        self._group = group

    @property
    def role(self) -> Role:
        """Whether it answers, or computes prompts for those that are "decode"; who is "both" computes its own."""
        return "both"

    @property
    def kv_address(self) -> str:
        """Where other engines fetch its KV; "": they are on its machine."""
        return ""

    @property
    def status(self) -> ReplicaStatus:
        gauges = self.totals.look(self.gauges)
        return ReplicaStatus(self.state.value, self.num_restarts, self.num_requests, gauges, self.role)

    def has(self, adapter: AdapterInfo) -> bool:
        """Whether it has these very numbers under that name."""
        known = self.adapters.get(adapter.name)
        return known is not None and known.digest == adapter.digest

    def load(self, adapter: AdapterInfo | None) -> Load | None:
        """What it has to do; None where it takes no request with that adapter."""
        if self.state is not State.READY or self.ready is None or (adapter is not None and not self.has(adapter)):
            return None
        at, num_waiting, seconds = 0, 0, (0.0,) * 4
        if (said := self.gauges) is not None:
            at, num_waiting = said.num_steps, said.num_waiting
            seconds = said.step_s, said.prompt_token_s, said.context_token_s, said.backlog_s
        return Load.after(
            at,
            num_waiting,
            seconds,
            num_open=self.client.num_completions,
            num_places=self.ready.max_num_seqs,
            num_blocks=self.ready.num_prefix_blocks,
        )

    def _notice_ready(self) -> None:
        was_ready = self.state is State.READY
        super()._notice_ready()
        if self.state is State.READY and not was_ready:
            self._group.became_ready(self)

    def _drop(self, cause: str) -> None:
        if self._client is not None:
            self.totals.look(self._client.gauges)
            self.totals.lost()
        super()._drop(cause)


M = TypeVar("M", bound=Member)


class ReplicaGroup(ABC, Generic[M]):
    """As an EngineKeeper, of several engines that serve the same model. A member's number is its place in the list,
    that of the router and that of metrics."""

    def __init__(self, num_engines: int, block_size: int, least_tokens: int | None = None) -> None:
        """Prompts of at least `least_tokens` tokens are computed elsewhere, as PromptRouter says, where an engine only
        does that."""
        self._replicas: list[M] = []
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.adapters: dict[str, AdapterInfo] = {}  # that requests may name
        self._router = Router(num_engines, block_size)
        self._prompts = PromptRouter(num_engines, block_size, least_tokens)
        self._changing = asyncio.Lock()  # adapters
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def state(self) -> State:
        """The best of a replica."""
        return min((each.state for each in self._replicas), key=_BEST_FIRST.index)

    @property
    def ready(self) -> Ready | None:
        """What one that takes requests said when it was ready, or else the first."""
        return next((each.ready for each in self._taking()), self._replicas[0].ready)

    @property
    def num_restarts(self) -> int:
        return sum(each.num_restarts for each in self._replicas)

    @property
    def num_places(self) -> int:
        """Places beyond those that the server's own start counted."""
        return 0

    @property
    def gauges(self) -> Gauges:
        """The sums over all engines that have run."""
        found = summed([each.totals.look(each.gauges) for each in self._replicas])
        return replace(found, num_transfer_failures=found.num_transfer_failures + self._prompts.num_not_computed)

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        return [each.status for each in self._replicas]

    def place(self, request: Request) -> RequestPort:
        """The engine that a request goes to. Raises EngineError when there is none, WireError when none has the
        adapter."""
        member = self._choose(request)
        source = self._source(request, member)
        if source is None:
            return member.client
        source.num_requests += 1
        told = self._prompts.told(source.number, member.number)
        return Handoff(source.client, lambda: self._again(member, request), told, source.kv_address)

    def _adapter_of(self, request: Request) -> AdapterInfo | None:
        return None if request.adapter is None else self.adapters.get(request.adapter)

    def _loads(self, adapter: AdapterInfo | None) -> list[Load | None]:
        """Of those that answer requests with that adapter."""
        return [None if each.role == "prefill" else each.load(adapter) for each in self._replicas]

    def _source(self, request: Request, member: M) -> M | None:
        """Who computes the prompt of a request that this member answers; None: that does itself."""
        if member.role != "decode" or request.params.prompt_logprobs is not None or request.embeds:
            return None
        adapter = self._adapter_of(request)
        load = member.load(adapter)
        loads = [each.load(adapter) if each.role == "prefill" else None for each in self._replicas]
        if load is None or not any(loads):
            return None
        digest = adapter.digest if adapter else ""
        found = self._prompts.choose(request, digest, member.number, load, self._router.num_uncached, loads)
        return None if found is None else self._replicas[found]

    def _again(self, member: M, request: Request) -> EngineClient:
        """The engine that answers, once the prompt is computed: the one that was chosen, if that is still there."""
        return (member if member.state is State.READY else self._choose(request)).client

    def _choose(self, request: Request) -> M:
        """Raises as `place`."""
        adapter = self._adapter_of(request)
        loads = self._loads(adapter)
        if not any(loads):
            if any(self._answering()):
                raise unavailable("The adapter is being loaded again. Send the request again in a moment.")
            raise EngineError(self._no_engine)
        chosen = self._router.choose(request.prompt_ids, request.salt, loads, adapter.digest if adapter else "")
        self._replicas[chosen].num_requests += 1
        return self._replicas[chosen]

    def wake_engine(self) -> None:
        """Have the one that has least to do ready for a request. Raises EngineError when there is none."""
        if not (answering := self._answering()):
            raise EngineError(self._no_engine)
        min(answering, key=lambda each: each.client.num_open).client.wake_engine()

    async def reset_prefix_cache(self) -> None:
        """Of all, before any request that comes later. Raises EngineError where there is no engine."""
        for each in self._some_taking():
            each.client.reset_prefix_cache()
            self._forget(each)

    @abstractmethod
    async def wait_until_ready(self) -> Ready:
        """What the first said when it was ready. Raises EngineError with the cause when it could not start."""

    async def load_adapter(self, source: AdapterSource, replaces: bool) -> AdapterInfo:
        """Load an adapter in all replicas, or where one refuses it in none. Raises InputError for one that is refused,
        EngineError where there is no engine."""
        return await self._undisturbed(self._load(source, replaces))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Let none name it any more. Raises UnknownAdapterError, and EngineError where there is no engine."""
        return await self._undisturbed(self._unload(name))

    async def close(self, hurried: bool = False) -> None:
        """As EngineKeeper.close, of all."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(each.close(hurried) for each in self._replicas))
        if not self.finished.done():
            self.finished.set_result(None)

    def became_ready(self, member: M) -> None:
        """What it has cached is nothing that is known. Adapters came and went while it was started."""
        self._forget(member)
        self._begin(self._bring_up_to_date(member))

    def takes_requests_without(self, member: M) -> bool:
        return any(each is not member for each in self._taking())

    @property
    def _no_engine(self) -> str:
        """Why nobody answers."""
        if self._taking():
            return f"No engine answers: {ONLY_PREFILL}"
        return f"The engine is {self.state.value}; try again in a moment."

    def _forget(self, member: M) -> None:
        """What it has cached is nothing that is known."""
        self._router.forget(member.number)
        self._prompts.forget(member.number)

    def _answering(self) -> list[M]:
        """Those that take requests of clients."""
        return [each for each in self._taking() if each.role != "prefill"]

    def _taking(self) -> list[M]:
        return [each for each in self._replicas if each.state is State.READY]

    def _some_taking(self) -> list[M]:
        """Raises EngineError where none does."""
        taking = self._taking()
        if not taking:
            raise EngineError(self._no_engine)
        return taking

    def _one_finished(self, future: asyncio.Future[None]) -> None:
        error = future.exception()
        if error is not None and not self.finished.done():
            self.finished.set_exception(error)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        """What it raises is for who waits for it, if anybody still does."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _undisturbed(self, change: Coroutine[Any, Any, AdapterInfo]) -> AdapterInfo:
        """Nobody who waits for it cancels it: replicas would differ."""
        found: AdapterInfo = await asyncio.shield(self._begin(change))
        return found

    async def _load(self, source: AdapterSource, replaces: bool) -> AdapterInfo:
        async with self._changing:
            taking = self._some_taking()
            found = await asyncio.gather(
                *(each.load_adapter(source, replaces) for each in taking), return_exceptions=True
            )
            loaded = {each: info for each, info in zip(taking, found, strict=True) if isinstance(info, AdapterInfo)}
            errors = [error for error in found if isinstance(error, BaseException)]
            refusals = [error for error in errors if not isinstance(error, EngineError)]
            if len({info.digest for info in loaded.values()}) > 1:
                refusals.append(InputError("The adapter's files changed while they were read. Try again.", "lora_path"))
            if refusals:
                await self._undo(source.name, list(loaded))
                raise refusals[0]
            if not loaded:
                raise errors[0]
            self.adapters[source.name] = info = next(iter(loaded.values()))
            return info

    async def _undo(self, name: str, loaded: Sequence[M]) -> None:
        """Give those that loaded an adapter back what they had under its name."""
        before = self.adapters.get(name)
        for each in loaded:
            try:
                await (each.unload_adapter(name) if before is None else each.load_adapter(_source(before), True))
            except SpecserveError as error:
                _log.error("Replica %d: adapter %r cannot be what it was: %s", each.number, name, error)

    async def _unload(self, name: str) -> AdapterInfo:
        async with self._changing:
            taking = self._some_taking()
            if name not in self.adapters:
                raise UnknownAdapterError(f"There is no adapter {name!r}.", "lora_name")
            info = self.adapters.pop(name)
            having = [each for each in taking if name in each.adapters]
            found = await asyncio.gather(*(each.unload_adapter(name) for each in having), return_exceptions=True)
            for error in found:  # an engine that is gone has none
                if isinstance(error, BaseException) and not isinstance(error, EngineError):
                    raise error
            return info

    async def _bring_up_to_date(self, member: M) -> None:
        """Let one that has just started have the adapters of the others."""
        async with self._changing:
            for name, info in self.adapters.items():
                if not member.has(info):
                    await self._tried(member, name, member.load_adapter(_source(info), True))
            for name in member.adapters.keys() - self.adapters.keys():
                await self._tried(member, name, member.unload_adapter(name))

    async def _tried(self, member: M, name: str, change: Coroutine[Any, Any, AdapterInfo]) -> None:
        try:
            await change
        except SpecserveError as error:
            _log.error("Replica %d has not the others' adapter %r: %s", member.number, name, error)


def _source(info: AdapterInfo) -> AdapterSource:
    return AdapterSource(info.name, info.path, info.is_pinned, info.head)
