"""`pull`, `doctor` and `completion`. Knows how to print; what is printed comes from the catalog and the doctor."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from specserve.cli_options import ENGINE_HELP, MODEL, OUTPUT
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
    """Fetch a model into the cache, print its folder. Afterwards it works offline."""
    from specserve.models import catalog

    if list_installed:
        for entry in catalog.installed():
            print(f"{entry.name}  {entry.num_bytes / 2**20:.0f} MiB  {entry.folder}")
    else:
        print(catalog.pull(model))


def doctor(
    model: Annotated[str, Parameter(group=MODEL, help="The model whose folder is looked up.")] = DEFAULT_MODEL,
    *,
    isa: Annotated[str, Parameter(group=MODEL, help=ENGINE_HELP["isa"][1])] = "auto",
) -> None:
    """Show the device, memory, kernels, model folder and versions, without loading any weights."""
    from specserve.doctor import examine, show

    show(examine(model, isa))


def completion(shell: Literal["bash", "zsh", "fish", "powershell"] | None = None) -> None:
    """Install completion of commands and options for SHELL (the running one, if none is named)."""
    from specserve.cli import build_app

    print(f"Installed {build_app().install_completion(shell=shell)}. It works in the next shell.")
