"""Work that leaves its core to others often: beside an engine, whose threads wait for one another, on as few cores."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

# A core changes hands at a scheduler's tick, which may be every 4 ms: then a stream that waits for one waits for all of
# that. So the work gives its core up after each of these times (in microseconds), for the other one.
_RUN_US, _PAUSE_US = 1000, 100


@contextmanager
def pausing() -> Iterator[None]:
    """Gives the core up often, where there are native kernels, which can. Takes SIGALRM."""
    if importlib.util.find_spec("specserve.kernels._native") is None:
        yield
        return
    from specserve.kernels import _native

    _native.pause_often(_RUN_US, _PAUSE_US)
    try:
        yield
    finally:
        _native.pause_no_more()
