"""Several engines that serve together: each has a supervisor, and a request goes where the router says."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from specserve.adapters import AdapterInfo, AdapterSource
from specserve.cluster.router import Load, Router
from specserve.config import EngineConfig
from specserve.engine.request import Request
from specserve.errors import CapacityError, EngineError, InputError, SpecserveError
from specserve.machine.cores import THREADS, default_threads, usable_cores
from specserve.server.engine.client import EngineClient, Observer, UnknownAdapterError
from specserve.server.engine.messages import Gauges, Ready
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.engine.supervisor import State, Supervisor, Timeouts
from specserve.server.metrics_totals import Engines, ReplicaStatus, summed
from specserve.server.wire.errors import unavailable

_log = logging.getLogger(__name__)
_BEST_FIRST = (State.READY, State.RESTARTING, State.LOADING, State.FAILED, State.STOPPED)


class Replicas:
    """As a Supervisor, of `num_replicas` engines. `observers` gives each its observer, `options` are EngineConfig's
    fields; the first process comes from `spawner`.

    The others are started once the first is ready: it has packed the weights, which they map, and measured how large
    each cache may be. A replica whose engine is gone loses its own requests only and is started again. Starts that fail
    end all only of a replica that was never ready, or where no other takes requests.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        observers: Callable[[int], Observer],
        num_replicas: int,
        timeouts: Timeouts | None = None,
        spawner: EngineSpawner | None = None,
    ) -> None:
        self.size = num_replicas
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.adapters: dict[str, AdapterInfo] = {}  # that requests may name
        self._config = EngineConfig(**options)
        self._options = {**options, **_threads_of(self._config, num_replicas)}
        self._observers, self._timeouts = observers, timeouts
        self._router = Router(num_replicas, self._config.block_size)
        self._changing = asyncio.Lock()  # adapters
        self._tasks: set[asyncio.Task[Any]] = set()
        self._replicas = [self._replica(0, num_replicas, spawner)]
        self._starting = asyncio.create_task(self._start_others())

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
    def pids(self) -> list[int | None]:
        """By replica, as Supervisor.pid."""
        return [each.pid for each in self._replicas]

    @property
    def gauges(self) -> Gauges:
        """The sums over all engines that have run."""
        return summed([each.totals.look(each.gauges) for each in self._replicas])

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        started = [each.status for each in self._replicas]
        waiting = ReplicaStatus(State.LOADING.value, 0, 0, Engines().look(None))
        return started + [waiting] * (self.size - len(started))

    def place(self, request: Request) -> EngineClient:
        """The engine that a request goes to. Raises EngineError when there is none, WireError when none has the
        adapter."""
        adapter = None if request.adapter is None else self.adapters.get(request.adapter)
        loads = [each.load(adapter) for each in self._replicas]
        if not any(loads):
            if any(self._taking()):
                raise unavailable("The adapter is being loaded again. Send the request again in a moment.")
            raise EngineError(f"The engine is {self.state.value}; try again in a moment.")
        chosen = self._router.choose(request.prompt_ids, request.salt, loads, adapter.digest if adapter else "")
        self._replicas[chosen].num_requests += 1
        return self._replicas[chosen].client

    def wake_engine(self) -> None:
        """Have the one that has least to do ready for a request. Raises EngineError when there is none."""
        min(self._some_taking(), key=lambda each: each.client.num_open).client.wake_engine()

    def reset_prefix_cache(self) -> None:
        """Of all. Raises EngineError where there is no engine."""
        for each in self._some_taking():
            each.client.reset_prefix_cache()
            self._router.forget(each.number)

    async def wait_until_ready(self) -> Ready:
        """What the first said when it was ready. Raises EngineError with the cause when it could not start."""
        return await self._replicas[0].wait_until_ready()

    async def load_adapter(self, source: AdapterSource, replaces: bool) -> AdapterInfo:
        """Load an adapter in all replicas, or where one refuses it in none. Raises InputError for one that is refused,
        EngineError where there is no engine."""
        return await self._undisturbed(self._load(source, replaces))

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Let none name it any more. Raises UnknownAdapterError, and EngineError where there is no engine."""
        return await self._undisturbed(self._unload(name))

    async def close(self, hurried: bool = False) -> None:
        """As Supervisor.close, of all."""
        for task in (self._starting, *self._tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await self._starting
        await asyncio.gather(*(each.close(hurried) for each in self._replicas))
        if not self.finished.done():
            self.finished.set_result(None)

    def takes_requests_without(self, replica: Supervisor) -> bool:
        return any(each is not replica for each in self._taking())

    def became_ready(self, replica: Replica) -> None:
        """What it has cached is nothing. Adapters came and went while it was started."""
        self._router.forget(replica.number)
        if len(self._replicas) == 1 and not self.adapters:
            self.adapters = dict(replica.adapters)
        _log.info("Replica %d of %d is ready.", replica.number, self.size)
        self._begin(self._bring_up_to_date(replica))

    def _taking(self) -> list[Replica]:
        return [each for each in self._replicas if each.state is State.READY]

    def _some_taking(self) -> list[Replica]:
        """Raises EngineError where none does."""
        taking = self._taking()
        if not taking:
            raise EngineError(f"The engine is {self.state.value}; try again in a moment.")
        return taking

    async def _start_others(self) -> None:
        with suppress(SpecserveError):  # `finished` says it
            first = await self._replicas[0].wait_until_ready()
            self._options["kv_cache_gib"] = first.kv_cache_gib
            self._replicas += [self._replica(number, 1, None) for number in range(1, self.size)]

    def _replica(self, number: int, num_engines: int, spawner: EngineSpawner | None) -> Replica:
        options = {**self._options, **_store_of(self._config, number)}
        replica = Replica(self, number, options, self._observers(number), self._timeouts, spawner, num_engines)
        replica.finished.add_done_callback(self._one_finished)
        return replica

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

    async def _undo(self, name: str, loaded: Sequence[Replica]) -> None:
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

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Let one that has just started have the adapters of the others."""
        async with self._changing:
            for name, info in self.adapters.items():
                if not replica.has(info):
                    await self._tried(replica, name, replica.load_adapter(_source(info), True))
            for name in replica.adapters.keys() - self.adapters.keys():
                await self._tried(replica, name, replica.unload_adapter(name))

    async def _tried(self, replica: Replica, name: str, change: Coroutine[Any, Any, AdapterInfo]) -> None:
        try:
            await change
        except SpecserveError as error:
            _log.error("Replica %d has not the others' adapter %r: %s", replica.number, name, error)


