"""Markdown on a terminal while it is written: what may still change is drawn again in its place, the rest scrolls."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Heading, Markdown, MarkdownElement, TableElement
from rich.table import Table
from rich.text import Text

_INTERVAL_S = 0.05  # between two drawings
_SHARE = 0.1  # of the time that drawing may take
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "\u2421"}
_CONTROLS |= dict.fromkeys(range(128, 160), "\ufffd")


def printable(text: str) -> str:
    """Text whose control characters are shown and do nothing: a model must not move the cursor."""
    return text.translate(_CONTROLS)


class LeftHeading(Heading):
    """A heading that stands where text begins."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text.assemble(self.text, justify="left")


class WholeTable(TableElement):
    """A table that breaks words which are longer than their column: nothing is left out."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class AnswerMarkdown(Markdown):
    """As models write it: a line break is one, HTML is text, and the address of a link can be read."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": LeftHeading,
        "table_open": WholeTable,
    }

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        for token in self.parsed:
            if token.type == "html_block":
                token.type, token.tag = "code_block", "code"
            for inner in token.children or ():
                if inner.type == "softbreak":
                    inner.type, inner.tag = "hardbreak", "br"
                elif inner.type == "html_inline":
                    inner.type = "text"

    @property
    def is_table(self) -> bool:
        return any(token.type == "table_open" for token in self.parsed)

    def blocks(self) -> list[str]:
        """The text by its outermost blocks: paragraphs, whole lists, tables. All but the last are complete."""
        starts = [token.map[0] for token in self.parsed if token.level == 0 and token.nesting >= 0 and token.map]
        lines = self.markup.split("\n")
        return ["\n".join(lines[start:end]) for start, end in pairwise([0, *starts[1:], len(lines)])]


class MarkdownWriter:
    """Writes a text to a terminal as it comes. Blocks that are whole are printed once. The last block, or as much of it
    as the screen has room for, is drawn again when more comes; only its lines that changed are written."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""  # from the last block on
        self._num_fixed = 0  # lines of the last block that have scrolled on and stay as they are
        self._live: list[str] = []  # lines that are drawn again; the cursor is at the end of the last one
        self._width = 0  # for which they were made
        self._begun = False
        self._wait_until = 0.0

    def write(self, text: str) -> None:
        self._text += printable(text)
        started = time.monotonic()
        if started >= self._wait_until:
            self._draw()
            took = time.monotonic() - started
            self._wait_until = started + max(_INTERVAL_S, took / _SHARE)

    def close(self) -> None:
        """Draw what is left, and leave the cursor on a line of its own."""
        self._draw(ended=True)
        if self._begun:
            self._console.file.write("\n")
            self._console.file.flush()

    def _draw(self, ended: bool = False) -> None:
        width = max(self._console.width - 1, 1)  # a cursor after the last column is in two places
        if not self._width or width < self._width:  # the terminal has broken the lines anew
            self._width, self._live = width, []
        *complete, last = AnswerMarkdown(self._text).blocks()
        fixed: list[str] = []
        for block in complete:
            fixed += [*self._rendered(block)[self._num_fixed :], ""]
            self._num_fixed = 0
        self._text = last
        live = self._rendered(last)[self._num_fixed :]
        if (excess := len(live) - max(self._console.height - 1, 1)) > 0 and not ended:
            if not AnswerMarkdown(last).is_table:  # whose columns are as wide as what comes wants
                fixed += live[:excess]
                self._num_fixed += excess
            live = live[excess:]
        if not live and not fixed and self._live:
            live = [""]
        self._replace(fixed + live)
        self._live = live

    def _rendered(self, block: str) -> list[str]:
        """The lines of a block, without the blank ones around it."""
        with self._console.capture() as capture:
            self._console.print(AnswerMarkdown(block), width=self._width)
        lines = [line.rstrip(" ") for line in capture.get().split("\n")]
        visible = [number for number, line in enumerate(lines) if _STYLE.sub("", line).strip()]
        return lines[visible[0] : visible[-1] + 1] if visible else []

    def _replace(self, lines: list[str]) -> None:
        """Put these lines in the place of the live ones, without touching those that are the same."""
        if lines == self._live:
            return
        same = 0
        while same < min(len(lines) - 1, len(self._live)) and lines[same] == self._live[same]:
            same += 1
        out = ""
        if same < len(self._live):
            up = len(self._live) - 1 - same
            out = "\r" + (f"\x1b[{up}A" if up else "")
        elif self._begun:
            out = "\n"
        out += "\n".join(line + "\x1b[K" for line in lines[same:]) + "\x1b[J"
        self._console.file.write(out)
        self._console.file.flush()
        self._begun = True
