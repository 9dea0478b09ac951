"""Which instruction set the kernels of a CPU run with."""

from __future__ import annotations

import os
from collections.abc import Sequence

from specserve.config import ISAS
from specserve.errors import ConfigError, unknown

VARIABLE = "SPECSERVE_ISA"


def choose_isa(asked: str, available: Sequence[str], kernels: str) -> str:
    """The instruction set that `asked` names; where that is "auto", the one that the environment variable
    SPECSERVE_ISA names, or else the first of `available`, which are the fastest first; "" where there are none.

    Raises ConfigError, naming `kernels`, for one that is not among those available.
    """
    name, source = (asked, "--isa") if asked != "auto" else (os.environ.get(VARIABLE) or "auto", VARIABLE)
    if name not in (*ISAS, *available):
        raise ConfigError(f"{source}: " + unknown("value", name, ISAS))
    if name != "auto" and name not in available:
        found = f"Use auto, or what they have: {', '.join(available)}." if available else "Only those of CPUs have any."
        raise ConfigError(f"{source} is {name}, which the {kernels} kernels do not have here. {found}")
    return name if name != "auto" else available[0] if available else ""
