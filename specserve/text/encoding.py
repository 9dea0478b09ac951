"""Ids of texts and texts of ids, without keeping other threads from running: tokenizers holds Python's lock while it
works on one text, and lets go of it for a batch, even a batch of one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer as Backend

from specserve.errors import InputError, TextError

SHORT = 4096  # characters, or ids, that take a millisecond: others may wait as long
_PARALLELISM = "TOKENIZERS_PARALLELISM"


def encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    """Raises InputError for what is no Unicode text, and TextError where the tokenizer itself fails on it."""
    try:
        with _failures():
            if len(text) <= SHORT:
                ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                ids = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except (TypeError, UnicodeEncodeError) as error:
        raise not_unicode(error) from error
    return ids


def decode(backend: Backend, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Raises InputError for what are no ids, and TextError where the tokenizer itself fails on them."""
    try:
        with _failures():
            if len(ids) <= SHORT:
                text: str = backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:
                (text,) = backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
    except (TypeError, OverflowError) as error:
        raise InputError(f"These token ids cannot be decoded: {error}. Ids are whole numbers from 0 on.") from error
    return text


def not_unicode(error: Exception) -> InputError:
    return InputError(f"The text cannot be tokenized: it must be a str of valid Unicode ({error}).")


def use_own_threads_only() -> None:
    """Have tokenizers work on the thread that asks, for a process whose threads are its own affair: one text has no use
    for a pool of threads, which a fork would lose. Whoever has set the environment variable keeps what it says."""
    os.environ.setdefault(_PARALLELISM, "false")


@contextmanager
def _failures() -> Iterator[None]:
    """A pattern that gives up on a text makes tokenizers panic, which Python sees as a BaseException; its other
    failures are bare Exceptions."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise TextError(f"The model's tokenizer fails on this text: {error}.") from error
