"""Frames in memory that two processes of one machine share: written by one, sealed, and read by another. Linux only.

The memory has no name, so none is left behind: it is gone when the process that wrote it lets go of it, or ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable

from specserve.parallel.frame import TransferError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_MOST_AT_ONCE = 512  # pieces in one call; systems take 1024


class SharedFrames:
    """Those that this process has written and holds for a reader."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}  # descriptors

    def __len__(self) -> int:
        return len(self._open)

    def put(self, name: str, pieces: Iterable[bytes]) -> tuple[str, int]:
        """Hold a frame under a name until that is dropped; returns the path by which another process of this user
        opens it, and how many bytes it has. Raises OSError where there is no memory for it."""
        self.drop(name)
        descriptor = os.memfd_create("specserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size = _write(descriptor, list(pieces))
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self._open[name] = descriptor
        return _path(descriptor), size

    def begin(self, name: str, num_bytes: int) -> None:
        """Hold a frame of so many bytes, which comes piece by piece. Takes memory for what is there alone."""
        self.drop(name)
        descriptor = os.memfd_create("specserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._open[name] = descriptor
        os.ftruncate(descriptor, num_bytes)

    def fill(self, name: str, start: int, piece: bytes) -> None:
        """Put a piece in its place. Raises OSError where there is no memory for it, KeyError where nobody holds the
        frame any more."""
        while piece:
            written = os.pwrite(self._open[name], piece, start)
            start, piece = start + written, piece[written:]

    def finish(self, name: str) -> str:
        """Where another process of this user opens it, now that all is there. Raises OSError, and KeyError as `fill`
        does."""
        fcntl.fcntl(self._open[name], fcntl.F_ADD_SEALS, _SEALS)
        return _path(self._open[name])

    def drop(self, name: str) -> None:
        """Who has it open may go on reading."""
        if (descriptor := self._open.pop(name, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        for name in list(self._open):
            self.drop(name)


def read_shared(path: str, num_bytes: int) -> memoryview:
    """A frame that another process holds; valid as long as anything refers to it, whatever becomes of that process.
    Raises OSError where it cannot be opened any more, TransferError where there is something else instead."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not num_bytes or os.fstat(descriptor).st_size != num_bytes or not _is_sealed(descriptor):
            raise TransferError("cut", "The frame's memory is not what was said of it.")
        return memoryview(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _is_sealed(descriptor: int) -> bool:
    """Whether nobody can change or cut it while it is read."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # another kind of file has none
        return False


def _write(descriptor: int, pieces: list[bytes]) -> int:
    size = 0
    for start in range(0, len(pieces), _MOST_AT_ONCE):
        left = [memoryview(piece) for piece in pieces[start : start + _MOST_AT_ONCE] if piece]
        while left:
            written = os.writev(descriptor, left)
            size += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
    return size
