"""Hidden states of the target on disk: as the engine computed them while it wrote the text, or computed when a step of
training first asks for them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.bench.recorder import rounded
from specserve.cache.sizing import GIB
from specserve.errors import CapacityError
from specserve.train.batches import Answer
from specserve.train.target import Target

_INDEX = np.dtype([("answer", "<u4"), ("count", "<u4"), ("start", "<u8")])  # of an answer: its tokens in rows.bin
BLOCK_SIZE = 16  # tokens of a block of the KV cache of the engine that writes
_UNCHECKED_BYTES = 2**26  # that are written before the disk's free bytes are looked at again
_LEFT_FREE_BYTES = 2**30


class HiddenCache:
    """The residual stream behind `layers`, `hidden_size` wide, of the answers of a text, by their numbers in it.

    `folder` has states.bin (rows, float16 [layers, hidden]; row 0 is zeros), rows.bin (for each token of an answer its
    row) and index.bin (a record for each answer). What answers have in common at their beginning is stored once if the
    engine computed it once. An answer is there once its record is. Whoever uses the folder has locked the text that it
    belongs to. One that another head made is used where it has all `layers`; `stored` are those that it has, ascending.
    Raises CapacityError where the disk is too small.
    """

    def __init__(self, folder: Path, layers: Sequence[int], hidden_size: int) -> None:
        self.stored = _stored(folder, layers)
        self.folder = folder / ("hidden-" + "-".join(map(str, self.stored)))
        self._columns = [self.stored.index(layer) for layer in layers]
        self._shape = len(self.stored), hidden_size
        self._row_bytes = 2 * len(self.stored) * hidden_size
        self.folder.mkdir(exist_ok=True)
        self._files = {}
        for name in ("states", "rows", "index"):
            path = self.folder / f"{name}.bin"
            path.touch()
            self._files[name] = path.open("r+b")
        records = np.fromfile(self.folder / "index.bin", _INDEX)
        self._places = {int(r["answer"]): (int(r["start"]), int(r["count"])) for r in records}
        self._num_rows = self._end("states", self._row_bytes)
        self._num_tokens = self._end("rows", 4)
        self._end("index", _INDEX.itemsize)
        self._known: dict[tuple[int, bytes], int] = {}  # a block's first row, by that of the one before and its tokens
        self._unchecked = _UNCHECKED_BYTES
        try:
            if not self._num_rows:
                self._write_rows(np.zeros((1, *self._shape), np.float16))
        except CapacityError:
            self.close()
            raise

    def _end(self, name: str, size: int) -> int:
        """Go to the last whole entry of a file; gives how many there are."""
        file = self._files[name]
        count = file.seek(0, 2) // size
        file.truncate(count * size)
        file.seek(count * size)
        return count

    def __contains__(self, answer: int) -> bool:
        return answer in self._places

    @property
    def num_bytes(self) -> int:
        return self._num_rows * self._row_bytes

    def check_room(self, num_tokens: int) -> None:
        """Raise CapacityError where the states of so many more tokens do not fit."""
        needed, free = num_tokens * self._row_bytes, shutil.disk_usage(self.folder).free
        if needed > free:
            raise CapacityError(
                f"--cache-hidden needs {needed / GIB:.2f} GiB more and {free / GIB:.2f} GiB are free in {self.folder}. "
                "Leave it out: the target then computes hidden states anew in each epoch."
            )

    def add(self, answer: int, tokens: Sequence[int] | NDArray[Any], first: int, states: Tensor) -> None:
        """Keep what was computed of an answer, float16 [n, stored, hidden]: of its tokens from number `first` on; those
        before were in the engine's prefix cache, whose blocks earlier answers filled. Where one of these has not been
        added, nothing is kept. Tokens behind the last state have zeros: nothing follows them."""
        ids = np.asarray(tokens, np.uint32)
        blocks = [ids[i : i + BLOCK_SIZE].tobytes() for i in range(0, len(ids), BLOCK_SIZE)]
        rows, before = np.zeros(len(ids), np.uint32), 0
        for i, block in zip(range(0, first, BLOCK_SIZE), blocks, strict=False):
            before = self._known.get((before, block), 0)
            if not before:
                return
            rows[i:first] = np.arange(before, before + len(rows[i:first]))
        rows[first : first + len(states)] = np.arange(self._num_rows, self._num_rows + len(states))
        self._write_rows(states.numpy())
        before = 0
        whole = (first + len(states)) // BLOCK_SIZE
        for i, block in zip(range(0, whole * BLOCK_SIZE, BLOCK_SIZE), blocks, strict=False):
            before = self._known.setdefault((before, block), int(rows[i]))
        record = np.array([(answer, len(rows), self._num_tokens)], _INDEX)
        for name, content in (("rows", rows), ("index", record)):
            self._files[name].write(content.tobytes())
            self._files[name].flush()
        self._places[answer] = self._num_tokens, len(rows)
        self._num_tokens += len(rows)

    def _write_rows(self, states: NDArray[np.float16]) -> None:
        self._unchecked += states.nbytes
        if self._unchecked >= _UNCHECKED_BYTES:
            self.check_room((_LEFT_FREE_BYTES + states.nbytes) // self._row_bytes)
            self._unchecked = 0
        self._files["states"].write(states.tobytes())
        self._files["states"].flush()
        self._num_rows += len(states)

    def read(self, answer: int) -> Tensor:
        """Float32 [tokens, layers, hidden]."""
        start, count = self._places[answer]
        rows = np.memmap(self.folder / "rows.bin", np.uint32, "r", 4 * start, (count,))
        states = np.memmap(self.folder / "states.bin", np.float16, "r", shape=(self._num_rows, *self._shape))
        return torch.from_numpy(states[rows]).float()[:, self._columns]

    def states(self, target: Target, answers: Sequence[Answer]) -> list[Tensor]:
        """As `target.hidden` has them of these answers, rounded; what is not there yet is computed and added."""
        missing = [each for each in answers if each.number not in self]
        computed = target.hidden([each.tokens for each in missing], self.stored)
        for each, state in zip(missing, computed, strict=True):
            self.add(each.number, each.tokens, 0, rounded(state, torch.float16).cpu())
        return [self.read(each.number).to(target.device) for each in answers]

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> HiddenCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stored(folder: Path, layers: Sequence[int]) -> tuple[int, ...]:
    """The layers of the smallest cache in `folder` that has all these; of a new one if none has."""
    found = [tuple(map(int, path.name.split("-")[1:])) for path in folder.glob("hidden-*")]
    return min((each for each in found if set(layers) <= set(each)), key=len, default=tuple(sorted(set(layers))))
