"""What is printed for people: without styles where NO_COLOR says so, and tables that no narrow terminal cuts."""

from __future__ import annotations

import os
import textwrap
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDE = 10_000


def console(stderr: bool = False, **options: Any) -> Console:
    """On standard output, or on standard error. With NO_COLOR neither colours nor bold; the cursor still moves where a
    terminal shows progress."""
    if os.environ.get("NO_COLOR"):
        options["color_system"] = None
    return Console(stderr=stderr, **options)


class FittedTable(Table):
    """Where the console is narrower than the table can be, each row is its first cell and then the others with their
    headers, in lines that fit. Cells are text."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if Measurement.get(console, options.update(max_width=_WIDE), self).minimum <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title is not None:
            yield Text(str(self.title), "italic")
        names = [str(column.header) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            first, *others = (cell.plain if isinstance(cell, Text) else str(cell) for cell in row)
            yield Text(first, "bold", overflow="fold")
            pairs = [f"{name} {cell}".strip() for name, cell in zip(names[1:], others, strict=True) if cell]
            for line in _lines(pairs, options.max_width - 2):
                yield Text(f"  {line}")


def _lines(pairs: list[str], width: int) -> list[str]:
    """As many pairs in a line as fit; one is broken only where it is longer than a line."""
    lines: list[str] = []
    for pair in pairs:
        if lines and len(lines[-1]) + 3 + len(pair) <= width:
            lines[-1] += f"   {pair}"
        else:
            lines += textwrap.wrap(pair, width, break_on_hyphens=False)
    return lines
