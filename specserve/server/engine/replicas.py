"""Several engines of this machine that serve together, each in a process of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from specserve.adapters import AdapterInfo
from specserve.cluster.prefill import TransferCost
from specserve.cluster.router import Load, Router
from specserve.config import EngineConfig
from specserve.engine.port import RequestPort
from specserve.engine.request import Request
from specserve.errors import CapacityError, ConfigError, SpecserveError
from specserve.machine.cores import THREADS, default_threads, usable_cores
from specserve.server.engine.client import EngineClient, Observer
from specserve.server.engine.group import Member, ReplicaGroup
from specserve.server.engine.handoff import Handoff
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.messages import Gauges, Ready
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.engine.supervisor import Supervisor
from specserve.server.engine.together import Together
from specserve.server.metrics_totals import Engines, ReplicaStatus

_log = logging.getLogger(__name__)


class Replicas(ReplicaGroup["Replica"]):
    """As a Supervisor, of `num_replicas` engines. `observers` gives each its observer, `options` are EngineConfig's
    fields; the first process comes from `spawner`.

    The others are started once the first is ready: it has packed the weights, which they map, and measured how large
    each cache may be. A replica whose engine is gone loses its own requests only and is started again. Starts that fail
    end all only of a replica that was never ready, or where no other takes requests.

    The last `num_prefill` of them compute prompts for the others, which answer: of at least `least_tokens` tokens that
    the engine that answers has not cached, or None, where to compute these costs more than to send their KV. They
    answer requests, too, while no other engine takes any.

    With `divides_experts` each has some of the model's experts, and all step together: they are started at once, and
    when one's engine is gone those of all are, and are started again.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        observers: Callable[[int], Observer],
        num_replicas: int,
        timeouts: Timeouts | None = None,
        spawner: EngineSpawner | None = None,
        num_prefill: int = 0,
        least_tokens: int | None = None,
        divides_experts: bool = False,
    ) -> None:
        self.size, self.num_prefill, self._least_tokens = num_replicas, num_prefill, least_tokens
        self._config = EngineConfig(**options)
        _check_prefill(self._config, num_prefill)
        check_experts(self._config, divides_experts)
        super().__init__(Router(num_replicas, self._config.block_size))
        self._options = {**options, **_threads_of(self._config, num_replicas)}
        self._observers, self._timeouts = observers, timeouts
        self._prefill_router = Router(num_replicas, self._config.block_size)
        self._transfer_cost = TransferCost()
        self._have_started = False
        self._num_not_computed = 0  # prompts that were sent elsewhere for nothing
        self._together = Together(num_replicas) if divides_experts else None
        if self._together is None:
            self._replicas.append(self._replica(0, num_replicas, spawner))
            self._begin(self._start_others())
        else:
            for number in range(num_replicas):
                own = EngineSpawner(partial(self._together.inheritance, number))
                self._replicas.append(self._replica(number, num_replicas, own))

    @property
    def pids(self) -> list[int | None]:
        """By replica, as Supervisor.pid."""
        return [each.pid for each in self._replicas]

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        started = super().replicas
        waiting = ReplicaStatus(State.LOADING.value, 0, 0, Engines().look(None))
        found = [*started] + [waiting] * (self.size - len(started))
        return [replace(each, role=self.role(number)) for number, each in enumerate(found)]

    @property
    def gauges(self) -> Gauges:
        gauges = super().gauges
        return replace(gauges, num_transfer_failures=gauges.num_transfer_failures + self._num_not_computed)

    def role(self, number: int) -> str:
        """Of a replica: "both" where none has one of its own."""
        if not self.num_prefill:
            return "both"
        return "prefill" if number >= self.size - self.num_prefill else "decode"

    def place(self, request: Request) -> RequestPort:
        member = self._choose(request)
        source = self._source(request, member) if self.num_prefill else None
        if source is None:
            return member.client
        source.num_requests += 1
        return Handoff(source.client, lambda: self._again(member, request), self)

    async def reset_prefix_cache(self) -> None:
        await super().reset_prefix_cache()
        for each in self._replicas:
            self._prefill_router.forget(each.number)

    def transferred(self, num_tokens: int, milliseconds: float) -> None:
        self._transfer_cost.observe(num_tokens, milliseconds)

    def not_computed(self) -> None:
        self._num_not_computed += 1

    def _loads(self, adapter: AdapterInfo | None) -> list[Load | None]:
        """Those that compute prompts for others answer where no other can."""
        loads = super()._loads(adapter)
        answering = [None if self.role(i) == "prefill" else load for i, load in enumerate(loads)]
        return answering if any(answering) else loads

    def _source(self, request: Request, member: Replica) -> Replica | None:
        """Who computes the prompt of a request that this member answers; None: that does itself."""
        if self.role(member.number) == "prefill" or request.params.prompt_logprobs is not None or request.embeds:
            return None
        adapter, num_tokens = self._adapter_of(request), self._router.num_uncached
        load, loads = member.load(adapter), super()._loads(adapter)
        free = [None if each is None or each.num_waiting else each for each in loads]
        free = [each if self.role(i) == "prefill" else None for i, each in enumerate(free)]
        if not any(free) or load is None or num_tokens <= self._config.block_size:
            return None
        if self._least_tokens is None:
            pays = self._transfer_cost.pays(num_tokens, load.prompt_token_ms)
        else:
            pays = num_tokens >= self._least_tokens
        if not pays:
            return None
        digest = adapter.digest if adapter else ""
        return self._replicas[self._prefill_router.choose(request.prompt_ids, request.salt, free, digest)]

    def _again(self, member: Replica, request: Request) -> EngineClient:
        """The engine that answers, once the prompt is computed: the one that was chosen, if that is still there."""
        return (member if member.state is State.READY else self._choose(request)).client

    async def wait_until_ready(self) -> Ready:
        """What the first said when it was ready. Raises EngineError with the cause when it could not start."""
        return await self._replicas[0].wait_until_ready()

    def became_ready(self, member: Replica) -> None:
        if not self._have_started:
            self._have_started, self.adapters = True, dict(member.adapters)
        _log.info("Replica %d of %d is ready.", member.number, self.size)
        self._prefill_router.forget(member.number)
        super().became_ready(member)

    def ended(self, member: Replica, cause: str) -> str:
        """What those who wait for it are told of the end of a replica's engine."""
        lost_with = None if self._together is None else self._together.end(member.number)
        if lost_with is not None:
            return f"Replica {lost_with}, which has some of the experts, has ended."
        if self._together is not None:
            for each in self._replicas:
                if each is not member:
                    each.kill()
        return cause

    async def close(self, hurried: bool = False) -> None:
        await super().close(hurried)
        if self._together is not None:
            self._together.close()

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


