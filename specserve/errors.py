"""Every error a user can meet, and the near-miss hint they share.

SpecserveError
├── InputError (ValueError)    one request is wrong: names the parameter, what is allowed and what to do
│   ├── PromptTooLongError     the prompt does not fit the context or the KV cache; carries both numbers
│   └── NoTokenLeftError       what the request asks for together forbids every token
├── ConfigError (ValueError)   an option of the engine, the command line or the TOML file is wrong
├── ModelError                 weights, tokenizer or architecture cannot be used; says which file and why
│   └── NotFetchedError        the model is not on this machine, and nothing may be fetched now
│   └── TextError              the model's own tokenizer or chat template failed on a text
├── CapacityError              memory does not suffice; says what was needed, what was free, what fits
├── EngineError                the engine itself failed; every waiting request gets this
└── ServerError                a server that was asked over HTTP refused, failed or did not answer
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

T = TypeVar("T")

# Why a completion ended that did not end well: the request left no token that may come, or all else.
FailureCode: TypeAlias = Literal["no_token_left", "completion_failed"]
_MAX_SHOWN = 500  # characters of an answer that is no error object
_LONGEST_NAME = 200  # characters of a name that others are compared with
_MOST_NAMES = 2000
_LONGEST_NUMBER = 128  # bits of a number that is written out


class SpecserveError(Exception):
    """Base of all errors raised on purpose."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a call that had many prompts: `outputs` are those that had ended, None in place of the others."""

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self.outputs = outputs


class InputError(SpecserveError, ValueError):
    """A request is wrong. `param` is the request field at fault, or None; `code` a short name of what is wrong with it,
    where programs may want to know."""

    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InputError):
    """The prompt has `num_tokens`, or more where they were not counted to the end, and at most `limit` fit."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, reason: str, counted: bool = True) -> None:
        has = num_tokens if counted else f"at least {num_tokens}"
        super().__init__(
            f"The prompt has {has} tokens and at most {limit} fit: {reason}. Shorten the prompt, "
            "or start the engine with a larger max_model_len or kv_cache_gib.",
            param="prompt",
        )
        self.num_tokens = num_tokens
        self.limit = limit


class NoTokenLeftError(InputError):
    """The grammar, allowed_token_ids, bad_words and min_tokens of a request together forbid every token."""

    code: FailureCode = "no_token_left"


class ConfigError(SpecserveError, ValueError):
    """An option is unknown or has a value that cannot work."""


class ModelError(SpecserveError):
    """A model folder, file or name cannot be loaded."""


class TextError(ModelError):
    """The model's own tokenizer or chat template failed on a text: it gave up, or took more time or memory than it
    may. The same text would fail again."""

    code = "text_failed"


class NotFetchedError(ModelError):
    """A model that could be fetched is not here, and the caller wants nothing fetched."""


class CapacityError(SpecserveError):
    """Not enough memory for what was asked."""


class EngineError(SpecserveError):
    """The engine failed; the request is lost through no fault of its own."""


class ServerError(SpecserveError):
    """A server's error object as OpenAI has it. `status` is the HTTP status: None where no answer came, 200 where the
    error came inside a stream that had begun. `retry_after` is in seconds, as the server asked for, or None;
    `should_retry` says whether the same request may succeed later."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str = "server_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        should_retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.type = message, status, type
        self.code, self.param = code, param
        self.retry_after, self.should_retry = retry_after, should_retry

    @classmethod
    def of_answer(
        cls, status: int, text: str, retry_after: float | None = None, should_retry: bool = False
    ) -> ServerError:
        """What the body of an answer says; one without an error object, as proxies send, is shown as it is."""
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        error = body.get("error", body) if isinstance(body, dict) else body
        if isinstance(error, str):
            error = {"message": error}
        if not isinstance(error, dict) or not isinstance(error.get("message"), str):
            error = {
                "message": " ".join(text[:_MAX_SHOWN].split()) or f"The server answered with HTTP status {status}."
            }
        said = {name: str(error[name]) for name in ("type", "code", "param") if error.get(name) is not None}
        return cls(error["message"], status=status, retry_after=retry_after, should_retry=should_retry, **said)


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """The sentence for an unknown name: near misses first, then everything that is allowed."""
    choices = sorted(allowed)
    near = near_misses(name, choices, 3, 0.6)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return f"Unknown {kind} {name!r}.{hint} Known: {', '.join(choices) or 'none'}."


def shown(value: object) -> str:
    """A value that is refused, as messages show it: Python writes out no whole number of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)


def near_misses(name: str, choices: Iterable[str], most: int, cutoff: float) -> list[str]:
    """The choices that resemble a name, which may come from a file and have any length, as they may."""
    short = [choice for choice in islice(choices, _MOST_NAMES) if len(choice) <= _LONGEST_NAME]
    return difflib.get_close_matches(name, short, most, cutoff) if len(name) <= _LONGEST_NAME else []


def strict_fields(kind: str, error: type[SpecserveError]) -> Callable[[type[T]], type[T]]:
    """Class decorator for keyword-only dataclasses: an unknown field raises `error` with its near misses."""

    def wrap(cls: type[T]) -> type[T]:
        plain = cls.__init__
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]

        @functools.wraps(plain)
        def init(self: T, **values: Any) -> None:
            for name in values:
                if name not in names:
                    raise error(unknown(kind, name, names))
            plain(self, **values)

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return wrap


def check_number(name: str, value: Any, kind: type, low: float, high: float) -> None:
    """Raise InputError for what is none: type, then range, in which neither NaN nor infinity is. Whole numbers are
    compared as they are: some are beyond all floats."""
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        what = f"whole number from {low} to {high}" if kind is int else f"finite number from {low:g} to {high:g}"
        raise InputError(f"{name} is {shown(value)}; it must be a {what}.", name.split("[")[0])
