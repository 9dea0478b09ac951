"""`specserve rm`: removes models from this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token

from specserve.cli.json_output import JsonFile, notes, write_json
from specserve.cli.options import MODEL, MODEL_NAMES, OUTPUT
from specserve.errors import ConfigError


def _named(kind: Any, tokens: Sequence[Token]) -> tuple[str, ...]:
    """A cyclopts converter. A model that the environment or a file names for other commands is not meant."""
    if any(token.source != "cli" for token in tokens):
        raise ValueError("rm removes only models that its arguments name.")
    return tuple(token.value for token in tokens)


def rm(
    models: Annotated[
        tuple[str, ...],
        Parameter(
            name=MODEL_NAMES,
            group=MODEL,
            negative=(),
            consume_multiple=True,
            converter=_named,
            help="As `specserve list` names them.",
        ),
    ],
    *,
    yes: Annotated[bool, Parameter(negative=(), group=OUTPUT, help="Remove without asking.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Remove models from this machine, with their packed weights. Asks first."""
    from specserve.checkpoint.installed import find, remove

    found = [model for name in models for model in find(name)]
    if not yes and not sys.stdin.isatty():
        raise ConfigError("rm asks before it removes, and standard input is no terminal: give --yes.")
    told: list[dict[str, Any]] = []
    for model in found:
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        shared = " It is in the hub's cache, where other programs use it, too." if model.hub_id else ""
        agreed = yes or _agrees(f"Remove {model.name}, {size} in {model.folder}?{shared} [y/N] ")
        freed = remove(model) if agreed else 0
        line = f"Removed {model.name}: {freed / 1e6:,.0f} MB." if agreed else f"Kept {model.name}."
        print(line, file=notes(json_file))
        told.append({"name": model.name, "folder": str(model.folder), "removed": agreed, "freed_bytes": freed})
    write_json(json_file, told)


def _agrees(question: str) -> bool:
    try:
        print(question, end="", file=sys.stderr, flush=True)  # input would print it on standard output
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False
