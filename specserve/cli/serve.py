"""`specserve serve`: options of a server and its engine."""

from __future__ import annotations

import os
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from specserve.cli.options import Model, NamedEngineOptions, engine_options, help_of, options_type
from specserve.config import DEFAULT_MODEL
from specserve.errors import ConfigError
from specserve.server.engine.spawn import EngineSpawner
from specserve.server.options import ServeOptions
from specserve.server.scale_options import ScaleOptions

if TYPE_CHECKING:
    ListenOptions = ServeOptions
    NamedScaleOptions = ScaleOptions
else:
    ListenOptions = options_type(ServeOptions, "ListenOptions", help_of(ServeOptions, "Operation"))
    NamedScaleOptions = options_type(ScaleOptions, "NamedScaleOptions", help_of(ScaleOptions, "Operation"))

_ENGINE = NamedEngineOptions()
_LISTEN = ListenOptions()
_SCALE = NamedScaleOptions()
_OF_BOTH = ("model", "grammar_backend")  # options of an engine that its server uses, too


def serve(
    model: Model = DEFAULT_MODEL,
    *,
    listen: Annotated[ListenOptions, Parameter(name="*")] = _LISTEN,
    scale: Annotated[NamedScaleOptions, Parameter(name="*")] = _SCALE,
    engine: Annotated[NamedEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Serve a model over HTTP with OpenAI's API, until SIGINT or SIGTERM."""
    begun = _process_start()
    with EngineSpawner() as spawner:
        if listen.engine and scale.backend == "local":
            _check_engine_options(engine)
        elif scale.backend == "local" and not listen.enable_expert_parallel:  # whose engines inherit something
            spawner.prepare()  # before the imports below, which take as long as its own
        from specserve.server.http.run import serve as run
        from specserve.server.logs import configure

        options = ServeOptions(**{entry.name: getattr(listen, entry.name) for entry in fields(ServeOptions)})
        configure(options.log_format, options.log_level)
        told = engine_options(engine, model=model)
        if scale.backend == "local":
            run(told, options, begun, spawner)
            return
        from specserve.server.engine.on_ray import on_ray

        with on_ray(told, options, scale) as (secured, membership):
            run(told, secured, begun, spawner, membership)


def _check_engine_options(engine: NamedEngineOptions) -> None:
    """Raises ConfigError for options of engines where these are elsewhere: nothing here would obey them. Those of the
    environment and of a file have been left out."""
    given = [
        f"--{entry.name.replace('_', '-')}"
        for entry in fields(engine)
        if entry.name not in _OF_BOTH and getattr(engine, entry.name) != getattr(_ENGINE, entry.name)
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: with --engine engines are elsewhere and have their own options. Give these to "
            "`specserve engine` there."
        )


def _process_start() -> float:
    """When this process began, in seconds of time.perf_counter(); now, where /proc does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / _ticks_per_second()
    except (OSError, AttributeError):
        age = 0.0
    return time.perf_counter() - age


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")
