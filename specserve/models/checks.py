"""Checks of the numbers that a configuration gives."""

from __future__ import annotations

import math
from typing import Any

from specserve.errors import ModelError

_LARGEST = 2**31 - 1  # ids and positions are int32


def check_size(name: str, value: Any) -> None:
    """Raise ModelError for what is no count or size."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise ModelError(f"config.json gives {name} as {value!r}; it must be a whole number from 1 to {_LARGEST}.")


def check_number(name: str, value: Any, *, positive: bool = True) -> None:
    """Raise ModelError for what a configuration gives as something else, or that no calculation survives."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        kind = "positive number" if positive else "number of at least 0"
        raise ModelError(f"config.json gives {name} as {value!r}; it must be a {kind}.")
