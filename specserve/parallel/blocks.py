"""Whole blocks of KV from the parts that the processes of a model have of them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specserve.models.spec import DecoderSpec
from specserve.parallel.layout import Layout
from specserve.parallel.messages import Command, ReadBlocks, WriteBlocks

Bytes = NDArray[np.uint8]  # [blocks, bytes of each]
_AT_ONCE_BYTES = 2**25  # that are read or written, about


class Local(Protocol):
    """The first process's part, as an Executor."""

    def read_blocks(self, ids: Sequence[int]) -> list[bytes]: ...
    def write_blocks(self, ids: Sequence[int], data: Sequence[bytes]) -> None: ...


class Others(Protocol):
    """The other processes of the model."""

    def send(self, command: Command) -> None: ...
    def send_each(self, commands: list[Command]) -> None: ...
    def blocks(self) -> list[bytes]:
        """What each has read, once that is there. Raises EngineError where one has ended."""


class DividedBlocks:
    """Reads and writes whole blocks of a model in several processes, between steps."""

    def __init__(self, parts: BlockParts, local: Local, others: Others) -> None:
        self._parts, self._local, self._others = parts, local, others

    def read(self, ids: Sequence[int]) -> list[bytes]:
        """As Executor.read_blocks. Raises EngineError where a process has ended."""
        found: list[bytes] = []
        for some in self._pieces(len(ids)):
            here = list(ids[some])
            self._others.send(ReadBlocks(here))
            parts = [b"".join(self._local.read_blocks(here)), *self._others.blocks()]
            found += [row.tobytes() for row in self._parts.join([_rows(part, len(here)) for part in parts])]
        return found

    def write(self, ids: Sequence[int], data: Sequence[bytes]) -> None:
        """As Executor.write_blocks, of the target's layers at least."""
        for some in self._pieces(len(ids)):
            here, blocks = list(ids[some]), _rows(b"".join(data[some]), len(ids[some]))
            own, *others = (self._parts.divide(blocks, rank) for rank in range(self._parts.num_processes))
            self._others.send_each([WriteBlocks(here, part.tobytes()) for part in others])
            self._local.write_blocks(here, [own.tobytes()])  # which it joins

    def _pieces(self, count: int) -> Iterator[slice]:
        size = max(1, _AT_ONCE_BYTES // self._parts.whole_bytes)
        return (slice(start, min(count, start + size)) for start in range(0, count, size))


def _rows(data: bytes, count: int) -> Bytes:
    return np.frombuffer(data, np.uint8).reshape(count, -1)


class BlockParts:
    """Of blocks as Executor.read_blocks has them: a process has the layers of its stage, and of each of these some of
    the heads. `spec` is the whole model's; what comes after its layers, a drafter's, has the first process alone."""

    def __init__(self, layout: Layout, spec: DecoderSpec, block_size: int, num_bytes: int) -> None:
        """`num_bytes` are those of a number."""
        self._layout, self._shapes = layout, spec.kv_shapes
        self._heads = [
            [layout.shard(rank).heads(each.attention)[1] for each in spec.layers] for rank in range(layout.size)
        ]
        self._rows, self._num_bytes = 2 * block_size, num_bytes
        self.num_processes = layout.size
        self.whole_bytes = sum(self._layer_bytes(layer, shape.num_kv_heads) for layer, shape in enumerate(self._shapes))

    def join(self, parts: Sequence[Bytes]) -> Bytes:
        """What the processes have read, in their order, as whole blocks."""
        own = sum(self._layer_bytes(layer, len(self._heads[0][layer])) for layer in self._layout.layers(0))
        drafted = parts[0][:, own:]
        found = np.empty((len(drafted), self.whole_bytes + drafted.shape[1]), np.uint8)
        found[:, self.whole_bytes :] = drafted
        for rank, part in enumerate(parts):
            for whole, own_part in self._layers(rank, found, part):
                whole[...] = own_part
        return found

    def divide(self, blocks: Bytes, rank: int) -> Bytes:
        """What a process writes of whole blocks."""
        layers, drafted = self._layout.layers(rank), blocks[:, self.whole_bytes :]
        own = sum(self._layer_bytes(layer, len(self._heads[rank][layer])) for layer in layers)
        found = np.empty((len(blocks), own + (0 if rank else drafted.shape[1])), np.uint8)
        for whole, part in self._layers(rank, blocks, found):
            part[...] = whole
        if not rank:
            found[:, own:] = drafted
        return found

    def _layers(self, rank: int, blocks: Bytes, part: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
        """Of each layer of a process what is its own in whole blocks, and the same in its part, as views."""
        start = sum(self._layer_bytes(i, self._shapes[i].num_kv_heads) for i in range(self._layout.layers(rank)[0]))
        own_start = 0
        for layer in self._layout.layers(rank):
            heads, shape = self._heads[rank][layer], self._shapes[layer]
            stop = start + self._layer_bytes(layer, shape.num_kv_heads)
            own_stop = own_start + self._layer_bytes(layer, len(heads))
            whole = blocks[:, start:stop].reshape(len(blocks), self._rows, shape.num_kv_heads, -1)
            own = part[:, own_start:own_stop].reshape(len(part), self._rows, len(heads), -1)
            yield whole[:, :, heads.start : heads.stop], own
            start, own_start = stop, own_stop

    def _layer_bytes(self, layer: int, num_heads: int) -> int:
        """Of a block, of so many heads."""
        return self._rows * num_heads * self._shapes[layer].head_dim * self._num_bytes
