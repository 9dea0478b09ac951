"""Ops of the native kernels, recorded as a program that runs without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from numpy.typing import NDArray
from torch import Tensor

import specserve.kernels._native as _native
from specserve.ops import T


class Recording:
    """A program and the tensors it works on."""

    def __init__(self, team: _native.ThreadPool, instruction_set: str) -> None:
        self.program = _native.Program(team, instruction_set)
        self.buffers: dict[tuple[str, int, int, torch.dtype], Tensor] = {}
        self.used: list[object] = []  # what else the program points into
        self.has_adapters: dict[int, Tensor] = {}  # by the address of rows' slots: whether a row has any, int64 [1]

    def note(self, rows: int, gathered: int, uses: tuple[object, ...], has_plan: bool) -> _native.Program:
        """Where an op goes that points into `uses`."""
        self.used.extend(uses)
        return self.program

    def buffer(self, key: tuple[str, int, int, torch.dtype], make: Callable[[], Tensor]) -> Tensor:
        """One for each op and shape: no op's result outlives its next."""
        if key not in self.buffers:
            self.buffers[key] = make()
        return self.buffers[key]

    def start(self, num_rows: int, num_gathered: int, plan: _native.Plan | None) -> None:
        self.program.start(num_rows, num_gathered, plan)

    def finish(self) -> None:
        self.program.finish()

    @property
    def num_ops(self) -> int:
        return len(self.program.names())

    def profile(self, num_rows: int, num_gathered: int, plan: _native.Plan | None) -> list[tuple[str, float]]:
        """As run; the name of each op in order, and the seconds it took with waiting for its last thread."""
        seconds = self.program.profile(num_rows, num_gathered, plan)
        return list(zip(self.program.names(), seconds, strict=True))


@dataclass(frozen=True, slots=True)
class Recorded(Generic[T]):
    """What a function does with inputs of its own, which have all rows that it will ever need."""

    recording: Recording
    found: T
    inputs: list[NDArray[Any]]

    def takes(self, plan: object) -> bool:
        return True

    def fill(self, inputs: Sequence[NDArray[Any] | Tensor]) -> None:
        for own, given in zip(self.inputs, inputs, strict=True):
            own[: len(given)] = given.numpy() if isinstance(given, Tensor) else given

    def start(self, num_rows: int, num_gathered: int, plan: _native.Plan | None) -> None:
        self.recording.start(num_rows, num_gathered, plan)

    def finish(self) -> None:
        self.recording.finish()
