"""Pictures of a served load, with matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LATENCIES = {"ttft_ms": "time to first token", "tpot_ms": "time per output token", "e2e_ms": "end to end"}


def plot(path: Path, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Of several loads, latencies and throughput over the load; of one, how its latencies are distributed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(1, 3))
    if len(points) > 1:
        _curves(axes, points)
    else:
        _distributions(axes, points[0])
    figure.savefig(path)


def _curves(axes: Sequence[Axes], points: Sequence[Mapping[str, Any]]) -> None:
    loads = [point["load"] for point in points]
    x = [load.get("rate", load.get("concurrency")) for load in loads]
    if "inf" in x:  # which has no place on a scale, so each load has a name there
        x = [str(value) if isinstance(value, str) else f"{value:g}" for value in x]
    for axis, (key, name) in zip(axes, list(_LATENCIES.items())[:2], strict=False):
        for percentile in ("p50", "p99"):
            axis.plot(x, [_value(point[key], percentile) for point in points], marker="o", label=percentile)
        axis.set(title=name, ylabel="ms", ylim=(0, None))
        axis.legend()
    axes[2].plot(x, [point["output_tokens_per_second"] or 0.0 for point in points], marker="o")
    axes[2].set(title="throughput", ylabel="output tokens per second", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("requests per second" if loads[0]["kind"] == "open" else "requests at once")


def _value(distribution: Mapping[str, float] | None, name: str) -> float:
    return float("nan") if distribution is None else distribution[name]


def _distributions(axes: Sequence[Axes], point: Mapping[str, Any]) -> None:
    """Each value against the share of requests that are at most as slow."""
    for axis, (key, name) in zip(axes, _LATENCIES.items(), strict=True):
        values = sorted(r[key] for r in point["records"] if r["error"] is None and r[key] is not None)
        shares = [(index + 1) / len(values) for index in range(len(values))]
        axis.step(values, shares, where="post")
        axis.set(title=name, xlabel="ms", ylabel=f"share of requests ({point['load']['name']})", ylim=(0, 1))
