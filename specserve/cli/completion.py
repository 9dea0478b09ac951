"""`specserve completion`: installs the completion of commands and options for a shell."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

Shell = Literal["bash", "zsh", "fish", "powershell"]


def completion(
    shell: Annotated[
        Shell | None, Parameter(group="Arguments", help="Whose completion [default: the running shell].")
    ] = None,
) -> None:
    """Install completion of commands and options for SHELL (the running one, if none is named)."""
    from specserve.cli.main import build_app

    print(f"Installed {build_app().install_completion(shell=shell)}. It works in the next shell.")
