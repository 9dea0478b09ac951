"""Keeps packed weights in a safetensors file: written at a model's first start, memory-mapped at every later one.

Tensors are kept by name, in any order. The metadata has a key, all that their bytes depend on: a file with another key
is written anew, and so is a damaged one. A file gets its name when it is whole and on the disk. Its header is checked,
not the weights after it: reading those is what a start saves.

Kernels want memory that begins at a multiple of 64 bytes, and safetensors' own functions write at multiples of 8. So
the file is written here: spaces after the header and tensors of zeros, which the format allows, fill the gaps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.checkpoint.home import cache_folder
from specserve.files import check_regular, locked, open_file, parse_json
from specserve.ops import Ops

Progress = Callable[[], AbstractContextManager[Callable[[int], object]]]

_log = logging.getLogger(__name__)
_ALIGNMENT = 64
_SUFFIX = ".packed"  # not .safetensors: a file in a model's folder would pass for the model's own weights
_FILLER = ".filler"
_DTYPES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class PackedWeights:
    """The file at `path` with packed weights of the model in `folder`, an absolute path. Within its context `get` finds
    or packs them, and at the end of it the file is written if anything was packed; what others had put into a file with
    the same key stays there. Of processes that start at once one packs and the others wait for it. That the file cannot
    be written costs a warning.

    `key` returns what JSON can say; it is asked for again before writing, as somebody may have changed the model's
    files meanwhile. `progress` is entered for packing, and what it gives called with the bytes of each tensor.
    """

    def __init__(self, path: Path, folder: Path, key: Callable[[], Any], progress: Progress) -> None:
        self._path = path
        self._folder = folder
        self._key = key
        self._progress = progress
        self._stack = ExitStack()
        self._advance: Callable[[int], object] | None = None
        self._is_packing = False  # and holds the lock, but for an error
        self._error: Exception | None = None  # why nothing can be written
        self._packed: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}

    @property
    def num_mapped_bytes(self) -> int:
        """Of the tensors that `get` found in the file."""
        return sum(tensor.nbytes for tensor in self._used.values())

    def __enter__(self) -> PackedWeights:
        # JSON in JSON, as names of files may not be UTF-8.
        self._metadata = {"key": json.dumps(self._key()), "folder": json.dumps(str(self._folder))}
        self._stored = self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        with self._stack:
            if kind is None and self._packed and self._error is None:
                self._write()
        if self._error is not None:
            _log.warning("Every start packs the weights anew, as %s cannot be written: %s.", self._path, self._error)

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, pack: Callable[[], Tensor]) -> Tensor:
        """The file's tensor of this name, shape and dtype, or else what `pack` returns; see ops.PackedCache."""
        if name in self._packed:
            return self._packed[name]
        if not self._has(name, shape, dtype) and not self._is_packing:
            self._lock()
            self._stored = self._read()  # what another process wrote before it gave up the lock
        if self._has(name, shape, dtype):
            return self._used.setdefault(name, self._stored[name])
        if self._advance is None:
            self._advance = self._stack.enter_context(self._progress())
        tensor = self._packed[name] = pack()
        self._advance(tensor.nbytes)
        return tensor

    def _has(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        tensor = self._stored.get(name)
        return tensor is not None and tensor.shape == shape and tensor.dtype == dtype

    def _lock(self) -> None:
        self._is_packing = True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(locked(self._path))
        except (OSError, NotImplementedError) as error:  # the latter where a file system has no locks
            self._error = error

    def _read(self) -> dict[str, Tensor]:
        """What the file holds, mapped: processes share its pages, and what is written to them does not reach it."""
        try:
            with open_file(self._path) as stream, safe_open(self._path, framework="pt") as file:
                if (file.metadata() or {}).get("key") != self._metadata["key"]:
                    raise ValueError("its weights are of other files or for other kernels")
                tensors = {n: file.get_tensor(n) for n in sorted(file.keys()) if not n.endswith(_FILLER)}
                header = _header(tensors, self._metadata)
                if stream.read(len(header)) != header:
                    raise ValueError("its header is damaged")
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
                return tensors
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            _log.info("%s is not used: %s.", self._path, error)
            return {}

    def _write(self) -> None:
        """Write what the file had and what was packed. Whoever holds the lock is alone with the temporary file."""
        tensors = dict(sorted((self._stored | self._packed).items()))
        temporary = self._path.with_name(f".{self._path.name}.partial")
        try:
            with temporary.open("wb") as stream:
                stream.write(_header(tensors, self._metadata))
                for tensor in tensors.values():
                    stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
                    stream.write(bytes(-tensor.nbytes % _ALIGNMENT))
                stream.flush()
                os.fsync(stream.fileno())
            if json.dumps(self._key()) != self._metadata["key"]:
                _log.warning("The weights in %s were changed while they were read.", self._folder)
                return
            os.replace(temporary, self._path)
            _remove_orphans(cache_folder() / "packed")
        except OSError as error:
            self._error = error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def packed_path(folder: Path, ops: Ops, part: str = "") -> Path:
    """Where the packed weights of a model's folder, an absolute path, belong: into it if it is the cache's own, else
    elsewhere in the cache. There is one file for each way to store weights, and for each `part` of a model."""
    name = f"{ops.name}-{ops.quantization}-{str(ops.dtype).removeprefix('torch.')}{part}{_SUFFIX}"
    if folder.parent == (cache_folder() / "models").resolve():
        return folder / name
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return cache_folder() / "packed" / f"{folder.name}-{digest}-{name}"


def _header(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The bytes of a safetensors file before the data of `tensors`, which lie in their order, each with its filler. A
    digest in the metadata makes any change of them noticeable."""
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end := end + tensor.nbytes]
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        if filler := -tensor.nbytes % _ALIGNMENT:
            offsets = [end, end := end + filler]
            entries[name + _FILLER] = {"dtype": "U8", "shape": [filler], "data_offsets": offsets}
    digest = hashlib.sha256(json.dumps([metadata, entries]).encode()).hexdigest()
    text = json.dumps({"__metadata__": {**metadata, "sha256": digest}, **entries}).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _remove_orphans(folder: Path) -> None:
    """Remove the files of models whose folders are gone, and those that nobody can use, as of an earlier format."""
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            if not _is_of_a_model(path):
                path.unlink(missing_ok=True)
        except OSError as error:  # another user's, or removed meanwhile
            _log.info("%s is left alone: %s.", path, error)


def _is_of_a_model(path: Path) -> bool:
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            return Path(parse_json(file.metadata()["folder"])).is_dir()
    except (SafetensorError, TypeError, KeyError, ValueError):
        return False
