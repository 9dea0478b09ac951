"""The process's log: one record a line, as text or JSON, with the request it belongs to. Whatever a client sent can
neither break a line nor fill the log."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from specserve.errors import ConfigError, unknown

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request that is being served

LONGEST_VALUE = 200  # characters of a field
LONGEST_MESSAGE = 4000
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id"}
_FIXED = ("time", "level", "logger", "message", "request_id", "exception")
_access = logging.getLogger("specserve.access")


def configure(format: Literal["text", "json"] = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send all records of at least `level` to `stream` (standard error), and to nothing else. Warnings are records.
    Raises ConfigError for an unknown format or level."""
    formatters = {"text": TextFormatter, "json": JsonFormatter}
    if format not in formatters:
        raise ConfigError(unknown("log format", format, formatters))
    levels = logging.getLevelNamesMapping()
    if level.upper() not in levels:
        raise ConfigError(unknown("log level", level, (name.lower() for name in levels)))
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatters[format]())
    handler.addFilter(RequestFilter())
    logging.basicConfig(handlers=[handler], level=levels[level.upper()], force=True)
    logging.captureWarnings(True)


def log_request(
    *,
    method: str,
    path: str,
    status: int,
    milliseconds: float,
    request_id: str | None = None,
    client: str | None = None,
    key: int | None = None,
    error: str | None = None,
    adapter: str | None = None,
    num_prompt_tokens: int | None = None,
    num_output_tokens: int | None = None,
    mean_acceptance_length: float | None = None,
) -> None:
    """Record a request that was answered: a warning if the fault was the server's. What is None is left out. Without a
    `request_id` it is the one of the context. `client` is an address, `key` the number of an API key, `error` a code of
    errors, `adapter` a LoRA adapter's name."""
    method, path = clip(method), clip(path)
    known = {
        "request_id": request_id,
        "method": method,
        "path": path,
        "client": client,
        "key": key,
        "status": status,
        "error": error,
        "milliseconds": round(milliseconds, 3),
        "adapter": adapter,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "mean_acceptance_length": mean_acceptance_length,
    }
    extra = {name: value for name, value in known.items() if value is not None}
    level = logging.INFO if status < 500 else logging.WARNING
    _access.log(level, "%s %s %d in %.1f ms", method, path, status, milliseconds, extra=extra)


class RequestFilter(logging.Filter):
    """Lets every record pass and says which request it belongs to, unless whoever made it has."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = getattr(record, "request_id", None) or request_id.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a record, in ASCII: time, level, logger, message, request_id if there is one, the extra fields,
    and an exception's traceback as one field. An extra field with one of these names gets a _ appended."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        if name := getattr(record, "request_id", None):
            fields["request_id"] = clip(str(name))
        for key, value in _extra(record).items():
            fields[f"{key}_" if key in _FIXED else key] = value
        if text := _exception(self, record):
            fields["exception"] = text
        return json.dumps(fields)


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, and name=value of all else. Lines of a traceback are indented, so that nothing in
    it can pass for a record."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {_message(record)}"
        name = getattr(record, "request_id", None)
        fields = {**({"request_id": clip(str(name))} if name else {}), **_extra(record)}
        line += "".join(f" {key}={_word(value)}" for key, value in fields.items())
        lines = _exception(self, record).splitlines()
        return "\n    ".join([line, *(escape(each) for each in lines)])


def clip(text: str, limit: int = LONGEST_VALUE) -> str:
    """Text on one line without control characters, of at most `limit` characters; longer ones end in "..."."""
    shown = escape(text[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def escape(text: str) -> str:
    r"""Text in which everything that a terminal would not print is written out: a newline as \n, an escape as \x1b.
    What is escaped already stays as it is."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def _time(record: logging.LogRecord) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    return clip(record.getMessage(), LONGEST_MESSAGE)


def _extra(record: logging.LogRecord) -> Mapping[str, Any]:
    """The fields given as `extra`."""
    return {clip(key): _plain(value) for key, value in vars(record).items() if key not in _STANDARD}


def _plain(value: Any) -> Any:
    """What JSON can say of a value: finite numbers and truth as they are, all else as text."""
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return clip(str(value))


def _word(value: Any) -> str:
    """A value as text; in quotes where it would not end at the next space."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' "=') else text


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The traceback, and the stack if one was asked for; nothing for most records."""
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    parts += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return "\n".join(parts)
