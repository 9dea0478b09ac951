"""Times of GPU work, as a step in a CUDA graph sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch

_ROTATED_BYTES = 160e6  # L2 of an H200: 60 MB
_MOST_COPIES = 192
_REPLAYS = 5


def copies_of(num_bytes: int) -> int:
    """How many times what a launch reads has to lie in memory so that L2 holds little of it."""
    return int(min(max(-(-_ROTATED_BYTES // num_bytes), 2), _MOST_COPIES))


def graph_us(launches: Sequence[Callable[[], object]], at_least: int = 24) -> float:
    """Microseconds that one of `launches` adds to a graph of at least so many, run one after the other."""
    launches = list(launches) * -(-at_least // len(launches))
    launches[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    return median(replay_us(graph) for _ in range(_REPLAYS)) / len(launches)


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop) * 1e3)


def copy_gb_per_s() -> float:
    """Bytes read and written when 2 GB are copied, per second: the mark for all that is bound by memory."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = round(2 * 2**31 / graph_us([lambda: target.copy_(source)], 4) / 1e3, 1)
    print(found, flush=True)
    return found
