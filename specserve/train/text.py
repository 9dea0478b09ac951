"""The text that a target wrote, on disk: appended answer by answer, and whole whenever the writer is killed.

A folder has text.json (what the text follows from), tokens.bin (ids of prompts and answers, one behind the other) and
index.bin (a record for each answer). An answer is there once its record is: what stands behind the last whole record
whose checksum is right is dropped when the text is opened.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import filelock
import numpy as np
from numpy.typing import NDArray

from specserve.errors import ConfigError
from specserve.train.config import check_same, read_identity

INDEX = np.dtype(
    [
        ("start", "<u8"),  # of the prompt in tokens.bin, in tokens
        ("num_prompt", "<u4"),
        ("num_output", "<u4"),  # 0: the prompt was too long to be answered
        ("prompt", "<u4"),  # which one of the file
        ("checksum", "<u4"),  # CRC-32 of the answer's bytes in tokens.bin, prompt first
        ("temperature", "<f8"),
    ]
)


class WrittenText:
    """A folder's answers, in the order in which they were appended. A context manager: until it is closed no other
    process can open it. Raises ConfigError where another has, and where the folder holds text of another origin."""

    def __init__(self, folder: Path, identity: Mapping[str, Any], vocab_size: int) -> None:
        self.folder = folder
        self._type = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(folder / ".lock", timeout=0)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise ConfigError(f"{folder} is written by another process. Wait for it, or name another folder.") from None
        try:
            self._check_identity({**identity, "vocab_size": vocab_size})
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def _check_identity(self, identity: dict[str, Any]) -> None:
        path = self.folder / "text.json"
        if path.exists():
            check_same(self.folder, read_identity(path), identity)
        else:
            write_whole(path, json.dumps(identity, indent=2).encode())

    def _open(self) -> None:
        paths = self.folder / "tokens.bin", self.folder / "index.bin"
        for path in paths:
            path.touch()
        self._tokens, self._index = (path.open("r+b") for path in paths)
        records = np.fromfile(paths[1], INDEX, paths[1].stat().st_size // INDEX.itemsize)
        size = paths[0].stat().st_size
        while len(records) and not self._is_whole(records[-1], size):
            records = records[:-1]
        self._records: list[NDArray[Any]] = [records]
        self._count = len(records)
        self._end = 0 if not self._count else int(records[-1]["start"]) + _length(records[-1])
        self._check_records(records)
        self.num_output_tokens = int(records["num_output"].sum(dtype=np.int64))
        for file, end in ((self._tokens, self._end * self._type.itemsize), (self._index, self._count * INDEX.itemsize)):
            file.truncate(end)
            file.seek(end)

    def _check_records(self, records: NDArray[Any]) -> None:
        """That one answer follows another: all but the last are not read."""
        lengths = records["num_prompt"].astype(np.uint64) + records["num_output"]
        if not np.array_equal(records["start"], np.cumsum(lengths) - lengths):
            raise ConfigError(f"{self.folder / 'index.bin'} is damaged. Name another folder.")

    def _is_whole(self, record: Any, size: int) -> bool:
        start, count = (int(n) * self._type.itemsize for n in (record["start"], _length(record)))
        if start + count > size:
            return False
        self._tokens.seek(start)
        return zlib.crc32(self._tokens.read(count)) == int(record["checksum"])

    def append(self, prompt: int, temperature: float, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Add one answer; whoever opens the text from now on finds it."""
        content = np.array([*prompt_ids, *output_ids], self._type).tobytes()
        counts = len(prompt_ids), len(output_ids)
        record = np.array([(self._end, *counts, prompt, zlib.crc32(content), temperature)], INDEX)
        self._tokens.write(content)
        self._tokens.flush()  # before the record that says it is there
        self._index.write(record.tobytes())
        self._index.flush()
        self._records.append(record)
        self._end += sum(counts)
        self._count += 1
        self.num_output_tokens += counts[1]

    def __len__(self) -> int:
        return self._count

    @property
    def records(self) -> NDArray[Any]:
        """Of all answers, dtype INDEX [answers]."""
        self._records = [np.concatenate(self._records)]
        return self._records[0]

    def tokens(self) -> NDArray[Any]:
        """All that tokens.bin holds now, mapped, unsigned [tokens]."""
        path = self.folder / "tokens.bin"
        return np.memmap(path, self._type, "r", shape=(self._end,)) if self._end else np.zeros(0, self._type)

    def close(self) -> None:
        self._tokens.close()
        self._index.close()
        self._lock.release()

    def __enter__(self) -> WrittenText:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _length(record: Any) -> int:
    return int(record["num_prompt"]) + int(record["num_output"])


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file at once: a reader, and whoever comes after a kill, finds the old or the new one."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
