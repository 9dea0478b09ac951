"""Writes a safetensors file piece by piece, without holding its tensors in memory.

Header length, JSON header, bytes of the tensors one after the other. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

Progress = Callable[[int], object]  # told of each piece's bytes


class Entry(NamedTuple):
    """A tensor to be written; `dtype` in the format's spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def write(path: Path, entries: Iterable[Entry], pieces: Iterable[bytes], progress: Progress) -> None:
    """`pieces` are the bytes of all entries, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        offsets = [end, end := end + entry.num_bytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            stream.write(piece)
            progress(len(piece))
