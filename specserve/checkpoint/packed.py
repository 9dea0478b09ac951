"""Keeps packed weights in a file: written at a model's first start, memory-mapped at every later one. Knows the file,
its place and when it is out of date; knows no kernel and no architecture.

A file is a preamble, what was packed in the order of packing, each part at a multiple of 64 bytes, and an index in
JSON. It gets its name when it is whole and on the disk. It is out of date when the key in its index is not the one
asked for, or when another sequence of reading and packing makes the model; then, and when it is damaged, it is written
anew. Start and end are checked, not the weights between them: reading those is what a start saves.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import torch
from filelock import FileLock
from torch import Tensor

from specserve.checkpoint import catalog
from specserve.ops import Ops

T = TypeVar("T")
Build = Callable[[Mapping[str, Tensor]], T]
Progress = Callable[[], AbstractContextManager[Callable[[], object]]]

_log = logging.getLogger(__name__)
_PREAMBLE = struct.Struct("<16sQQ32s")  # _MAGIC, where the index begins, its bytes, its SHA-256
_MAGIC = b"specserve pack 1"  # the digit is that of this format
_ALIGNMENT = 64
_SUFFIX = ".packed"


class _OutOfDateError(Exception):
    """A file that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What was packed by one call: the tensors that were read since the call before, and what the bytes are."""

    reads: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Index:
    """The last bytes of a file. `folder` is the model's, `offsets` are those of the parts in the file."""

    key: Any
    folder: str
    parts: tuple[_Part, ...]
    offsets: tuple[int, ...]

    def to_json(self) -> bytes:
        parts = [(part.reads, part.dtype, part.shape) for part in self.parts]
        return json.dumps({"key": self.key, "folder": self.folder, "parts": parts, "offsets": self.offsets}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> _Index:
        values = json.loads(text)
        parts = tuple(_Part(tuple(reads), dtype, tuple(shape)) for reads, dtype, shape in values["parts"])
        return cls(values["key"], values["folder"], parts, tuple(values["offsets"]))


class Shapes(Mapping[str, Tensor]):
    """Tensors that have shapes alone: matrices on torch's meta device, and vectors of zeros. What is computed with
    vectors would take a second on that device, in which torch imports its compiler."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        return torch.zeros(shape) if len(shape) == 1 else torch.empty(shape, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Scale:
    """A tape that packs nothing and adds up what it would take."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def keep(self, zeros: Tensor, fill: Callable[[], object]) -> Tensor:
        self.num_bytes += zeros.nbytes
        return zeros


class _Reads(Mapping[str, Tensor]):
    """Tensors by name, and which were read since `taken` was last called."""

    def __init__(self, tensors: Mapping[str, Tensor], on_read: Callable[[], object]) -> None:
        self._tensors = tensors
        self._on_read = on_read
        self._names: list[str] = []

    def taken(self) -> tuple[str, ...]:
        names, self._names = self._names, []
        return tuple(names)

    def __getitem__(self, name: str) -> Tensor:
        self._names.append(name)
        self._on_read()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _Recorder:
    """A tape that appends what is packed to a file. If that fails the rest is packed all the same; `error` says why."""

    def __init__(self, reads: _Reads, stream: BinaryIO) -> None:
        self.error: OSError | None = None
        self._reads = reads
        self._stream = stream
        self._parts: list[_Part] = []
        self._offsets: list[int] = []
        self._end = _PREAMBLE.size

    def keep(self, zeros: Tensor, fill: Callable[[], object]) -> Tensor:
        fill()
        self._parts.append(_Part(self._reads.taken(), str(zeros.dtype), tuple(zeros.shape)))
        self._offsets.append(self._end)
        self._write(self._end, zeros.view(-1).view(torch.uint8).numpy().data)
        self._end += -(-zeros.nbytes // _ALIGNMENT) * _ALIGNMENT
        return zeros

    def finish(self, key: Any, folder: Path) -> None:
        """Write index and preamble, and wait until all is on the disk."""
        text = _Index(key, str(folder), tuple(self._parts), tuple(self._offsets)).to_json()
        self._write(self._end, memoryview(text))
        digest = hashlib.sha256(text).digest()
        self._write(0, memoryview(_PREAMBLE.pack(_MAGIC, self._end, len(text), digest)))
        if self.error is None:
            try:
                os.fsync(self._stream.fileno())
            except OSError as error:
                self.error = error

    def _write(self, offset: int, data: memoryview) -> None:
        try:
            while self.error is None and len(data):
                written = os.pwrite(self._stream.fileno(), data, offset)
                offset, data = offset + written, data[written:]
        except OSError as error:
            self.error = error


class _Player:
    """A tape that gives what a file holds. Raises _OutOfDateError as soon as something else is packed."""

    def __init__(self, reads: _Reads, index: _Index, memory: Tensor) -> None:
        self._reads = reads
        self._parts = zip(index.parts, index.offsets, strict=True)
        self._memory = memory  # uint8 [bytes of the file]

    def keep(self, zeros: Tensor, fill: Callable[[], object]) -> Tensor:
        wanted = _Part(self._reads.taken(), str(zeros.dtype), tuple(zeros.shape))
        part, offset = next(self._parts, (None, 0))
        if part != wanted:
            raise _OutOfDateError(f"it has {part} where {wanted} is packed")
        return self._memory[offset : offset + zeros.nbytes].view(zeros.dtype).view(zeros.shape)

    def finish(self) -> None:
        if left := [part for part, _ in self._parts]:
            raise _OutOfDateError(f"it has {len(left)} more parts than are packed")


@dataclass(frozen=True)
class PackedFile(Generic[T]):
    """The file at `path` for the model in `folder`, an absolute path, and how the model is made: `build` reads
    `tensors` and packs them with `ops`. `key` has all, as JSON can say it, that the bytes depend on; it is asked for
    again after packing, as somebody may have changed the tensors' files meanwhile. `progress` is entered for packing,
    and what it gives called for each tensor that is read.
    """

    path: Path
    folder: Path
    key: Callable[[], Any]
    ops: Ops
    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    build: Build[T]
    progress: Progress

    def load(self) -> tuple[T, int]:
        """The model, and how many bytes of the file its weights are mapped from: 0 if they were packed just now.

        Of processes that start at once one writes the file and the others wait for it. That it cannot be written costs
        a warning. Raises what `build` raises.
        """
        if loaded := self._replayed():
            return loaded
        with ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(self.path.with_name(f".{self.path.name}.lock")))
                if loaded := self._replayed():  # another process had the lock before
                    return loaded
                stream = stack.enter_context(self._temporary_file(stack))
            except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
                self._warn(error)
                return self.build(self.tensors), 0
            return self._recorded(stream), 0

    def _replayed(self) -> tuple[T, int] | None:
        try:
            memory = _map(self.path)
            index = _read_index(memory)
            if index.key != self.key():
                raise _OutOfDateError("its weights are of other files or for other kernels")
            memory.madvise(mmap.MADV_WILLNEED)
            reads = _Reads(Shapes(self.shapes), lambda: None)
            player = _Player(reads, index, torch.frombuffer(memory, dtype=torch.uint8))
            with self.ops.taped(player):
                model = self.build(reads)
            player.finish()
            return model, len(memory)
        except FileNotFoundError:
            return None
        except (_OutOfDateError, OSError) as error:
            _log.info("%s is not used: %s.", self.path, error)
            return None

    def _recorded(self, stream: BinaryIO) -> T:
        key = self.key()
        with self.progress() as on_read:
            reads = _Reads(self.tensors, on_read)
            recorder = _Recorder(reads, stream)
            with self.ops.taped(recorder):
                model = self.build(reads)
        recorder.finish(key, self.folder)
        if recorder.error is not None:
            self._warn(recorder.error)
        else:
            self._publish(Path(stream.name), key)
        return model

    def _temporary_file(self, stack: ExitStack) -> BinaryIO:
        prefix = f".{self.path.name}.partial-"
        # Of a run that was killed: whoever holds the lock is alone.
        for leftover in self.path.parent.glob(f"{glob.escape(prefix)}*"):
            leftover.unlink()
        temporary = self.path.with_name(prefix + secrets.token_hex(4))
        stack.callback(temporary.unlink, missing_ok=True)
        return temporary.open("xb", buffering=0)

    def _publish(self, temporary: Path, key: Any) -> None:
        try:
            if self.key() != key:
                _log.warning("The weights in %s were changed while they were read.", self.folder)
                return
            os.replace(temporary, self.path)
            _remove_orphans(catalog.cache_folder() / "packed")
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        _log.warning("Every start packs the weights anew, as %s cannot be written: %s.", self.path, error)


def packed_path(folder: Path, ops: Ops) -> Path:
    """Where the packed weights of a model's folder, an absolute path, belong: into it if it is the cache's own, else
    elsewhere in the cache. There is one file for each way to store weights."""
    name = f"{ops.name}-{ops.quantization}-{str(ops.dtype).removeprefix('torch.')}{_SUFFIX}"
    if folder.parent == (catalog.cache_folder() / "models").resolve():
        return folder / name
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return catalog.cache_folder() / "packed" / f"{folder.name}-{digest}-{name}"


def _map(path: Path) -> mmap.mmap:
    """The file's pages, which processes share. Private pages are writable only so that torch does not complain: nobody
    writes to them, and what was written would not reach the file."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size < _PREAMBLE.size:
            raise _OutOfDateError(f"it has {size} bytes")
        return mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY)


def _read_index(memory: mmap.mmap) -> _Index:
    magic, start, length, digest = _PREAMBLE.unpack_from(memory)
    if magic != _MAGIC or start + length != len(memory):
        raise _OutOfDateError("it is truncated or of another format")
    text = memory[start:]
    if hashlib.sha256(text).digest() != digest:
        raise _OutOfDateError("its index is damaged")
    return _Index.from_json(text)


def _remove_orphans(folder: Path) -> None:
    """Remove the files of models whose folders are gone, and those that nobody can use."""
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            if _is_orphan(path):
                path.unlink(missing_ok=True)
        except OSError as error:  # another user's, or removed meanwhile
            _log.info("%s is left alone: %s.", path, error)


def _is_orphan(path: Path) -> bool:
    try:
        return not Path(_read_index(_map(path)).folder).is_dir()
    except _OutOfDateError:
        return True
