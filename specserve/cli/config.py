"""The TOML file as a source of options."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict

from specserve.cli.arguments import RENAMED
from specserve.config import EngineConfig
from specserve.errors import ConfigError, unknown
from specserve.files import read_text

_MOST_BYTES = 2**20


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


# Options of engines here; a server is told the model, too.
_LOCAL = {_option(entry.name) for entry in fields(EngineConfig) if entry.name != "model"} | {"--generation-config"}
# By command: what names engines elsewhere, and which of these options hold even then.
_OTHERS: dict[tuple[str, ...], tuple[str, frozenset[str]]] = {
    ("chat",): ("--url", frozenset[str]()),
    ("serve",): ("--engine", frozenset({"--generation-config", "--grammar-backend"})),
}


@dataclass(frozen=True)
class TomlFile:
    """A cyclopts config provider: top-level keys are engine options for every command that has them, a table is the
    options of the command it is named after ([generate], [bench.replay]). An unknown key is an error."""

    path: Path
    commands: tuple[str, ...]

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        values = self.read()
        for key in values:
            self._check(key, commands, arguments)
        self._check_names(values, commands)
        table = {name: values.pop(name) for name in self.commands if name in values}
        Dict(data=table, source=str(self.path))(app, commands, arguments)
        common = {key: value for key, value in values.items() if arguments.get(_option(key), None) is not None}
        Dict(data=common, source=str(self.path), use_commands_as_keys=False)(app, commands, arguments)

    def read(self) -> dict[str, Any]:
        """The file's content. Raises ConfigError."""
        try:
            return tomllib.loads(read_text(self.path, _MOST_BYTES, pipes=True))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"Cannot read the configuration file {self.path}: {error}.") from error

    def _check(self, key: str, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Raises ConfigError for a top-level key that is neither an engine option nor a command."""
        allowed = {*(entry.name for entry in fields(EngineConfig)), *self.commands}
        if key.replace("-", "_") in allowed:
            return
        if arguments.get(_option(key), None) is not None:
            table = ".".join(commands)
            raise ConfigError(f"{self.path}: {key!r} is an option of {' '.join(commands)}. Write it below [{table}].")
        raise ConfigError(f"{self.path}: {unknown('key', key, allowed)}")

    def _check_names(self, values: Mapping[str, Any], commands: tuple[str, ...]) -> None:
        """Raises ConfigError for an option of the command by the name that it had in an earlier version."""
        table: Any = values
        for name in commands:
            table = table.get(name) if isinstance(table, Mapping) else None
        renamed = RENAMED.get(commands, {})
        for key in table if isinstance(table, Mapping) else ():
            if (now := renamed.get(_option(key))) is not None:
                raise ConfigError(f"{self.path}: {key!r} of [{'.'.join(commands)}] is called {now[2:]!r} now.")


def only_stated_with_others(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A cyclopts config provider after all others: for a conversation with a server, and for a server of engines
    elsewhere, options of an engine come from the command line alone, where the command says that they do not hold.
    Those of the environment and of a file are for engines here."""
    others, kept = _OTHERS.get(commands, ("", frozenset[str]()))
    stated = arguments.get(others, None) if others else None
    if stated is None or not stated.tokens:
        return
    for argument in arguments:
        if (_LOCAL - kept).intersection(argument.names):
            argument.tokens = [token for token in argument.tokens if token.source == "cli"]
