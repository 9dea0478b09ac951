"""What all plots share: the names of files that can be drawn, and the extra that matplotlib comes with."""

from __future__ import annotations

from pathlib import Path

from specserve.errors import ConfigError

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path) -> None:
    """Raise ConfigError for what could not be drawn, before anything is measured."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"The plot {path} needs a name that ends in {', '.join(FORMATS)}.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("Plots need matplotlib. Install it: pip install 'specserve[plot]'.") from error
