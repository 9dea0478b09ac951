"""Reads messages that are typed or pasted in a terminal, with the line editing and history of readline."""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

QUOTE = '"""'
PROMPT, MORE = "> ", ". "
_PASTE_GAP_S = 0.03  # the most that lines of one paste are apart, where the terminal does not mark a paste


@dataclass(frozen=True, slots=True)
class Entry:
    """What was entered. Text in triple quotes is never a command."""

    text: str
    is_quoted: bool = False


class Terminal:
    """Messages from a terminal. A pasted text is one message whatever lines it has. A line that ends with a backslash
    goes on in the next one; so does one that begins with three quotes, until three quotes end a line. `complete` says
    what the Tab key makes of the line so far."""

    def __init__(self, complete: Callable[[str], Sequence[str]]) -> None:
        self._complete = complete
        self._matches: Sequence[str] = ()
        self._marks_pastes = False
        self._readline = self._set_up() if sys.stdout.isatty() else None  # input() edits no line otherwise

    def read(self) -> Entry | None:
        """The next entry that is not empty, or None at the end of input. Ctrl-C drops what is being typed."""
        while True:
            try:
                text = self._line(PROMPT)
                is_quoted = text.lstrip().startswith(QUOTE)
                entry = self._quoted(text) if is_quoted else self._continued(text)
            except EOFError:
                print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                print("\nCtrl-D or /bye ends the conversation.", file=sys.stderr)
                continue
            if entry.strip():
                return Entry(entry, is_quoted)

    def _quoted(self, text: str) -> str:
        text = text.lstrip()
        while len(text) < 2 * len(QUOTE) or not text.rstrip().endswith(QUOTE):
            text += "\n" + self._line(MORE)
        self._remember(text)
        return text.rstrip()[len(QUOTE) : -len(QUOTE)].strip("\n")

    def _continued(self, text: str) -> str:
        while text.endswith("\\"):
            text = text[:-1] + "\n" + self._line(MORE)
        if text.strip():
            self._remember(text)
        return text

    def _line(self, prompt: str) -> str:
        """A line, or all lines of a paste. Where the terminal does not mark these, they are lines that come at once."""
        lines = [self._input(prompt)]
        while not self._marks_pastes and self._readline and select.select([sys.stdin], [], [], _PASTE_GAP_S)[0]:
            lines.append(self._input(MORE))
        return "\n".join(lines)

    def _input(self, prompt: str) -> str:
        if self._readline is not None:
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)  # standard output holds answers alone
        return input()

    def _remember(self, text: str) -> None:
        if self._readline is not None:
            self._readline.add_history(text)

    def _set_up(self) -> ModuleType:
        """readline, which input() uses once it is imported. libedit, in its place in some builds of Python, does not
        know pastes."""
        readline = importlib.import_module("readline")
        readline.set_auto_history(False)
        readline.set_completer(self._completed)
        readline.set_completer_delims(" ")
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^I rl_complete")
            return readline
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.parse_and_bind(r'"\C-x\C-j": self-insert')
        for enter in ("m", "j"):  # what was typed before the terminal was set up comes as the second
            readline.parse_and_bind(rf'"\e\C-{enter}": "\C-x\C-j"')  # Alt-Enter: a line break
        self._marks_pastes = os.environ.get("TERM", "dumb") != "dumb"
        return readline

    def _completed(self, word: str, number: int) -> str | None:
        if number == 0:
            assert self._readline is not None
            line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
            self._matches = self._complete(line)
        return self._matches[number] if number < len(self._matches) else None
