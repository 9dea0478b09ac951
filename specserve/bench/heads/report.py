"""What people read of a head's diagnosis: tables, and what to do."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from specserve.bench.heads import faults
from specserve.bench.report import table_of


def headline(figures: dict[str, Any]) -> str:
    """What was replayed, in a line."""
    weights = figures["dtype"] if figures["quantization"] == "none" else figures["quantization"]
    reads = f"layers {', '.join(map(str, figures['hidden_layers']))}"
    return (
        f"{figures['head']}: a head of kind {figures['kind']} ({figures['format']}) that reads {reads} of "
        f"{figures['model']}, {weights} on {figures['device']}. Greedy drafts of {figures['num_speculative_tokens']} "
        f"from {figures['places']} places of {figures['prompts']} answers."
    )


def acceptance_table(figures: dict[str, Any]) -> Table:
    """The head as it is served, and with its inputs moved or mended."""
    depth = len(figures["served"]["by_depth"])
    table = table_of(
        "Accepted up to each depth", "inputs", "accepted", "gain", *(f"depth {d}" for d in range(1, depth + 1))
    )
    table.add_row("as served", *_cells(figures["served"], depth))
    if (tree := figures["served"]["tree"]) is not None:
        table.add_row(f"as served, tree of {tree['nodes']}, top {tree['top_k']}", *_cells(tree, depth))
    for row in figures["variants"]:
        table.add_row(row["name"], *_cells(row, depth))
    if (covers := figures["vocabulary"]) is not None:
        gain = covers["accepted_within"] - figures["served"]["accepted"]
        table.add_row("where its vocabulary has the token", f"{covers['accepted_within']:.2f}", f"{gain:+.2f}")
    return table


def _cells(row: dict[str, Any], depth: int) -> list[str]:
    gain = "" if row.get("gain") is None else f"{row['gain']:+.2f} +-{row['gain_error']:.2f}"
    shares = [f"{share:.2f}" for share in row["by_depth"][:depth]]
    return [f"{row['accepted']:.2f}", gain, *shares]


def cost_table(figures: dict[str, Any]) -> Table:
    """What each length of drafts takes, and gives."""
    cost, by_depth = figures["cost"], figures["served"]["by_depth"]
    table = table_of(
        "Cost by phase, one stream", "draft", "propose ms", "observe ms", "verify ms", "tokens/step", "against plain"
    )
    table.add_row("none", "", "", f"{cost['plain_ms']:.2f}", "1.00", "1.00x")
    for k, (propose, speedup) in enumerate(zip(cost["propose_ms"], cost["speedup"], strict=True), 1):
        tokens = f"{1 + sum(by_depth[:k]):.2f}"
        verify = f"{cost['verify_ms'][k]:.2f}"
        table.add_row(str(k), f"{propose:.2f}", f"{cost['observe_ms']:.2f}", verify, tokens, f"{speedup:.2f}x")
    return table


def verdict(figures: dict[str, Any]) -> list[str]:
    """Lines that say what is wrong and what to do."""
    lines = []
    for each in figures["findings"]:
        lines += [f"{each['fault']}: {each['says']}", f"  -> {each['todo']}"]
    if figures["healthy"]:
        served = figures["served"]
        lines.append(
            f"healthy: of {len(figures['variants'])} other ways to feed it none does better by more than chance; "
            f"{served['accepted']:.2f} (+-{served['error']:.2f}) tokens of a draft are accepted."
        )
    if (covers := figures["vocabulary"]) is not None:
        lines.append(f"vocabulary: its {covers['size']:,} ids lack {covers['missing']:.1%} of the target's tokens.")
    lines.append(f"cost: {faults.payoff(figures['cost'])}")
    lines += [f"not compared: {each}." for each in figures["left_out"]]
    return lines
