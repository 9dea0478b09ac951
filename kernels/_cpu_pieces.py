"""Ops of the native kernels as programs that run one by one, each followed by what others compute."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

import specserve.kernels._native as _native
from specserve.ops.pieces import Memory


@dataclass(slots=True)
class Piece:
    """Ops of as many rows."""

    program: _native.Program
    rows: int
    reads_plan: bool = False
    used: list[Tensor] = field(default_factory=list)  # what else the program points into

    def run(self, plan: _native.Plan | None) -> None:
        self.program.run(self.rows, 0, plan if self.reads_plan else None)


class Pieces:
    """In the place of a recording. Its programs point into `memory`, and into what their caller keeps."""

    def __init__(self, pool: _native.ThreadPool, instruction_set: str, memory: Memory) -> None:
        self._pool, self._instruction_set, self._memory = pool, instruction_set, memory
        self._noted: list[Piece] = []

    def note(self, rows: int, gathered: int, uses: tuple[object, ...], has_plan: bool) -> _native.Program:
        """Where an op goes."""
        assert not gathered, "rows are gathered by others"
        if not self._noted or self._noted[-1].rows != rows:
            self._noted.append(Piece(_native.Program(self._pool, self._instruction_set), rows))
        piece = self._noted[-1]
        piece.reads_plan |= has_plan
        piece.used += [use for use in uses if isinstance(use, Tensor) and self._memory.base(use) is None]
        return piece.program

    def buffer(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        return self._memory.take(key, make)

    def take(self) -> list[Piece]:
        noted, self._noted = self._noted, []
        return noted
