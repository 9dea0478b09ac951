"""`specserve pull`: fetches a model into the cache, or lists what it holds."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from specserve.cli.options import MODEL, OUTPUT
from specserve.config import DEFAULT_MODEL


def pull(
    model: Annotated[
        str, Parameter(group=MODEL, help="Catalog name, .gguf file or hub id (org/name).")
    ] = DEFAULT_MODEL,
    *,
    list_installed: Annotated[
        bool, Parameter(name="--list", negative=(), group=OUTPUT, help="List the models in the cache; fetch nothing.")
    ] = False,
) -> None:
    """Fetch a model into the cache, print its folder. Afterwards it works offline. What was interrupted goes on where
    it stopped, and a model of the hub is fetched again where that has a newer version."""
    if list_installed:
        from specserve.checkpoint.installed import installed

        for entry in installed():
            print(f"{entry.name}  {entry.num_bytes / 2**20:.0f} MiB  {entry.folder}")
    else:
        from specserve.checkpoint import catalog

        print(catalog.pull(model))
