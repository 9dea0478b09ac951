"""How `--help` is laid out: no name of an option is broken, on terminals of any width. What lays it out is loaded when
help is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from cyclopts.help.specs import ColumnSpec
    from rich.console import Console, ConsoleOptions, RenderableType

_SHARE, _LEAST = 0.35, 30  # of the width that names get, and columns that descriptions need beside them
_FRAME = 6  # columns of borders and padding
_INDENT = 2
_NOTHING = ("False", '""')  # defaults that go without saying


class HelpFormatter:
    """Names of options in a column that is as wide as the longest of them; where that leaves too little for what they
    mean, that stands below."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        from cyclopts.help import DefaultFormatter
        from cyclopts.help.specs import get_default_command_columns

        columns = get_default_command_columns if panel.format == "command" else _columns
        entries = [entry.copy(default=None) if entry.default in _NOTHING else entry for entry in panel.entries]
        DefaultFormatter(column_specs=columns)(console, options, panel.copy(entries=entries))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)


def _columns(console: Console, options: ConsoleOptions, entries: Sequence[HelpEntry]) -> tuple[ColumnSpec, ...]:
    from cyclopts.help.specs import AsteriskColumn, ColumnSpec, DescriptionRenderer, NameRenderer

    longest = max(len(word) for entry in entries for word in entry.display_labels_with_metavar) + _INDENT
    width = max(math.ceil(console.width * _SHARE), longest)
    if console.width - width - _FRAME < _LEAST:
        return (ColumnSpec(renderer=_stacked, overflow="fold"),)
    names = ColumnSpec(renderer=NameRenderer(max_width=width), style="cyclopts.name", max_width=width, no_wrap=True)
    described = ColumnSpec(renderer=DescriptionRenderer(), overflow="fold")
    return (AsteriskColumn, names, described) if any(entry.required for entry in entries) else (names, described)


def _stacked(entry: HelpEntry) -> RenderableType:
    from cyclopts.help.specs import DescriptionRenderer
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    names = Text(" ".join(entry.display_labels_with_metavar), "cyclopts.name")
    described: Any = DescriptionRenderer()(entry)
    return Group(names, Padding(described, (0, 0, 0, _INDENT)))