class Replica(Supervisor):
    """One of them."""

    def __init__(
        self,
        group: Replicas,
        number: int,
        options: Mapping[str, Any],
        observer: Observer,
        timeouts: Timeouts | None,
        spawner: EngineSpawner | None,
        num_engines: int,
    ) -> None:
        self.number = number
        self.num_requests = 0
        self.totals = Engines()
        self._group = group
        super().__init__(options, observer, timeouts, spawner, f"Replica {number}: ", num_engines)

    @property
    def status(self) -> ReplicaStatus:
        return ReplicaStatus(self.state.value, self.num_restarts, self.num_requests, self.totals.look(self.gauges))

    def has(self, adapter: AdapterInfo) -> bool:
        """Whether it has these very numbers under that name."""
        known = self.adapters.get(adapter.name)
        return known is not None and known.digest == adapter.digest

    def load(self, adapter: AdapterInfo | None) -> Load | None:
        """What it has to do; None where it takes no request with that adapter."""
        if self.state is not State.READY or self.ready is None or (adapter is not None and not self.has(adapter)):
            return None
        num_open, gauges, places = self.client.num_completions, self.gauges, self.ready.max_num_seqs
        if gauges is None:
            return Load(num_open, max(0, num_open - places), places, num_blocks=self.ready.num_prefix_blocks)
        num_waiting = min(num_open, max(num_open - places, gauges.num_waiting))
        speeds = 1e3 * gauges.step_s, 1e3 * gauges.prompt_token_s
        return Load(num_open, num_waiting, places, *speeds, self.ready.num_prefix_blocks)

    def _engine_options(self) -> dict[str, Any]:
        """The next engine's cache is as large as the last one's, without regard to what others took since."""
        options = super()._engine_options()
        if self.ready is None:
            return options
        self._num_engines = 1
        return {**options, "kv_cache_gib": self.ready.kv_cache_gib}

    def _may_give_up(self) -> bool:
        return self.ready is None or not self._group.takes_requests_without(self)

    def _give_up(self, error: SpecserveError) -> None:
        shared = ", which share the memory" if isinstance(error, CapacityError) else ""
        super()._give_up(type(error)(f"Replica {self.number} of {self._group.size}{shared}: {error}"))

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


def _threads_of(config: EngineConfig, num_replicas: int) -> dict[str, int]:
    """The threads of each engine: those that were asked for, else its share of the cores."""
    cores = usable_cores()
    num_processes = num_replicas * config.tensor_parallel_size
    is_told = config.threads is not None or bool(os.environ.get(THREADS))
    threads = (config.threads or default_threads()) if is_told else max(1, cores // num_processes)
    if threads * num_processes > cores:
        _log.warning(
            "%d processes with %d threads each share %d cores and slow each other down.", num_processes, threads, cores
        )
    return {"threads": threads}


def _store_of(config: EngineConfig, number: int) -> dict[str, Any]:
    """Where a drafter keeps what it learned: each engine in a file of its own, the first in the one that is named."""
    path = config.drafter_options.get("store_path")
    if not number or not path:
        return {}
    return {"drafter_options": {**config.drafter_options, "store_path": f"{path}.{number}"}}


def _source(info: AdapterInfo) -> AdapterSource:
    return AdapterSource(info.name, info.path, info.is_pinned, info.head)
