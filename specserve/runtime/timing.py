"""Measures what steps of different numbers of rows take on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from specserve.runtime.executor import Executor
from specserve.runtime.pack import SequenceRows, pack

_REPEATS = 3  # the fastest counts: whatever else runs only makes a step longer
_FEW = 8  # rows, as most steps have: measured first


def step_seconds(executor: Executor, sizes: Many[int], budget_s: float) -> NDArray[np.float64]:
    """Seconds of a step of that many rows, for each of the ascending sizes -> [sizes], never falling. It takes
    about `budget_s` seconds: for sizes that there is no time left for, or no room, a row more takes what it took before
    them. All is written to block 0, which is nobody's."""
    until = time.perf_counter() + budget_s
    _run(executor, sizes[0])
    num_few = sum(size <= _FEW for size in sizes)
    found: dict[int, float] = {}
    # The same size again only after others: what slows the machine for a moment makes no size seem slow.
    for size in [*_REPEATS * [*sizes[:num_few]], *_REPEATS * [*sizes[num_few:]]]:
        if size <= min(executor.max_rows, executor.max_logit_rows):
            if time.perf_counter() > until and len(found) > 1:
                break
            found[size] = min(_run(executor, size), found.get(size, math.inf))
    known = np.minimum.accumulate([*found.values()][::-1])[::-1]  # no more than what more rows took
    slope = (known[-1] - known[0]) / max(sizes[len(known) - 1] - sizes[0], 1)
    beyond = np.maximum(np.array(sizes) - sizes[len(known) - 1], 0) * slope
    return np.asarray(np.interp(sizes, sizes[: len(known)], known) + beyond)


def _run(executor: Executor, rows: int) -> float:
    blocks = [0] * -(-rows // executor.block_size)
    inputs = pack([SequenceRows([0] * rows, 0, blocks, num_logits=rows)], executor.row_multiple)
    begun = time.perf_counter()
    executor.start(inputs)
    executor.finish(lambda best: None)
    return time.perf_counter() - begun
