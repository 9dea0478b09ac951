"""What a constraint cost a run, and whether its answers fit, checked without the grammar, which may be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from specserve.bench.compare import Run
from specserve.bench.report import table_of
from specserve.histogram import Histogram
from specserve.structured.spec import Structured

Fits = Callable[[str], bool]


def checker(asked: Structured) -> Fits | None:
    """Whether a text is JSON that fits a schema, formats too, says jsonschema-rs; None where that is not installed."""
    try:
        import jsonschema_rs
    except ModuleNotFoundError:
        return None
    validator = jsonschema_rs.validator_for(json.loads(asked.text), validate_formats=True)

    def fits(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return fits


def structured_figures(run: Run, fits: Fits | None) -> dict[str, Any]:
    """Milliseconds of masks, their share of the steps' time, the share of output tokens that are accepted
    jump-forward tokens, and answers by how they ended: `invalid_outputs` is None where nobody checked."""
    output_tokens = sum(len(reply.token_ids) for reply in run.replies)
    drafted = sum(reply.stats.num_jump_forward_tokens for reply in run.replies)
    accepted = sum(reply.stats.num_accepted_jump_forward_tokens for reply in run.replies)
    ended = [reply for reply in run.replies if reply.finish_reason == "stop"]
    return {
        "mask_ms_per_step": _percentiles(run.mask_per_step),
        "mask_ms_per_row": _percentiles(run.mask_per_row),
        "mask_share": run.seconds["mask"] / run.seconds["total"],
        "jump_forward_tokens": drafted,
        "accepted_jump_forward_tokens": accepted,
        "jump_forward_share": accepted / output_tokens if output_tokens else 0.0,
        "ended_outputs": len(ended),
        "cut_off_outputs": len(run.replies) - len(ended),
        "invalid_outputs": None if fits is None else sum(not fits(reply.text) for reply in ended),
    }


def _percentiles(times: Histogram) -> dict[str, float | None]:
    found = {f"p{percent}": times.percentile(percent) for percent in (50, 99)}
    return {name: None if seconds is None else seconds * 1e3 for name, seconds in found.items()}


def structured_table(runs: Sequence[dict[str, Any]]) -> Table:
    """One row a run. What a grammar forces is drafted in all of them."""
    columns = ("p50", "p99", "a row", "p99", "share", "jump-fwd", "accepted", "cut", "invalid")
    table = table_of("Masks, us a step and a row; share of the step; jump-forward tokens", "drafter", *columns)
    for run in runs:
        figures = run["structured"]
        step, row = figures["mask_ms_per_step"], figures["mask_ms_per_row"]
        stood = (
            figures["accepted_jump_forward_tokens"] / figures["jump_forward_tokens"]
            if figures["jump_forward_tokens"]
            else None
        )
        table.add_row(
            run["drafter"],
            *(_microseconds(times[name]) for times in (step, row) for name in ("p50", "p99")),
            f"{figures['mask_share']:.1%}",
            f"{figures['jump_forward_share']:.0%}",
            "-" if stood is None else f"{stood:.0%}",
            str(figures["cut_off_outputs"]),
            "?" if figures["invalid_outputs"] is None else str(figures["invalid_outputs"]),
        )
    return table


def _microseconds(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds * 1e3:.0f}"
