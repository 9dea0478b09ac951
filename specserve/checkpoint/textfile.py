"""Keeps the texts of tenants, as token ids, in a file that only its owner can read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import struct
from array import array
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specserve.errors import ConfigError
from specserve.files import locked, map_file, parse_json
from specserve.types import Ids

_log = logging.getLogger(__name__)

_MAGIC = b"specserve tenant texts 1\n"  # the format and its version
_RECORD = struct.Struct("<32sQ")  # a tenant, and how many tokens follow
_TOKENS_AT_ONCE = 2**14
_TEXTS_AT_ONCE = 64
_DIGEST_BYTES = 32


class Texts(NamedTuple):
    """What a file holds: texts with their tenants, which `tenant_name` names."""

    key: bytes
    texts: list[tuple[bytes, Ids]]


class TextFile:
    """A file of texts for one target: "specserve tenant texts 1", a line of JSON that has `target` and the key, a
    record for each text (its tenant, its length, int32 tokens, all little-endian), and the SHA-256 of all that.

    It is replaced as a whole, so a reader finds one that was written to its end; of several writers the last one wins.
    Raises ConfigError for a path that cannot be a file.
    """

    def __init__(self, path: Path, target: dict[str, int]) -> None:
        self.path = path
        self._target = target
        if path.is_dir() or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise ConfigError(f"{path} cannot be written: name a file in a folder that exists and is not read-only.")

    def load(self) -> Texts:
        """What the file holds; nothing, with a new key, if there is none. A damaged one is moved aside with a warning.
        Raises ConfigError for one that is of another target or cannot be read."""
        try:
            data = map_file(self.path)
        except FileNotFoundError:
            return Texts(new_key(), [])
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error}.") from error
        try:
            target, found = _parsed(data, self._target.keys())
        except (ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            _log.warning("%s is not used, and becomes %s: %s.", self.path, aside.name, error)
            with suppress(OSError):
                os.replace(self.path, aside)
            return Texts(new_key(), [])
        if target != self._target:
            raise ConfigError(
                f"{self.path} has texts for another model, with {_words(target)} instead of {_words(self._target)}. "
                "Name another file or remove it."
            )
        return found

    def save(self, key: bytes, texts: Iterable[tuple[bytes, array[int]]], pause: Callable[[], object]) -> None:
        """Replace the file. Texts may grow while they are written; `pause` is called again and again, after what takes
        a fraction of a millisecond of Python. Raises OSError; the file is then what it was."""
        header = json.dumps({"target": self._target, "key": key.hex()}).encode()
        temporary = self.path.with_name(f".{self.path.name}.partial")
        with locked(self.path):  # who has it is alone with the temporary file
            try:
                with open(temporary, "wb", opener=_private) as stream:
                    digest = hashlib.sha256()
                    for part in _parts(_MAGIC + header + b"\n", texts, pause):
                        digest.update(part)
                        stream.write(part)
                    stream.write(digest.digest())
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, self.path)
            finally:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)


def new_key() -> bytes:
    return secrets.token_bytes(32)


def tenant_name(key: bytes, salt: bytes) -> bytes:
    """What a salt's tenant is called in a file with that key; elsewhere it is called otherwise."""
    return hashlib.blake2b(salt, key=key, digest_size=32).digest()


def _parts(header: bytes, texts: Iterable[tuple[bytes, array[int]]], pause: Callable[[], object]) -> Iterable[bytes]:
    yield header
    for number, (tenant, text) in enumerate(texts):
        count = len(text)
        yield _RECORD.pack(tenant, count)
        for start in range(0, count, _TOKENS_AT_ONCE):
            yield np.array(text[start : min(start + _TOKENS_AT_ONCE, count)], "<i4").tobytes()
            if start or number % _TEXTS_AT_ONCE == 0:
                pause()


def _parsed(data: memoryview, names: Collection[str]) -> tuple[dict[str, int], Texts]:
    """The target, whose sizes have these names, and the texts of a whole file. Raises ValueError and others for one
    that is damaged."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it is no file of texts, or of another version")
    end = max(len(data) - _DIGEST_BYTES, 0)
    if hashlib.sha256(data[:end]).digest() != data[end:]:
        raise ValueError("it is damaged")
    line = bytes(data[len(_MAGIC) : 2**12]).partition(b"\n")[0]
    header, at = parse_json(line.decode()), len(_MAGIC) + len(line) + 1
    target = dict(header["target"])
    if target.keys() != names or any(type(size) is not int or not 0 < size < 2**63 for size in target.values()):
        raise ValueError("it does not say of which model its texts are")
    texts: list[tuple[bytes, Ids]] = []
    while at < end:
        tenant, count = _RECORD.unpack_from(data, at)
        texts.append((tenant, np.frombuffer(data[:end], "<i4", count, at + _RECORD.size)))
        at += _RECORD.size + 4 * count
    if any(not -1 <= text.min() <= text.max() < target["vocab_size"] for _, text in texts if len(text)):
        raise ValueError("it has tokens that the model does not have")
    return target, Texts(bytes.fromhex(header["key"])[:_DIGEST_BYTES], texts)


def _private(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def _words(target: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in target.items())
