"""Where a verify step's time goes: op by op inside the kernels, phase by phase outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from specserve.bench.report import table_of
from specserve.bench.traffic import Part, read_bandwidth, watched
from specserve.bench.verify_cost import WARM_UP_ROUNDS, Timing, VerifySteps, settings
from specserve.machine.ownership import interrupted_after
from specserve.runtime.executor import local

if TYPE_CHECKING:
    from specserve.llm import LLM

# What people call the engine's phases; all but the forward pass are outside the kernels, and so is some of that.
HOST = {
    "draft": "host: drafter",
    "mask": "host: masks",
    "sample": "host: sampler",
    "host": "host: scheduler, pack, commit",
}
PLAN = "host: attention plan, launch"


@dataclass(slots=True)
class _Share:
    """One line of the profile: the ops of one name, or a phase of the host. One entry of `seconds` a step."""

    calls: int = 0
    num_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def profile(
    llm: LLM, ids: list[int], rows: int, repeats: int, on_round: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Take apart `repeats` steps of `rows` rows each, all with the context `ids`.

    `parts` are the ops, those of like name together and named by what they read where that differs, and then what is
    outside the kernels. Of each: calls in a step, ms (a median), share of the sum of all parts, bytes it must read, and
    bandwidth_utilisation, those bytes over what memory could have given in that time. Timing every op costs a little
    itself, so step_ms is above verify_cost's. `on_round` is called before each step. Ctrl-C ends it: the figures are of
    the steps before, `repeats` of them, and `interrupted`. Raises ConfigError, and KeyboardInterrupt where there is
    none.
    """
    shares: dict[str, _Share] = {}
    totals: list[float] = []
    bandwidth = read_bandwidth(local(llm.engine.executor).runner.ops)
    with VerifySteps(llm, ids, [rows]) as steps, watched(llm.engine, llm.config.max_num_batched_tokens) as runner:
        try:
            for number in range(WARM_UP_ROUNDS + repeats):
                on_round()
                for timing in steps.round([rows]):
                    if number >= WARM_UP_ROUNDS:
                        with interrupted_after():
                            _add(shares, runner.parts(), runner.watched.seconds, timing)
                            totals.append(timing.total)
        except KeyboardInterrupt:
            if not totals:
                raise
    bandwidth = max(bandwidth, read_bandwidth(local(llm.engine.executor).runner.ops))
    measured = settings(llm, len(ids), len(totals), repeats)
    return {**measured, "rows": rows, **_figures(shares, totals, bandwidth)}


def _add(shares: dict[str, _Share], parts: list[Part], seconds: float, timing: Timing) -> None:
    """Add one step, whose ops took `seconds` of the forward pass."""
    step: dict[str, _Share] = {}
    for part in parts:
        share = step.setdefault(part.name, _Share(seconds=[0.0]))
        share.calls += 1
        share.num_bytes += part.num_bytes
        share.seconds[0] += part.seconds
    step[PLAN] = _Share(seconds=[timing.forward - seconds])
    step |= {name: _Share(seconds=[timing.seconds[phase]]) for phase, name in HOST.items()}
    for name, share in step.items():
        share.seconds = [*shares[name].seconds, *share.seconds] if name in shares else share.seconds
    shares |= step


def _figures(shares: dict[str, _Share], totals: list[float], bandwidth: float) -> dict[str, Any]:
    times = {name: median(share.seconds) for name, share in shares.items()}
    whole, host = sum(times.values()), sum(time for name, time in times.items() if name.startswith("host"))
    num_bytes = sum(share.num_bytes for share in shares.values())
    return {
        "step_ms": median(totals) * 1e3,
        "host_ms": host * 1e3,
        "host_share": host / whole,
        "bytes_per_step": num_bytes,
        "read_bandwidth_gbs": bandwidth / 1e9,
        "bandwidth_utilisation": num_bytes / (whole * bandwidth),
        "parts": [
            {
                "part": name,
                "calls": share.calls,
                "ms": times[name] * 1e3,
                "share": times[name] / whole,
                "bytes": share.num_bytes,
                "bandwidth_utilisation": share.num_bytes / (times[name] * bandwidth) if share.num_bytes else 0.0,
            }
            for name, share in shares.items()
        ],
    }


def profile_table(figures: dict[str, Any]) -> Table:
    """One row a part, in the order of the step, without those that took no time."""
    rows = f"a step of {figures['rows']} row{'s' if figures['rows'] > 1 else ''}"
    table = table_of(f"Parts of {rows}", "part", "calls", "ms", "share", "MB", "of bandwidth")
    for part in figures["parts"]:
        reads = (f"{part['bytes'] / 1e6:.2f}", f"{part['bandwidth_utilisation']:.0%}") if part["bytes"] else ("", "")
        if part["ms"]:
            table.add_row(part["part"], str(part["calls"] or ""), f"{part['ms']:.3f}", f"{part['share']:.1%}", *reads)
    return table
