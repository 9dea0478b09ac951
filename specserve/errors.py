"""Every error a user can meet, and the near-miss hint they share. Knows nothing of engines or models.

SpecserveError
├── InputError (ValueError)    one request is wrong: names the parameter, what is allowed and what to do
│   └── PromptTooLongError     the prompt does not fit the context or the KV cache; carries both numbers
├── ConfigError (ValueError)   an option of the engine, the command line or the TOML file is wrong
├── ModelError                 weights, tokenizer or architecture cannot be used; says which file and why
├── CapacityError              memory does not suffice; says what was needed, what was there, what fits
└── EngineError                the engine itself failed; every waiting request gets this
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


class SpecserveError(Exception):
    """Base of all errors raised on purpose."""


class InputError(SpecserveError, ValueError):
    """A request is wrong. `param` is the request field at fault, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InputError):
    """The prompt has `num_tokens`, and at most `limit` fit."""

    def __init__(self, num_tokens: int, limit: int, reason: str) -> None:
        super().__init__(
            f"The prompt has {num_tokens} tokens and at most {limit} fit: {reason}. Shorten the prompt, "
            "or start the engine with a larger max_model_len or kv_cache_gib.",
            param="prompt",
        )
        self.num_tokens = num_tokens
        self.limit = limit


class ConfigError(SpecserveError, ValueError):
    """An option is unknown or has a value that cannot work."""


class ModelError(SpecserveError):
    """A model folder, file or name cannot be loaded."""


class CapacityError(SpecserveError):
    """Not enough memory for what was asked."""


class EngineError(SpecserveError):
    """The engine failed; the request is lost through no fault of its own."""


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """The sentence for an unknown name: near misses first, then everything that is allowed."""
    choices = sorted(allowed)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return f"Unknown {kind} {name!r}.{hint} Known: {', '.join(choices) or 'none'}."


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
