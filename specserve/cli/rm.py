"""`specserve rm`: removes models from this machine."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from specserve.cli.options import MODEL, OUTPUT
from specserve.errors import ConfigError


def rm(
    *models: Annotated[
        str, Parameter(name="MODELS", group=MODEL, help="Names as `specserve list` shows them.", required=True)
    ],
    yes: Annotated[bool, Parameter(negative=(), group=OUTPUT, help="Remove without asking.")] = False,
) -> None:
    """Remove models from this machine, with their packed weights. Asks first."""
    from specserve.checkpoint.installed import find, remove

    found = [model for name in models for model in find(name)]
    if not yes and not sys.stdin.isatty():
        raise ConfigError("rm asks before it removes, and standard input is no terminal: give --yes.")
    for model in found:
        size = f"{model.num_bytes / 1e6:,.0f} MB"
        shared = " It is in the hub's cache, where other programs use it, too." if model.hub_id else ""
        if yes or _agrees(f"Remove {model.name}, {size} in {model.folder}?{shared} [y/N] "):
            print(f"Removed {model.name}: {remove(model) / 1e6:,.0f} MB.")
        else:
            print(f"Kept {model.name}.")


def _agrees(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
