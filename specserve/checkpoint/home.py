"""Where models that were fetched or converted lie, and what is known of those from the hub."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$SPECSERVE_HOME, else `specserve` in the user's cache folder."""
    if home := os.environ.get("SPECSERVE_HOME"):
        return Path(home).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"
