"""What a training leaves behind: the head as servers load it, and the recipe that made it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specserve.files import parse_json, read_text, reading
from specserve.train.acceptance import Acceptance
from specserve.train.text import write_whole
from specserve.train.writing import duration

MOST_CURVE_BYTES = 2**28
MOST_RECIPE_BYTES = 2**20
_CURVE_LINES = 20


def machine(device: torch.device) -> str:
    """The processor that trains, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def write_recipe(
    folder: Path, facts: Mapping[str, Any], seconds: float, acceptance: Mapping[str, Acceptance], begun: Path | None
) -> None:
    """RECIPE.md: what the head was made of and how (`facts`, by what they are), how long that took, the curve, the
    acceptance by category and depth, and the recipe of the head in `begun`, where the training began with that."""
    lines = ["# Recipe", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in {**facts, "training time": duration(seconds)}.items()]
    lines += ["", "## Acceptance", ""]
    lines += [
        "Greedy drafts from random positions of held-out answers: how many tokens of a draft are accepted, and the"
    ]
    lines += ["share of drafts that are accepted up to each depth."]
    depths = len(acceptance["all"].by_depth)
    lines += ["", "| category | accepted | " + " | ".join(f"depth {d + 1}" for d in range(depths)) + " |"]
    lines += ["|---" * (depths + 2) + "|"]
    for name in [*sorted(set(acceptance) - {"all"}), "all"]:
        shares = " | ".join(f"{share:.3f}" for share in acceptance[name].by_depth)
        lines.append(f"| {name} | {acceptance[name].accepted:.2f} | {shares} |")
    lines += ["", "## Curve", "", "| step | tokens | loss | accepted |", "|---|---|---|---|"]
    lines += [
        f"| {line['step']} | {line['tokens']:,} | {line['loss']:.4f} | {line.get('accepted', '')} |"
        for line in _some(read_curve(folder))
    ]
    if begun is not None:
        lines += ["", "# Initial head", "", *_recipe(begun)]
    write_whole(folder / "RECIPE.md", ("\n".join(lines) + "\n").encode())


def _recipe(folder: Path) -> list[str]:
    """What RECIPE.md of the head in `folder` says, below its title."""
    path = folder / "RECIPE.md"
    if not path.exists():
        return [f"{folder.name}, which has no recipe."]
    with reading(path):
        lines = read_text(path, MOST_RECIPE_BYTES).strip().splitlines()
    return lines[2:] if lines[:1] == ["# Recipe"] else lines


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The lines of curve.jsonl."""
    path = folder / "curve.jsonl"
    with reading(path):
        return [parse_json(line) for line in read_text(path, MOST_CURVE_BYTES).splitlines()]


def _some(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with acceptance, at most 20, evenly; the last is among them."""
    shown = [line for line in lines if "accepted" in line]
    step = -(-len(shown) // _CURVE_LINES)
    return shown[::-1][:: max(1, step)][::-1]


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
