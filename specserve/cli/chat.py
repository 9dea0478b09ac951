"""`specserve chat`: a conversation in the terminal, or from a pipe, one message a line. Keeps the messages; the SDK
does the rest."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from specserve.cli.answer import write, write_text
from specserve.cli.explained import MarkedText
from specserve.cli.options import (
    GENERATION,
    OUTPUT,
    Model,
    NamedEngineOptions,
    SamplingOptions,
    engine_options,
)
from specserve.config import DEFAULT_MODEL
from specserve.errors import InputError, unknown
from specserve.types import SamplingParams

if TYPE_CHECKING:
    from specserve.llm import LLM

COMMANDS = ("/reset", "/exit", "/help")
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."
_ENGINE = NamedEngineOptions()
_SAMPLING = SamplingOptions()


def chat(
    model: Model = DEFAULT_MODEL,
    *,
    system: Annotated[str | None, Parameter(group=GENERATION, help="System message of the conversation.")] = None,
    show_drafts: Annotated[
        bool,
        Parameter(group=OUTPUT, negative=(), help="Mark tokens that were drafted, and show those that were rejected."),
    ] = False,
    engine: Annotated[NamedEngineOptions, Parameter(name="*")] = _ENGINE,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = _SAMPLING,
) -> None:
    """Talk to a model. After each answer: tokens per second, and tokens a step. /reset starts again, /exit ends."""
    from specserve.llm import LLM

    options = engine_options(engine, model=model, generation_config=sampling.generation_config)
    with LLM(**options, progress=sys.stderr.isatty()) as llm:
        talk(llm, sampling.params(llm), system, show_drafts)


def talk(llm: LLM, params: SamplingParams, system: str | None, show_drafts: bool = False) -> None:
    """Say what was loaded, and answer messages until their end."""
    print(llm.summary, HELP, sep="\n", file=sys.stderr)
    Conversation(llm, params, system, show_drafts).run()


class Conversation:
    """Reads messages from standard input until its end or /exit, and answers each."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, show_drafts: bool = False) -> None:
        self.llm = llm
        self.params = params
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.marked = MarkedText(Console(highlight=False), llm.tokenizer.token_bytes) if show_drafts else None

    def run(self) -> None:
        prompt = _line_editing()
        while (line := _read(prompt)) not in (None, "/exit"):
            assert line is not None
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.answer(line)

    def command(self, line: str) -> None:
        if line == "/reset":
            self.messages = list(self.opening)
        print(HELP if line in COMMANDS else unknown("command", line, COMMANDS), file=sys.stderr)

    def answer(self, text: str) -> None:
        """Stream the answer. What was interrupted or refused leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            chunks = self.llm.stream_chat(asked, self.params, explain=self.marked is not None)
            said = write(chunks, self.marked.write if self.marked else write_text)
        except InputError as error:
            print(f"specserve: {error} Or start again with /reset.", file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
            return
        print(f"[{said.speed()}]", file=sys.stderr)
        if self.marked:
            Console(stderr=True, highlight=False).print(self.marked.legend())
        thought = {"reasoning_content": said.reasoning} if said.reasoning else {}
        self.messages = [*asked, {"role": "assistant", "content": said.text, **thought}]


def _line_editing() -> str:
    """The prompt to show; on a terminal, importing readline also gives input() its editing and history."""
    if not sys.stdin.isatty():
        return ""
    importlib.import_module("readline")
    return "> "


def _read(prompt: str) -> str | None:
    """The next message, or None at the end of input. Ctrl-C drops the line that is being typed."""
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
