"""Fetches one file over HTTP: what has arrived stays when it is interrupted, the next try goes on from there, and the
file gets its name when its digest is right. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specserve.errors import ModelError

_log = logging.getLogger(__name__)
_PARTIAL = ".incomplete"  # what huggingface_hub calls such files, too
_CHUNK_BYTES = 2**20
_TIMEOUT_S = 20.0  # without a byte
_RETRIES = 4  # one after the other, without a byte in between
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. `digest` is the SHA-256 of a large file (`is_lfs`), and git's SHA-1 of any other."""

    name: str
    size: int
    digest: str
    is_lfs: bool

    def hasher(self) -> Any:
        """Of its content, which is to be fed to it."""
        return hashlib.sha256() if self.is_lfs else hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def fetch(file: HubFile, url: str, headers: Mapping[str, str], folder: Path, advance: Callable[[int], object]) -> None:
    """Have `file` in `folder` under the name of its digest. `advance` is called with the bytes of each piece, also of
    those that an earlier try left. Raises ModelError for other content than was announced, which is removed, and what
    the hub's client raises."""
    path = folder / file.digest
    if path.is_file() and path.stat().st_size == file.size:
        advance(file.size)
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{file.digest}{_PARTIAL}"
    with partial.open("a+b") as stream:
        hasher = _receive(file, url, headers, stream, advance)
        stream.flush()
        os.fsync(stream.fileno())
    if hasher.hexdigest() != file.digest:
        partial.unlink()
        kind = "SHA-256" if file.is_lfs else "git digest"
        raise ModelError(
            f"{file.name} arrived with the {kind} {hasher.hexdigest()}, and {file.digest} was announced. It was "
            "removed; fetch it again."
        )
    os.replace(partial, path)


def num_bytes_here(file: HubFile, folder: Path) -> int:
    """How much of it has arrived."""
    for name in (file.digest, f"{file.digest}{_PARTIAL}"):
        if (folder / name).is_file():
            return min(file.size, (folder / name).stat().st_size)
    return 0


def _receive(
    file: HubFile, url: str, headers: Mapping[str, str], stream: BinaryIO, advance: Callable[[int], object]
) -> Any:
    """Append to the stream until the file is whole; the digest of all of it."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    hasher, num_bytes, failures = _continue(file, stream, advance), stream.tell(), 0
    broken = _transport_error(get_session())
    while num_bytes < file.size:
        try:
            for piece, is_from_start in _pieces(url, headers, num_bytes):
                if is_from_start:  # a server that sends no part of a file
                    advance(-num_bytes)
                    hasher, num_bytes = file.hasher(), 0
                    stream.truncate(0)
                stream.write(piece)
                hasher.update(piece)
                advance(len(piece))
                num_bytes, failures = num_bytes + len(piece), 0
            if num_bytes >= file.size:
                break  # if it is more, the digest shows
            raise broken(f"it ended {file.size - num_bytes:,} bytes early")
        except broken as error:
            failures += 1
            if failures > _RETRIES:
                raise
            _log.info("%s at byte %d: %s; trying again.", file.name, num_bytes, error)
            time.sleep(_RETRY_S)
    return hasher


def _continue(file: HubFile, stream: BinaryIO, advance: Callable[[int], object]) -> Any:
    """The digest of what an earlier try left; the stream is at its end."""
    hasher = file.hasher()
    if stream.seek(0, os.SEEK_END) > file.size:
        stream.truncate(0)
    stream.seek(0)
    while piece := stream.read(_CHUNK_BYTES):
        hasher.update(piece)
        advance(len(piece))
    return hasher


def _pieces(url: str, headers: Mapping[str, str], start: int) -> Any:
    """Of the file from byte `start`; each with whether it begins at the file's first byte after all."""
    from huggingface_hub.utils import get_session, hf_raise_for_status  # type: ignore[attr-defined]

    asked = {**headers, "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    with get_session().stream("GET", url, headers=asked, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        is_from_start = bool(start) and response.status_code != 206
        for piece in response.iter_bytes(_CHUNK_BYTES):
            yield piece, is_from_start
            is_from_start = False


def _transport_error(session: Any) -> type[Exception]:
    """What the HTTP library of huggingface_hub, whichever it is, raises for a connection that breaks or is silent."""
    error: type[Exception] = importlib.import_module(type(session).__module__.partition(".")[0]).TransportError
    return error
