"""`specserve engine`: a headless engine, for a server elsewhere."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from specserve.cli.options import Model, NamedEngineOptions, engine_options, help_of, options_type
from specserve.config import DEFAULT_MODEL
from specserve.server.engine.listen_options import EngineListenOptions
from specserve.server.engine.spawn import EngineSpawner

if TYPE_CHECKING:
    ListenOptions = EngineListenOptions
else:
    ListenOptions = options_type(EngineListenOptions, "EngineListen", help_of(EngineListenOptions, "Operation"))

_ENGINE = NamedEngineOptions()
_LISTEN = ListenOptions()


def engine(
    model: Model = DEFAULT_MODEL,
    *,
    listen: Annotated[ListenOptions, Parameter(name="*")] = _LISTEN,
    engine: Annotated[NamedEngineOptions, Parameter(name="*")] = _ENGINE,
) -> None:
    """Run an engine without HTTP, for `specserve serve --engine HOST:PORT` elsewhere, until SIGINT or SIGTERM."""
    with EngineSpawner() as spawner:
        spawner.prepare()  # before the imports below, which take as long as its own
        from specserve.server.engine.headless import serve_headless
        from specserve.server.logs import configure

        names = [entry.name for entry in fields(EngineListenOptions)]
        options = EngineListenOptions(**{name: getattr(listen, name) for name in names})
        configure(options.log_format, options.log_level)
        serve_headless(engine_options(engine, model=model), options, spawner)
