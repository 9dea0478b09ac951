"""Which part of a model each of its processes has, and which part of the memory that all of them have mapped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from specserve.models.sharding import Shard

_PLACE_BYTES = 2**22  # of what a process gives to a sum at once
_HEADER_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Layout:
    """`stages` are the layers of each, one stage after the other; `width` processes compute those of a stage together.
    The processes of the first stage come first, and process 0 is the first of these."""

    width: int
    stages: tuple[range, ...]

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.width * len(self.stages)

    def stage(self, rank: int) -> int:
        return rank // self.width

    def shard(self, rank: int) -> Shard:
        return Shard(rank % self.width, self.width)

    def layers(self, rank: int) -> range:
        return self.stages[self.stage(rank)]

    def leads(self, rank: int) -> bool:
        """Whether it is the one of its stage that hands on what all of it have alike."""
        return rank % self.width == 0

    def readers(self, stage: int) -> range:
        """The processes that read what comes out of a stage: all of the next one, and after the last of the first."""
        first = (stage + 1) % len(self.stages) * self.width
        return range(first, first + self.width)

    def shown(self, rank: int, taps: Sequence[int]) -> tuple[int, ...]:
        """The layers that a process shows the states of where these are asked for: its stage's last one besides."""
        layers = self.layers(rank)
        return tuple(sorted({layers[-1], *(each for each in taps if each in layers)})) if self.leads(rank) else ()


class ModelMemory:
    """What is mapped: for each stage a place for sums, and for each layer and each step under way one for the residual
    stream after it. As many steps are under way as there are stages. Pages that nobody writes to take no memory."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        self._mapped, self._layout = mmap.mmap(descriptor, 0), layout

    @staticmethod
    def num_bytes(layout: Layout, max_rows: int, hidden_size: int) -> int:
        groups = len(layout.stages) * _group_bytes(layout)
        num_places = len(layout.stages) * layout.stages[-1].stop
        return groups + num_places * max_rows * hidden_size * torch.float32.itemsize

    def group(self, stage: int) -> memoryview:
        """Where the processes of a stage add up."""
        size = _group_bytes(self._layout)
        return memoryview(self._mapped)[stage * size : (stage + 1) * size]

    def states(self, max_rows: int, hidden_size: int) -> Callable[[int, int], Tensor]:
        """What finds the residual stream after a layer in the step of that number, float32 [max_rows, hidden]."""
        mapped, layout, count = self._mapped, self._layout, max_rows * hidden_size
        first = len(layout.stages) * _group_bytes(layout)

        @cache
        def place(number: int) -> Tensor:
            start = first + number * count * torch.float32.itemsize
            found = torch.frombuffer(mapped, dtype=torch.float32, count=count, offset=start)
            return found.view(max_rows, hidden_size)

        return lambda layer, step: place(step % len(layout.stages) * layout.stages[-1].stop + layer)


def private_memory(layout: Layout) -> int:
    """A descriptor of memory as large as that of a ModelMemory of one stage, for a process that shares none. The caller
    closes it."""
    descriptor = os.memfd_create("specserve-rank")
    os.ftruncate(descriptor, _group_bytes(layout))
    return descriptor


def _group_bytes(layout: Layout) -> int:
    return _HEADER_BYTES + 2 * layout.width * _PLACE_BYTES
