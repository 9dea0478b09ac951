"""`--json [PATH]`, which is the same in all commands that report something."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

from cyclopts import Parameter, Token
from rich.console import Console

from specserve.cli.arguments import JSON, STDOUT
from specserve.cli.options import OUTPUT
from specserve.errors import ConfigError
from specserve.terminal import console


def _path(kind: Any, tokens: Sequence[Token]) -> Path | None:
    """A cyclopts converter; a file of options has true or false as well."""
    value = tokens[0].value
    if value.lower() in ("true", "false", STDOUT):
        return None if value.lower() == "false" else Path(STDOUT)
    return writable(kind, tokens)


def writable(kind: Any, tokens: Sequence[Token]) -> Path:
    """A cyclopts converter for a file that a command writes at its end: one that cannot be written must not cost what
    comes before. A file that is there stays as it is."""
    path = Path(tokens[0].value)
    try:
        if not path.exists():
            path.touch(exist_ok=False)
            path.unlink()
        elif path.is_file():  # whoever reads a pipe would see its end
            path.open("ab").close()
        elif path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
    except OSError as error:
        reason = error.strerror if os.path.isdir(path.parent) else f"there is no folder {path.parent}"
        raise ValueError(
            f"{path} cannot be written: {reason}. Name a file in a folder that you may write to."
        ) from None
    return path


JsonFile = Annotated[
    Path | None,
    Parameter(
        name=JSON,
        group=OUTPUT,
        converter=_path,
        help="JSON in place of text; with a path (FILE.json, or --json=PATH) text, and JSON in that file.",
    ),
]


def is_json_alone(file: Path | None) -> bool:
    """Whether standard output gets JSON, and so nothing else."""
    return file == Path(STDOUT)


def notes(file: Path | None) -> TextIO:
    """Where remarks go that stand beside the figures."""
    return sys.stderr if is_json_alone(file) else sys.stdout


def tables(file: Path | None, **options: Any) -> Console:
    """A console for what people read: silent where standard output gets JSON."""
    return console(quiet=is_json_alone(file), **options)


def write_json(file: Path | None, found: Any) -> None:
    """One JSON value to where --json says; nothing without it. Raises ConfigError for a file that cannot be written."""
    write_text(file, json.dumps(found, indent=1))


def write_json_lines(file: Path | None, found: Sequence[Any]) -> None:
    """As `write_json`, a value a line."""
    write_text(file, "\n".join(map(json.dumps, found)))


def write_text(file: Path | None, text: str) -> None:
    if file is None:
        return
    if is_json_alone(file):
        print(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{JSON}: {file} cannot be written: {error}.") from error


def end_if_interrupted(figures: dict[str, Any], measured: str, json_file: Path | None) -> None:
    """Say how much was `measured`, and raise KeyboardInterrupt, where Ctrl-C ended a measurement."""
    if figures["interrupted"]:
        print(f"Interrupted: the figures are of {measured}.", file=notes(json_file))
        raise KeyboardInterrupt
