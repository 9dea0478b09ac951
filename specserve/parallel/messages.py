"""What the first process of a model tells the others, and what they say while they start. A connection is a socket pair
that only they have."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from specserve.ops import AttentionRows
from specserve.runtime.pack import StepInput

_LENGTH = struct.Struct("<Q")


class Load(msgspec.Struct, tag="load", array_like=True):
    """Load this part of the model in `folder`; width and stages are those of a Layout."""

    rank: int
    width: int
    stages: list[tuple[int, int]]  # the first layer of each, and the first after it
    folder: str
    max_len: int | None
    dtype: str
    quantization: str
    threads: int
    isa: str
    port: int = 0  # where processes on several hosts meet
    device: str = "cpu"


class Begin(msgspec.Struct, tag="begin", array_like=True):
    """Make a KV cache of so many blocks; steps come from now on."""

    num_blocks: int
    block_size: int
    max_rows: int
    max_logit_rows: int
    num_adapters: int
    max_lora_rank: int
    shown: list[int]  # layers, as in Show


class Show(msgspec.Struct, tag="show", array_like=True):
    """Hand on the residual stream after these layers with every step from now on."""

    layers: list[int]


class Run(msgspec.Struct, tag="run", array_like=True):
    """A step: StepInput without what is sampled."""

    tokens: bytes
    positions: bytes
    logit_rows: bytes
    num_rows: int
    starts: bytes
    cached: bytes
    tables: bytes
    parents: bytes
    adapters: bytes | None

    @classmethod
    def of(cls, step: StepInput) -> Run:
        rows = step.rows
        return cls(
            step.token_ids.tobytes(),
            step.positions.tobytes(),
            step.logit_rows.tobytes(),
            rows.num_rows,
            rows.query_starts.tobytes(),
            rows.cached.tobytes(),
            rows.block_tables.tobytes(),
            rows.parents.tobytes(),
            None if step.adapters is None else step.adapters.tobytes(),
        )

    def step(self) -> StepInput:
        cached = _int32(self.cached)
        return StepInput(
            token_ids=_int64(self.tokens),
            positions=_int64(self.positions),
            logit_rows=_int64(self.logit_rows),
            rows=AttentionRows(
                self.num_rows,
                _int32(self.starts),
                cached,
                _int32(self.tables).reshape(len(cached), -1),
                _int32(self.parents),
            ),
            adapters=None if self.adapters is None else _int64(self.adapters),
        )


class Finish(msgspec.Struct, tag="finish", array_like=True):
    """To the first stage, where there are others: compute what comes after all stages of the oldest step under
    way."""


class CopySlots(msgspec.Struct, tag="copy", array_like=True):
    sources: list[int]
    targets: list[int]


class ReadBlocks(msgspec.Struct, tag="read_blocks", array_like=True):
    """Say what these blocks hold, with Blocks."""

    ids: list[int]


class WriteBlocks(msgspec.Struct, tag="write_blocks", array_like=True):
    """Let these blocks hold that, one after the other."""

    ids: list[int]
    data: bytes


class Weights(msgspec.Struct, array_like=True):
    """A LowRank, float32."""

    shape_a: tuple[int, int]
    a: bytes
    shape_b: tuple[int, int]
    b: bytes


class AddWeights(msgspec.Struct, tag="add_weights", array_like=True):
    """The adapter that is loaded next under that name has these for a layer."""

    digest: str
    layer: str
    weights: Weights


class LoadAdapter(msgspec.Struct, tag="load_adapter", array_like=True):
    digest: str


class DropAdapter(msgspec.Struct, tag="drop_adapter", array_like=True):
    digest: str


class PlaceAdapter(msgspec.Struct, tag="place_adapter", array_like=True):
    slot: int
    digest: str | None


class Done(msgspec.Struct, tag="done"):
    """It is loaded, or has begun. The bytes are those of weights that are mapped from a file."""

    num_mapped_bytes: int = 0


class Blocks(msgspec.Struct, tag="blocks"):
    """What ReadBlocks asked for, one block after the other."""

    data: bytes


class HandOn(msgspec.Struct, tag="hand_on"):
    """From one stage to the next: a step's states are there. `broken` are rows whose KV is not what the model
    computed, in any stage so far; `seconds` is what the stages after the first took."""

    broken: list[int]
    seconds: float = 0.0


class Failed(msgspec.Struct, tag="failed"):
    """Why it ends; `kind` is the name of the error's class."""

    kind: str
    message: str


Command = (
    Load
    | Begin
    | Show
    | Run
    | Finish
    | CopySlots
    | ReadBlocks
    | WriteBlocks
    | AddWeights
    | LoadAdapter
    | DropAdapter
    | PlaceAdapter
)
Reply = Done | Blocks | Failed


class Connection:
    """One end. Messages may be sent on any thread; one thread reads."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self._end = end
        self._decode, self._encode = msgspec.msgpack.Decoder(kind).decode, msgspec.msgpack.Encoder().encode
        self._sending = threading.Lock()

    def send(self, message: Command | Reply | HandOn) -> None:
        """Raises OSError where nobody reads."""
        self.send_bytes(self.encoded(message))

    def encoded(self, message: Command | Reply | HandOn) -> bytes:
        return self._encode(message)

    def send_bytes(self, message: bytes) -> None:
        with self._sending:
            self._write(message)

    def _write(self, message: bytes) -> None:
        self._end.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> Any:
        """Waits. Raises EOFError where nothing will come any more."""
        return self._decode(self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0]))

    def _read(self, count: int) -> bytes:
        found = bytearray(count)
        rest = memoryview(found)
        while rest:
            try:
                read = self._end.recv_into(rest, 0, socket.MSG_WAITALL)
            except OSError:  # closed here
                read = 0
            if not read:
                raise EOFError("The other end is closed.")
            rest = rest[read:]
        return bytes(found)

    @property
    def own_host(self) -> str:
        """The address of this host on the way to the other one."""
        host: str = self._end.getsockname()[0]
        return host

    def close(self) -> None:
        """Whoever reads finds the end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def _int64(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int64)


def _int32(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, np.int32)
