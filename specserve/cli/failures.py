"""What the command line says of an error, in one line: what was wrong, what is allowed, what to do."""

from __future__ import annotations

import re

from cyclopts import CycloptsError, MissingArgumentError, UnknownCommandError, UnusedCliTokensError

from specserve.errors import EngineError, ServerError, unknown

FAILED, USAGE, INTERRUPTED = 1, 2, 130  # exit statuses; the last is 128 + SIGINT
# As Python writes an OSError: its number, and the name of a file that the message has already.
_NUMBERED = re.compile(r"\[Errno -?\d+\] ([^:'\[\]]+)(?:: '[^']*')?")


def status_of(error: Exception) -> int:
    """FAILED where the engine, a server or the system failed; USAGE for a wrong request, option or model."""
    return FAILED if isinstance(error, EngineError | ServerError | OSError) else USAGE


def describe(error: Exception) -> str:
    """The message, without a line break."""
    text = _usage(error) if isinstance(error, CycloptsError) else str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}."
    return " ".join(_NUMBERED.sub(r"\1", text).split())


def _usage(error: CycloptsError) -> str:
    command = " ".join(("specserve", *(error.command_chain or ())))
    text = str(error)
    if isinstance(error, UnknownCommandError) and error.app is not None and error.unused_tokens:
        names = [name for name in error.app if not name.startswith("-")]
        text = unknown("command", error.unused_tokens[0], names)
    elif isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        text = f"{command} takes no argument {error.unused_tokens[0]!r}."
    elif type(error) is MissingArgumentError and error.argument is not None:
        name = error.keyword or error.argument.name
        text = f"{name} needs a value." if error.keyword else f"{command} needs {name}: {error.argument.parameter.help}"
    return f"{text} See `{command} --help`."
