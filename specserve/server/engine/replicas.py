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
from specserve.cluster.router import Load
from specserve.config import EngineConfig
from specserve.errors import CapacityError, ConfigError, SpecserveError
from specserve.machine.cores import THREADS, default_threads, usable_cores
from specserve.server.engine.client import Observer
from specserve.server.engine.group import Member, ReplicaGroup
from specserve.server.engine.keeper import State, Timeouts
from specserve.server.engine.messages import Ready, Role
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
        self.size, self.num_prefill = num_replicas, num_prefill
        self._config = EngineConfig(**options)
        check_prefill(self._config, num_prefill)
        check_experts(self._config, divides_experts)
        super().__init__(num_replicas, self._config.block_size, least_tokens)
        self._options = {**options, **_threads_of(self._config, num_replicas)}
        self._observers, self._timeouts = observers, timeouts
        self._have_started = False
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

    def role(self, number: int) -> Role:
        """Of a replica: "both" where none has one of its own."""
        if not self.num_prefill:
            return "both"
        return "prefill" if number >= self.size - self.num_prefill else "decode"

    def _loads(self, adapter: AdapterInfo | None) -> list[Load | None]:
        """Those that compute prompts for others answer where no other can."""
        answering = super()._loads(adapter)
        return answering if any(answering) else [each.load(adapter) for each in self._replicas]

    def _answering(self) -> list[Replica]:
        return super()._answering() or self._taking()

    async def wait_until_ready(self) -> Ready:
        """What the first said when it was ready. Raises EngineError with the cause when it could not start."""
        return await self._replicas[0].wait_until_ready()

    def became_ready(self, member: Replica) -> None:
        if not self._have_started:
            self._have_started, self.adapters = True, dict(member.adapters)
        _log.info("Replica %d of %d is ready.", member.number, self.size)
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

    def waited_for(self, member: Replica) -> str:
        """Whom a replica's engine waits for, which goes no further."""
        found = [] if self._together is None else self._together.behind()
        others = [str(number) for number in found if number != member.number]
        return f" It waited for replica {', '.join(others)}." if others else ""

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

    @property
    def role(self) -> Role:
        return self._siblings.role(self.number)

    def _engine_options(self) -> dict[str, Any]:
        """The next engine's cache is as large as the last one's, without regard to what others took since."""
        options = super()._engine_options()
        if self.ready is None:
            return options
        self._num_engines = 1
        return {**options, "kv_cache_gib": self.ready.kv_cache_gib}

    async def _run_one(self) -> str:
        return self._siblings.ended(self, await super()._run_one())

    def _trouble(self, begun: float) -> str | None:
        trouble = super()._trouble(begun)
        return None if trouble is None else trouble + self._siblings.waited_for(self)

    def _may_give_up(self) -> bool:
        return self.ready is None or not self._siblings.takes_requests_without(self)

    def _give_up(self, error: SpecserveError) -> None:
        shared = ", which share the memory" if isinstance(error, CapacityError) else ""
        super()._give_up(type(error)(f"Replica {self.number} of {self._siblings.size}{shared}: {error}"))


def check_prefill(config: EngineConfig, num_prefill: int) -> None:
    """Raises ConfigError where some engines cannot compute prompts for the others."""
    if not num_prefill:
        return
    if not config.prefix_caching:
        raise ConfigError("--prefill-replicas: what they compute is handed on by the prefix cache. Switch it on.")


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
