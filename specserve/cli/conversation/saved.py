"""Conversations in files: JSON with the messages as OpenAI's API has them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from specserve.errors import InputError
from specserve.files import parse_json, read_text

Message: TypeAlias = dict[str, Any]
ROLES = ("system", "user", "assistant")
_MOST_BYTES = 2**26


def save(path: Path, model: str, messages: Sequence[Message]) -> None:
    """Write a conversation, in place of an earlier one, but of no other file. Raises InputError."""
    path = path.expanduser()
    if path.exists():
        try:
            load(path)
        except InputError as error:
            raise InputError(f"{path} is there and holds no conversation, so it is kept. Name another file.") from error
    text = json.dumps({"model": model, "messages": list(messages)}, indent=1, ensure_ascii=False)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}. Name another file.") from error


def load(path: Path) -> list[Message]:
    """The messages of a file: what `save` writes, or a list of messages. Raises InputError."""
    path = path.expanduser()
    try:
        value = parse_json(read_text(path, _MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{path} cannot be read: {reason}. Name a file that /save wrote.") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise InputError(f"{path} holds no conversation: it must be JSON with a list of messages.")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise InputError(f"{path}: message {number} must be an object whose role is one of {', '.join(ROLES)}.")
        if not isinstance(message.get("content"), str):
            raise InputError(f"{path}: message {number} must have its text as content.")
    kept = ("role", "content", "reasoning_content")
    return [{name: message[name] for name in kept if name in message} for message in messages]
