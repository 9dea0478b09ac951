"""Shows a grid: a table for each drafter, the worst cell in words, and a heat map as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

from rich.table import Table

from specserve.bench.report import table_of

Column: TypeAlias = tuple[int, float]  # concurrency and temperature

WIDTH, HEIGHT, HEAD = 58, 26, 64  # pixels: a cell, and what stands above the cells
SLOWER, EVEN, FASTER = (240, 138, 75), (238, 238, 238), (94, 170, 220)  # dark text can be read on all of them
# Grey can be read on any page, also where a viewer does not know the page's scheme.
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#768390}@media(prefers-color-scheme:light){text{fill:#1f2328}}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
    ".cell{fill:#111;text-anchor:middle}.head{text-anchor:middle}.name{text-anchor:end}.title{font-weight:600}"
)


def grid_tables(figures: dict[str, Any]) -> Iterator[Table]:
    """One table a drafter: categories in rows, concurrency and temperature in columns."""
    for drafter, overall in figures["overall"].items():
        ratios, rows, columns = _axes(figures, drafter)
        names = [f"{concurrency} T{temperature:g}" for concurrency, temperature in columns]
        table = table_of(f"{drafter}: {overall:.2f}x overall", "category", *names)
        for category in rows:
            found = [ratios.get((category, column)) for column in columns]
            table.add_row(category, *("" if ratio is None else f"{ratio:.2f}" for ratio in found))
        yield table


def worst_line(figures: dict[str, Any]) -> str:
    """The cell of the lowest ratio, in words."""
    cell = figures["worst"]
    return (
        f"Worst cell: {cell['ratio']:.2f}x, {cell['drafter']} on {cell['category']}, {cell['concurrency']} at once, "
        f"temperature {cell['temperature']:g}."
    )


def heat_map(figures: dict[str, Any]) -> str:
    """The tables as a picture: blue is faster than plain decoding, orange slower. For light and dark pages."""
    parts: list[str] = []
    start = 24 + 8 * max(20, *(len(cell["category"]) for cell in figures["cells"]))
    width = top = 0
    for drafter, overall in figures["overall"].items():
        ratios, rows, columns = _axes(figures, drafter)
        parts.append(_text(12, top + 22, "title", f"{drafter}: {overall:.2f}x plain decoding"))
        parts.append(_text(start - 8, top + HEAD - 10, "name", "at once, temperature"))
        for x, (concurrency, temperature) in enumerate(columns):
            left = start + x * WIDTH
            parts.append(_text(left + WIDTH // 2, top + HEAD - 10, "head", f"{concurrency}, {temperature:g}"))
            for y, category in enumerate(rows):
                if (ratio := ratios.get((category, (concurrency, temperature)))) is not None:
                    above = top + HEAD + y * HEIGHT
                    box = f'x="{left}" y="{above}" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="3"'
                    parts.append(f'<rect {box} fill="{_colour(ratio)}"/>')
                    parts.append(_text(left + WIDTH // 2 - 1, above + 17, "cell", f"{ratio:.2f}"))
        parts += [_text(start - 8, top + HEAD + y * HEIGHT + 17, "name", category) for y, category in enumerate(rows)]
        width, top = max(width, start + len(columns) * WIDTH), top + HEAD + len(rows) * HEIGHT
    parts.append(_text(12, top + 24, "", worst_line(figures)))
    size = f"{max(width, 560) + 12} {top + 36}"
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'


def _axes(figures: dict[str, Any], drafter: str) -> tuple[dict[tuple[str, Column], float], list[str], list[Column]]:
    """A drafter's ratios by category and column, and both in their order."""
    cells = [cell for cell in figures["cells"] if cell["drafter"] == drafter]
    ratios = {(cell["category"], (cell["concurrency"], cell["temperature"])): cell["ratio"] for cell in cells}
    return ratios, list(dict.fromkeys(row for row, _ in ratios)), list(dict.fromkeys(column for _, column in ratios))


def _text(x: int, y: int, kind: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def _colour(ratio: float) -> str:
    """Full colour at twice and at half of plain decoding's speed."""
    share = min(1.0, abs(math.log2(ratio)))
    mixed = (round(a + (b - a) * share) for a, b in zip(EVEN, FASTER if ratio > 1 else SLOWER, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
