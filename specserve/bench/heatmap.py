"""Shows a grid: a table for each drafter, the worst cell in words, and a heat map (with matplotlib, an extra)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.table import Table

from specserve.bench.report import table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Column: TypeAlias = tuple[int, float]  # concurrency and temperature

COLOURS = ("#f08a4b", "#eeeeee", "#5eaadc")  # slower, equal, faster; dark text can be read on all of them
CELL = (0.62, 0.28)  # inches


def grid_tables(figures: Mapping[str, Any]) -> Iterator[Table]:
    """One table a drafter: categories in rows, concurrency and temperature in columns."""
    for drafter, overall in figures["overall"].items():
        ratios, rows, columns = _axes(figures, drafter)
        names = [f"{concurrency} T{temperature:g}" for concurrency, temperature in columns]
        table = table_of(f"{drafter}: {overall:.2f}x overall", "category", *names)
        for category in rows:
            found = [ratios.get((category, column)) for column in columns]
            table.add_row(category, *("" if ratio is None else f"{ratio:.2f}" for ratio in found))
        yield table


def worst_line(figures: Mapping[str, Any]) -> str:
    """The cell of the lowest ratio, in words."""
    cell = figures["worst"]
    return (
        f"Worst cell: {cell['ratio']:.2f}x, {cell['drafter']} on {cell['category']}, {cell['concurrency']} at once, "
        f"temperature {cell['temperature']:g}."
    )


def heat_map(path: Path, figures: Mapping[str, Any]) -> None:
    """Draw the tables: blue is faster than plain decoding, orange slower, in full colour from twice and half on."""
    import matplotlib
    from matplotlib.figure import Figure

    drafters = {name: _axes(figures, name) for name in figures["overall"]}
    num_rows = [len(rows) for _, rows, _ in drafters.values()]
    num_columns = max(len(columns) for _, _, columns in drafters.values())
    size = (4 + CELL[0] * num_columns, 0.8 + sum(0.9 + CELL[1] * rows for rows in num_rows))
    figure = Figure(figsize=size, layout="constrained")
    found = figure.subplots(len(drafters), 1, squeeze=False, height_ratios=num_rows)[:, 0]
    for axes, (name, (ratios, rows, columns)) in zip(found, drafters.items(), strict=True):
        _draw(axes, ratios, rows, columns)
        axes.set_title(f"{name}: {figures['overall'][name]:.2f}x plain decoding", loc="left", fontweight="bold")
    figure.supxlabel(worst_line(figures), fontsize=10, parse_math=False)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text, for search and screen readers
        figure.savefig(path)


def _draw(axes: Axes, ratios: Mapping[tuple[str, Column], float], rows: list[str], columns: list[Column]) -> None:
    """One drafter's table; a cell that was not measured stays white."""
    from matplotlib.colors import LinearSegmentedColormap

    table = [[ratios.get((row, column), math.nan) for column in columns] for row in rows]
    colours = LinearSegmentedColormap.from_list("speed-up", COLOURS)
    axes.imshow([[math.log2(ratio) for ratio in line] for line in table], cmap=colours, vmin=-1, vmax=1, aspect="auto")
    for y, line in enumerate(table):
        for x, ratio in enumerate(line):
            if not math.isnan(ratio):
                axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", color="#111111")
    names = [f"{concurrency}, {temperature:g}" for concurrency, temperature in columns]
    axes.set_xticks(range(len(columns)), labels=names)
    axes.set_yticks(range(len(rows)), labels=rows, parse_math=False)
    axes.set_xlabel("prompts at once, temperature")


def _axes(figures: Mapping[str, Any], drafter: str) -> tuple[dict[tuple[str, Column], float], list[str], list[Column]]:
    """A drafter's ratios by category and column, and both in their order."""
    cells = [cell for cell in figures["cells"] if cell["drafter"] == drafter]
    ratios = {(cell["category"], (cell["concurrency"], cell["temperature"])): cell["ratio"] for cell in cells}
    return ratios, list(dict.fromkeys(row for row, _ in ratios)), list(dict.fromkeys(column for _, column in ratios))
