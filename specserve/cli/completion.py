"""`specserve completion`: installs the completion of commands and options for a shell."""

from __future__ import annotations

from typing import Literal


def completion(shell: Literal["bash", "zsh", "fish", "powershell"] | None = None) -> None:
    """Install completion of commands and options for SHELL (the running one, if none is named)."""
    from specserve.cli.main import build_app

    print(f"Installed {build_app().install_completion(shell=shell)}. It works in the next shell.")
