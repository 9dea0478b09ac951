"""A server from start to end: engine, socket, signals, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specserve.checkpoint import catalog
from specserve.checkpoint.generation_config import stated_by
from specserve.machine.memory import return_large_blocks
from specserve.registry import DRAFTERS
from specserve.server.admission import Counts, OwnCounts
from specserve.server.api_processes.coordinator import ApiProcesses
from specserve.server.engine.group import ReplicaGroup
from specserve.server.engine.keeper import EngineKeeper, Timeouts
from specserve.server.engine.remote import Dialer
from specserve.server.engine.remote_engines import Membership, RemoteEngines
from specserve.server.engine.replicas import Replicas
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.engine.supervisor import Supervisor
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.http.app import check_root_path
from specserve.server.http.front import SWITCH_S, Front
from specserve.server.metrics import Metrics
from specserve.server.options import ServeOptions
from specserve.server.reports import OwnReports
from specserve.server.running import registered
from specserve.server.settings import Settings
from specserve.server.template_options import template_options
from specserve.structured.compiler import AUTO
from specserve.text.encoding import use_own_threads_only

_log = logging.getLogger("specserve")
_LOOK_S = 0.05  # between two looks at whether all requests have ended, while draining


def serve(
    engine: Mapping[str, Any],
    options: ServeOptions,
    begun: float,
    spawner: EngineSpawner,
    membership: Membership | None = None,
) -> None:
    """Serve until a signal ends it. `engine` are EngineConfig's fields; `begun` is when the process started, in seconds
    of time.perf_counter(); the engine's processes come from `spawner`. With `membership` all engines are elsewhere, and
    it adds and removes them while the server runs; what it raises ends the server. Raises EngineError with the cause
    when the engine cannot be kept running, ConfigError, ModelError or CapacityError for what the engine cannot start
    with, as far as that is known before anything listens; KeyboardInterrupt where a second SIGINT cut the drain
    short."""
    imported = time.perf_counter()
    sys.setswitchinterval(SWITCH_S)
    use_own_threads_only()
    return_large_blocks()
    options = replace(options, api_key=tuple(options.keys()), api_key_file=None)  # a pipe can be read once
    check_root_path(options.root_path)
    DRAFTERS.check(engine["drafter"])
    folder = catalog.resolve(engine["model"], progress=sys.stderr.isatty())
    timeline = {"process and imports": imported - begun, "model folder": time.perf_counter() - imported}

    async def live() -> bool:
        return await _Life(engine, options, folder, timeline, begun, spawner, membership).run()

    if asyncio.run(live()):
        raise KeyboardInterrupt


class _Life:
    """One run of a server."""

    def __init__(
        self,
        engine: Mapping[str, Any],
        options: ServeOptions,
        folder: Path,
        timeline: dict[str, float],
        begun: float,
        spawner: EngineSpawner,
        membership: Membership | None,
    ) -> None:
        names = options.served_model_name or (str(engine["model"]),)
        num_replicas, num_prefill = options.data_parallel_size, options.prefill_replicas
        self._are_elsewhere = bool(options.engine) or membership is not None
        num_places = 0 if self._are_elsewhere else (num_replicas - num_prefill) * engine["max_num_seqs"]
        settings = Settings(
            options=options,
            names=names,
            folder=str(folder),
            sampling=stated_by(options.generation_config, folder),
            template=template_options(options),
            capacity=num_places + options.max_queue,
            created=int(time.time()),
        )
        metrics = Metrics(names[0])
        timeouts = Timeouts(options.start_timeout_s, options.stall_timeout_s)
        self._options, self._folder, self._names = options, folder, names
        self._begun, self._timeline = begun, timeline
        started = {**engine, "model": str(folder)}
        self._supervisor: EngineKeeper | ReplicaGroup[Any]
        if self._are_elsewhere:
            dialer = Dialer.of(options, names[0], folder)
            told = timeouts, membership, options.prefill_min_tokens
            self._supervisor = RemoteEngines(options.engine, dialer, metrics.of_replica, *told)
        elif num_replicas > 1:
            parts = num_replicas, timeouts, spawner, num_prefill, options.prefill_min_tokens
            self._supervisor = Replicas(started, metrics.of_replica, *parts, options.enable_expert_parallel)
        else:
            self._supervisor = Supervisor(started, metrics, timeouts, spawner)
        self._spawned = time.perf_counter()
        self._metrics = metrics
        self._validator = GrammarValidator(folder, engine.get("grammar_backend", AUTO))
        self._front, self._counts = self._made(settings)
        self._signal: int | None = None
        self._asked_to_end = asyncio.Event()
        self._asked_again = asyncio.Event()

    def _made(self, settings: Settings) -> tuple[Front | ApiProcesses, Counts]:
        """What answers HTTP, here or in other processes, and what is counted there."""
        supervisor, metrics, validator = self._supervisor, self._metrics, self._validator
        if settings.options.api_processes > 1:
            processes = ApiProcesses(settings, supervisor, metrics, validator, self._timeline)
            return processes, processes.counts
        counts = OwnCounts()
        reports = OwnReports(metrics, supervisor, lambda: counts.draining)
        front = Front(settings, supervisor, metrics, validator, reports, timeline=self._timeline, counts=counts)
        return front, counts

    async def run(self) -> bool:
        """Whether Ctrl-C, pressed again, cut its drain short."""
        self._catch_signals()
        reporter, starting = asyncio.create_task(self._report()), asyncio.create_task(self._front.start())
        ended = asyncio.create_task(self._asked_to_end.wait())
        ends: list[asyncio.Future[Any]] = [ended, self._supervisor.finished, self._front.finished]
        try:
            await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                _log.info("Listening on %s; the engine is loading.", self._front.address)
                with registered(self._front.address, self._names, self._folder):
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    if not any(each.done() for each in ends[1:]):
                        await self._drain()
        finally:
            for task in (reporter, starting):
                task.cancel()
            await self._supervisor.close(hurried=self._asked_again.is_set())
            await self._front.close()
        for each in (self._supervisor.finished, self._front.finished):
            if each.done() and (error := each.exception()) is not None:
                raise error
        return self._signal == signal.SIGINT and self._asked_again.is_set()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)

    def _end(self, number: int) -> None:
        self._signal = self._signal or number
        if self._asked_to_end.is_set():
            self._asked_again.set()
        self._asked_to_end.set()

    async def _report(self) -> None:
        """Says when the engine is ready and how long what took, and from then on how it goes."""
        ready = await self._supervisor.wait_until_ready()
        gc.freeze()  # what was imported stays; to look at all of it takes 0.05 s, in which nobody is sent a token
        now = time.perf_counter()
        waited = now - self._spawned
        if self._are_elsewhere:
            loaded = {"engines elsewhere": waited}
        else:
            loaded = {"engine process and imports": waited - sum(ready.phases.values()), **ready.phases}
        self._timeline.update(loaded)
        self._timeline["total"] = now - self._begun
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._timeline.items())
        _log.info("%s", ready.summary)
        _log.info("Ready on %s (seconds: %s).", self._front.address, phases)
        self._validator.prepare(ready.vocab_size)
        while self._options.status_interval_s:
            await asyncio.sleep(self._options.status_interval_s)
            line = self._metrics.status_line(self._supervisor.gauges)
            if line is not None:
                _log.info("%s", line)

    async def _drain(self) -> None:
        """Take nothing new and let finish what runs, for as long as the options say or until a second signal."""
        counts = self._counts
        counts.draining = True
        _log.info("Draining %d requests; a second signal ends them at once.", counts.num_requests)
        limit_s = self._options.drain_timeout_s
        deadline = time.monotonic() + limit_s
        while counts.num_requests and time.monotonic() < deadline and not self._asked_again.is_set():
            await asyncio.sleep(_LOOK_S)
        if counts.num_requests:
            cause = "a second signal" if self._asked_again.is_set() else f"--drain-timeout-s {limit_s:g} is over"
            _log.warning("%d requests are cut off and told so: %s.", counts.num_requests, cause)
