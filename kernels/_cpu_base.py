"""What all ops of the native kernels share: a thread pool, the program or recording that an op goes into, and the
buffers of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import TypeVar

import torch
from torch import Tensor

import specserve.kernels._native as _native
from specserve.kernels._cpu_cache import zeros
from specserve.kernels._cpu_pieces import Pieces
from specserve.kernels._cpu_recording import Recorded, Recording
from specserve.kernels._cpu_rows import pad
from specserve.kernels._cpu_weights import FORMATS, GROUP, INT8
from specserve.machine.pulse import Pulse
from specserve.ops import Input, T
from specserve.ops.isa import choose_isa
from specserve.ops.pieces import Memory

R = TypeVar("R", Recording, Pieces)

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "relu": 2, "gelu": 3}  # as Nonlinear in kernels/cpu/args.h


@dataclass(frozen=True, slots=True)
class Activation:
    """Rows for a linear layer; `float` are the numbers themselves where they are not quantised."""

    native: _native.Activation
    parts: tuple[Tensor, ...]  # numbers [rows, width], and for integers scales and sums [rows, width / 32]
    width: int  # not padded

    @property
    def rows(self) -> int:
        return len(self.parts[0])


def instruction_sets() -> list[str]:
    """Those that this processor and this build have, the fastest first."""
    return _native.instruction_sets()


class Base:
    """Kernels on a CPU. `dtype` is that of the embeddings, and of weights and KV cache that have no other."""

    name = "cpu"

    def __init__(
        self, dtype: torch.dtype, quantization: str, threads: int, isa: str = "auto", kv: torch.dtype | None = None
    ) -> None:
        self.dtype, self.weight_dtype, self.kv_dtype = dtype, dtype, kv or dtype
        self.quantization = quantization
        self.instruction_set = choose_isa(isa, instruction_sets(), self.name)
        unquantised = "bfloat16" if dtype == torch.bfloat16 else "float32"
        self._format = FORMATS[unquantised if quantization == "none" else quantization]
        self._kind = min(self._format, INT8)
        self._thread_pool = _native.ThreadPool(threads)
        self._verifier = _native.Verifier(self._thread_pool, self.instruction_set)
        self._recordings: dict[int, Recording | Pieces] = {}  # by thread

    @property
    def _recording(self) -> Recording | Pieces | None:
        return self._recordings.get(get_ident())

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        with self._into(Recording(self._thread_pool, self.instruction_set)) as recording:
            yield recording

    @contextmanager
    def pieces(self, memory: Memory) -> Iterator[Pieces]:
        with self._into(Pieces(self._thread_pool, self.instruction_set, memory)) as pieces:
            yield pieces

    @contextmanager
    def _into(self, recording: R) -> Iterator[R]:
        assert self._recording is None, "one recording at a time"
        self._recordings[get_ident()] = recording
        try:
            yield recording
        finally:
            del self._recordings[get_ident()]

    def record(
        self, function: Callable[..., T], inputs: Sequence[Input], num_rows: int, num_gathered: int, plan: object
    ) -> Recorded[T]:
        own = []
        for each in inputs:
            rows = num_gathered if each.is_gathered else num_rows
            own.append(self.input_rows(rows, each.columns) if each.columns else torch.zeros(rows, dtype=each.dtype))
        with self.recording() as recording:
            found = function(None, *own)
        return Recorded(recording, found, [each.numpy() for each in own])

    def input_rows(self, rows: int, columns: int) -> Tensor:
        memory: Tensor = zeros((rows, pad(columns)), torch.float32)
        return memory[:, :columns]

    def watch(self, pulse: Pulse) -> None:
        self._pulse = pulse  # keeps the memory
        self._thread_pool.set_pulse(pulse.address)

    @contextmanager
    def _program(
        self, rows: int, *uses: object, gathered: int = 0, plan: _native.Plan | None = None
    ) -> Iterator[_native.Program]:
        """Where an op goes: into the recording, or into a program of its own that runs at once. It points into `uses`,
        which live as long."""
        if self._recording is not None:
            yield self._recording.note(rows, gathered, uses, plan is not None)
            return
        program = _native.Program(self._thread_pool, self.instruction_set)
        yield program
        program.run(rows, gathered, plan)

    def _buffer(self, op: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Zeros [rows, columns], or what an op of a recording left in them."""
        make: Callable[[], Tensor] = partial(zeros, (rows, columns), dtype)
        return make() if self._recording is None else self._recording.buffer((op, rows, columns, dtype), make)

    def _floats(self, op: str, rows: int, columns: int) -> Tensor:
        return self._buffer(op, rows, pad(columns), torch.float32)

    def _activation(self, op: str, rows: int, width: int, kind: int) -> Activation:
        columns = pad(width)
        dtype = (torch.float32, torch.bfloat16, torch.int8)[kind]
        parts = [self._buffer(op, rows, columns, dtype)]
        if kind == INT8:
            parts.append(self._buffer(f"{op} scales", rows, columns // GROUP, torch.float32))
            parts.append(self._buffer(f"{op} sums", rows, columns // GROUP, torch.int32))
        addresses = [part.data_ptr() for part in parts] + [0] * (3 - len(parts))
        return Activation(_native.activation(kind, width, *addresses), tuple(parts), width)
