"""The text that measurements read: real prose that every installation has, or the user's own."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Protocol

from specserve.bench.prompts import MOST_BYTES
from specserve.errors import ConfigError, InputError
from specserve.files import read_text

STANDARD = "python"


class Encoder(Protocol):
    """What is needed of models.tokenizer.Tokenizer."""

    bos_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def load_text(source: str = STANDARD) -> str:
    """The text of a file, or with "python" the language reference that every Python carries for its `help()`: the same
    for one version of Python. Raises ConfigError for a file that cannot be read."""
    if source == STANDARD:
        return "\n\n".join(topics[name].strip() for name in sorted(topics))
    try:
        return read_text(Path(source), MOST_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The text in {source} cannot be read: {error}. Give a text file in UTF-8, or {STANDARD!r} for Python's "
            "language reference."
        ) from error


def windows(encoder: Encoder, text: str, size: int, num_tokens: int) -> list[list[int]]:
    """The first `num_tokens` of the text in pieces of `size`, the last one perhaps shorter, each after the token that
    the model wants at the beginning of a text, if it wants one.

    A piece has at least two tokens, as nothing predicts the first. Raises ConfigError for sizes that cannot be,
    InputError for a text of fewer than two tokens.
    """
    if not 2 <= size <= num_tokens:
        raise ConfigError(f"The window is {size} tokens; it must be at least 2 and at most all {num_tokens} tokens.")
    ids = encoder.encode(text, add_special_tokens=False)[:num_tokens]
    if len(ids) < 2:
        raise InputError(f"The text has {len(ids)} tokens; at least 2 are needed, and some thousands to say much.")
    opening = [token for token in encoder.encode("") if token == encoder.bos_id]
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [opening + piece for piece in pieces if len(piece) >= 2]


def prompt(encoder: Encoder, text: str, num_tokens: int) -> list[int]:
    """The first `num_tokens` of the text. Raises InputError for a text that has fewer."""
    ids = encoder.encode(text)[:num_tokens]
    if len(ids) < num_tokens:
        raise InputError(f"The text has {len(ids)} tokens, and the context is to have {num_tokens}. Give a longer one.")
    return ids