class Replica(Member, Supervisor):
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
        self.join(group, number)
        self._siblings = group
        Supervisor.__init__(self, options, observer, timeouts, spawner, f"Replica {number}: ", num_engines)
        self._exchanges_kv = bool(group.num_prefill)

    def _engine_options(self) -> dict[str, Any]:
        """The next engine's cache is as large as the last one's, without regard to what others took since."""
        options = super()._engine_options()
        if self.ready is None:
            return options
        self._num_engines = 1
        return {**options, "kv_cache_gib": self.ready.kv_cache_gib}

    async def _run_one(self) -> str:
        return self._siblings.ended(self, await super()._run_one())

    def _may_give_up(self) -> bool:
        return self.ready is None or not self._siblings.takes_requests_without(self)

    def _give_up(self, error: SpecserveError) -> None:
        shared = ", which share the memory" if isinstance(error, CapacityError) else ""
        super()._give_up(type(error)(f"Replica {self.number} of {self._siblings.size}{shared}: {error}"))


def _check_prefill(config: EngineConfig, num_prefill: int) -> None:
    """Raises ConfigError where some engines cannot compute prompts for the others."""
    if not num_prefill:
        return
    if not config.prefix_caching:
        raise ConfigError("--prefill-replicas: what they compute is handed on by the prefix cache. Switch it on.")
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        raise ConfigError(
            "--prefill-replicas: their models must be in one process each; leave out --tensor-parallel-size and "
            "--pipeline-parallel-size."
        )


def check_experts(config: EngineConfig, divides_experts: bool) -> None:
    """Raises ConfigError where replicas cannot have some of the experts each."""
    if divides_experts and config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        raise ConfigError(
            "--enable-expert-parallel: each replica must be one process; leave out --tensor-parallel-size and "
            "--pipeline-parallel-size."
        )


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
