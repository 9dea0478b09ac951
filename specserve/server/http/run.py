"""A server from start to end: engine, socket, signals, drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.checkpoint import catalog
from specserve.checkpoint.generation_config import stated_by
from specserve.errors import SpecserveError
from specserve.machine.memory import return_large_blocks
from specserve.registry import DRAFTERS
from specserve.server.admission import Admission
from specserve.server.chats import Chats
from specserve.server.engine.keeper import Timeouts
from specserve.server.engine.replicas import Replicas
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.engine.supervisor import Supervisor
from specserve.server.grammar_validator import GrammarValidator
from specserve.server.http.app import check_root_path, make_app
from specserve.server.http.context import Context
from specserve.server.http.listen import Listener
from specserve.server.metrics import Metrics
from specserve.server.options import ServeOptions
from specserve.server.running import registered
from specserve.server.service import Service
from specserve.server.template_options import template_options
from specserve.structured.compiler import AUTO
from specserve.text.encoding import use_own_threads_only
from specserve.text.tokenizer import Tokenizer

_log = logging.getLogger("specserve")
_SWITCH_S = 0.0005  # for Python's 0.005, so long would every stream wait each time that a thread reads a long prompt
_LOOK_S = 0.05  # between two looks at whether all requests have ended, while draining


def serve(engine: Mapping[str, Any], options: ServeOptions, begun: float, spawner: EngineSpawner) -> None:
    """Serve until a signal ends it. `engine` are EngineConfig's fields; `begun` is when the process started, in seconds
    of time.perf_counter(); the engine's processes come from `spawner`. Raises EngineError with the cause when the
    engine cannot be kept running, ConfigError, ModelError or CapacityError for what the engine cannot start with, as
    far as that is known before anything listens; KeyboardInterrupt where a second SIGINT cut the drain short."""
    imported = time.perf_counter()
    sys.setswitchinterval(_SWITCH_S)
    use_own_threads_only()
    return_large_blocks()
    options.keys()
    check_root_path(options.root_path)
    DRAFTERS.check(engine["drafter"])
    folder = catalog.resolve(engine["model"], progress=sys.stderr.isatty())
    timeline = {"process and imports": imported - begun, "model folder": time.perf_counter() - imported}

    async def live() -> bool:
        return await _Life(engine, options, folder, timeline, begun, spawner).run()

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
    ) -> None:
        sampling = stated_by(options.generation_config, folder)
        template = template_options(options)
        names = options.served_model_name or (str(engine["model"]),)
        metrics = Metrics(names[0])
        timeouts = Timeouts(options.start_timeout_s, options.stall_timeout_s)
        self._options, self._folder = options, folder
        self._begun = begun
        started = {**engine, "model": str(folder)}
        num_replicas = options.data_parallel_size
        self._supervisor = (
            Supervisor(started, metrics, timeouts, spawner)
            if num_replicas == 1
            else Replicas(started, metrics.of_replica, num_replicas, timeouts, spawner)
        )
        self._spawned = time.perf_counter()
        validator = GrammarValidator(folder, engine.get("grammar_backend", AUTO))
        most = options.max_tokenize_characters
        apart = options.reasoning_format == "auto"
        chats, tokenizer = Chats(folder, template=template), Tokenizer(folder, template)
        self._service = Service(self._supervisor, tokenizer, metrics, validator, chats, most, apart)
        admission = Admission(num_replicas * engine["max_num_seqs"] + options.max_queue)
        self._context = Context(
            options=options,
            names=names,
            service=self._service,
            admission=admission,
            folder=folder,
            sampling=sampling,
            timeline=timeline,
        )
        self._listener = Listener(make_app(self._context), options)
        self._signal: int | None = None
        self._asked_to_end = asyncio.Event()
        self._asked_again = asyncio.Event()

    async def _prepare(self) -> None:
        try:
            await self._service.warm()
        except SpecserveError as error:  # requests that need it will say so too
            _log.warning("What conversations need could not be made ready: %s", error)

    async def run(self) -> bool:
        """Whether Ctrl-C, pressed again, cut its drain short."""
        self._catch_signals()
        reporter, preparing = asyncio.create_task(self._report()), list[asyncio.Task[None]]()
        try:
            await self._listener.start()
            preparing.append(asyncio.create_task(self._prepare()))
            _log.info("Listening on %s; the engine is loading.", self._listener.address)
            ended = asyncio.create_task(self._asked_to_end.wait())
            ends: list[asyncio.Future[Any]] = [ended, self._supervisor.finished]
            with registered(self._listener.address, self._context.names, self._folder):
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if not self._supervisor.finished.done():
                    await self._drain()
        finally:
            for task in (reporter, *preparing):
                task.cancel()
            await self._supervisor.close(hurried=self._asked_again.is_set())
            await self._listener.close()
            self._service.close()
        error = self._supervisor.finished.exception()
        if error is not None:
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
        waited = now - self._spawned - sum(ready.phases.values())
        self._context.timeline.update({"engine process and imports": waited, **ready.phases})
        self._context.timeline["total"] = now - self._begun
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._context.timeline.items())
        _log.info("%s", ready.summary)
        _log.info("Ready on %s (seconds: %s).", self._listener.address, phases)
        self._service.validator.prepare(ready.vocab_size)
        while self._options.status_interval_s:
            await asyncio.sleep(self._options.status_interval_s)
            line = self._service.metrics.status_line(self._supervisor.gauges)
            if line is not None:
                _log.info("%s", line)

    async def _drain(self) -> None:
        """Take nothing new and let finish what runs, for as long as the options say or until a second signal."""
        admission = self._context.admission
        admission.draining = True
        _log.info("Draining %d requests; a second signal ends them at once.", admission.num_requests)
        limit_s = self._options.drain_timeout_s
        deadline = time.monotonic() + limit_s
        while admission.num_requests and time.monotonic() < deadline and not self._asked_again.is_set():
            await asyncio.sleep(_LOOK_S)
        if admission.num_requests:
            cause = "a second signal" if self._asked_again.is_set() else f"--drain-timeout-s {limit_s:g} is over"
            _log.warning("%d requests are cut off and told so: %s.", admission.num_requests, cause)
