"""A conversation: the messages so far, who answers them, and the commands that begin with a slash."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.text import Text

from specserve.cli.conversation import saved, settings
from specserve.cli.conversation.markdown import MarkdownWriter, printable
from specserve.cli.conversation.models import ChatModel, Piece
from specserve.cli.conversation.reading import Terminal
from specserve.cli.explained import MarkedText
from specserve.errors import InputError, SpecserveError, unknown
from specserve.terminal import console

COMMANDS = {
    "/system": ("[TEXT]", "set or show the system message"),
    "/set": ("[NAME VALUE]", "set or show temperature, max_tokens, drafter ..."),
    "/model": ("[NAME]", "change or show the model"),
    "/retry": ("", "answer the last message again"),
    "/save": ("FILE", "write the conversation"),
    "/load": ("FILE", "read one, in place of this"),
    "/clear": ("", "forget the conversation"),
    "/help": ("", "show this"),
    "/bye": ("", "end; so does Ctrl-D"),
}
_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/reset": "/clear"}
_COMMAND = re.compile(r"(/[a-z?]+)(?:\s+(.*))?", re.DOTALL)
_TOO_LONG = "context_length_exceeded"
KEYS = (
    "A paste is one message. Alt-Enter, or \\ before Enter, begins another line; so does all between "
    'lines with """. Ctrl-C stops an answer. A message that begins with / goes in """.'
)


def tell(text: str) -> None:
    """Beside the answers, on standard error, in lines that fit a terminal."""
    lines = printable(text).split("\n")
    if sys.stderr.isatty():
        width = max(shutil.get_terminal_size().columns - 1, 20)
        lines = [part for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]
    print(*lines, sep="\n", file=sys.stderr)


class Conversation:
    """Answers messages of a terminal until its end or /bye. What is wrong with a message or a command is told, and the
    conversation goes on."""

    def __init__(
        self,
        model: ChatModel,
        given: dict[str, Any],
        system: str | None,
        *,
        show_drafts: bool = False,
        markdown: bool = True,
    ) -> None:
        self.model, self.given = model, given
        self.messages: list[saved.Message] = [] if system is None else [{"role": "system", "content": system}]
        self._asked: list[saved.Message] | None = None  # the messages up to the last one of the user
        self._console = console(highlight=False)
        is_drawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._markdown, self._show_drafts = markdown and is_drawn, show_drafts
        self._marked: MarkedText | None = None

    def run(self) -> None:
        tell(f"{self.model.summary}\n/help shows the commands; /bye or Ctrl-D ends.")
        terminal = Terminal(self.completions)
        while (entry := terminal.read()) is not None:
            try:
                if entry.is_quoted or not (found := _COMMAND.fullmatch(entry.text.rstrip())):
                    self.answer([*self.messages, {"role": "user", "content": entry.text.strip()}])
                elif (name := _ALIASES.get(found[1], found[1])) == "/bye":
                    return
                else:
                    self.obey(name, (found[2] or "").strip())
            except KeyboardInterrupt:
                tell("\n(stopped)")
            except SpecserveError as error:
                hint = " Or start again with /clear." if getattr(error, "code", None) == _TOO_LONG else ""
                tell(f"specserve: {error}{hint}")

    # --- answers ------------------------------------------------------------------------------------------------------

    def answer(self, asked: list[saved.Message]) -> None:
        """`stream`, and tell how fast it was and how it ended."""
        end = self.stream(asked)
        if end.figures is not None:
            tell(f"[{end.figures.line()}]")
        if end.finish_reason == "length":
            tell("(cut at max_tokens or the end of the context; /set max_tokens NUMBER changes the first)")
        self._explain_marks()

    def answer_quietly(self, asked: list[saved.Message]) -> None:
        """`stream`, for somebody who wants the answer alone."""
        self.stream(asked)
        self._explain_marks()

    def _explain_marks(self) -> None:
        if self._marked is not None:
            console(stderr=True, highlight=False).print(self._marked.legend())

    def stream(self, asked: list[saved.Message]) -> Piece:
        """Write the answer as it comes, and give its last piece. What came of a stopped one stays in the conversation,
        a refused message does not; either can be tried again."""
        self._asked = asked
        text, reasoning, end = "", "", Piece()
        try:
            pieces = self.model.stream(asked, self.given, self._show_drafts)
            with self._shown() as show, closing(pieces):  # type: ignore[type-var]
                for piece in pieces:
                    show(piece)
                    text, reasoning, end = text + piece.text, reasoning + piece.reasoning, piece
        finally:
            if text:
                thought = {"reasoning_content": reasoning} if reasoning else {}
                self.messages = [*asked, {"role": "assistant", "content": text, **thought}]
        if not text:  # an answer all the same
            self.messages = [*asked, {"role": "assistant", "content": ""}]
        return end

    @contextmanager
    def _shown(self) -> Iterator[Callable[[Piece], None]]:
        """What shows the pieces of an answer, which ends on a line of its own."""
        if self._show_drafts:
            self._marked = self._marked or MarkedText(self._console, self.model.llm.tokenizer.token_bytes)  # type: ignore[attr-defined]
        writer = MarkdownWriter(self._console) if self._markdown and self._marked is None else None
        thinks = console(stderr=True, highlight=False, soft_wrap=True)
        is_thinking, is_text = False, False

        def show(piece: Piece) -> None:
            nonlocal is_thinking, is_text
            if piece.reasoning:
                is_thinking = True
                thinks.print(Text(printable(piece.reasoning), "dim"), end="")
            if piece.text and is_thinking and not is_text:
                print("\n", file=sys.stderr)
            is_text = is_text or bool(piece.text)
            if writer is not None:
                writer.write(piece.text)
            elif self._marked is not None and piece.chunk is not None:
                self._marked.write(piece.chunk)
            else:
                print(printable(piece.text) if self._console.is_terminal else piece.text, end="", flush=True)

        try:
            yield show
        finally:
            if writer is not None:
                writer.close()
            elif is_text:
                print(flush=True)

    # --- commands -----------------------------------------------------------------------------------------------------

    def obey(self, name: str, text: str) -> None:
        """Do what a command says. Raises SpecserveError."""
        if name not in COMMANDS:
            raise InputError(f'{unknown("command", name, COMMANDS)} A message that begins with / goes in """.')
        arguments = COMMANDS[name][0]
        if text and not arguments:
            raise InputError(f"{name} takes nothing after it, and got {text!r}.")
        if not text and arguments == "FILE":
            raise InputError(f"{name} needs the name of a file: {name} FILE.")
        getattr(self, f"_{name[1:]}")(text)

    def _system(self, text: str) -> None:
        rest = [message for message in self.messages if message["role"] != "system"]
        stated = [message["content"] for message in self.messages if message["role"] == "system"]
        if not text:
            tell(stated[0] if stated else "There is no system message. /system TEXT sets one.")
            return
        text = text.strip('"')
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]
        self._asked = _up_to_user(self.messages)
        tell("The system message is set." if text else "There is no system message any more.")

    def _set(self, text: str) -> None:
        if not text:
            tell("\n".join(f"{name} {self._setting(name)}" for name in settings.NAMES))
            return
        name, value = settings.parse(text)
        if value is None:
            tell(f"{name} {self._setting(name)}")
            return
        is_default = value.lower() in (settings.DEFAULT, "none") and (name != settings.DRAFTER or value != "none")
        if name == settings.DRAFTER:
            self.model.draft_with(None if is_default else value)
        elif is_default:
            self.given.pop(name, None)
        else:
            self.given[name] = settings.value_of(name, value)
        tell(f"{name} {self._setting(name)}")

    def _setting(self, name: str) -> object:
        value = self.model.drafter if name == settings.DRAFTER else self.given.get(name)
        return settings.DEFAULT if value is None else value

    def _model(self, name: str) -> None:
        if not name:
            tell("\n".join(f"{'*' if each == self.model.name else ' '} {each}" for each in self.model.names()))
            return
        self.model.switch(name)
        self._marked = None
        tell(self.model.summary)

    def _retry(self, text: str) -> None:
        if self._asked is None:
            raise InputError("There is no message to answer again.")
        self.answer(self._asked)

    def _save(self, name: str) -> None:
        saved.save(Path(name), self.model.name, self.messages)
        tell(f"{len(self.messages)} messages are in {name}.")

    def _load(self, name: str) -> None:
        self.messages = saved.load(Path(name))
        self._asked = _up_to_user(self.messages)
        tell(f"{len(self.messages)} messages are loaded.")

    def _clear(self, text: str) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self._asked = None
        tell("The conversation is forgotten.")

    def _help(self, text: str) -> None:
        tell("\n".join(f"{name} {takes}: {what}".replace(" :", ":") for name, (takes, what) in COMMANDS.items()))
        tell(KEYS)

    def completions(self, line: str) -> list[str]:
        """What the Tab key makes of the last word of a line."""
        words = line.split(" ")
        choices = list(COMMANDS) if len(words) == 1 and line.startswith("/") else []
        if len(words) == 2 and words[0] in ("/set", "/model"):
            choices = list(settings.NAMES) if words[0] == "/set" else self.model.names()
        return [f"{choice} " for choice in choices if choice.startswith(words[-1])]


def _up_to_user(messages: list[saved.Message]) -> list[saved.Message] | None:
    ends = [number for number, message in enumerate(messages, 1) if message["role"] == "user"]
    return messages[: ends[-1]] if ends else None
