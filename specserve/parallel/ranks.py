"""The other processes of a model, as the first one sees them: started, told what it computes, and watched."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from specserve import errors
from specserve.cache.storage import KVShape
from specserve.errors import ConfigError, EngineError, SpecserveError
from specserve.machine.lifeline import without_interrupts
from specserve.models.loader import native_spec
from specserve.models.product import LowRank
from specserve.models.sharding import Shard, sharded, sharded_part
from specserve.models.spec import DecoderSpec
from specserve.ops import Ops, Peers
from specserve.parallel.messages import (
    Begin,
    Command,
    Connection,
    CopySlots,
    DropAdapter,
    Failed,
    Load,
    LoadAdapter,
    PlaceAdapter,
    Reply,
    Run,
    Weights,
)
from specserve.runtime.executor import LocalExecutor, MakeMasks, StepOutput
from specserve.runtime.pack import StepInput

_log = logging.getLogger(__name__)
_PLACE_BYTES = 2**22  # of what a process gives to a sum at once
_HEADER_BYTES = 2**16
_END_S = 2.0
_NO_BLOCKS = "KV is read from, and written to, models in one process alone: leave out --tensor-parallel-size."


class Ranks:
    """Processes 1 to `size` - 1 of a model, of which this one is process 0. They end with this object, and with this
    process, however it ends."""

    @classmethod
    def started(cls, size: int, folder: Path, ops: Ops, max_len: int | None, threads: int) -> Ranks | None:
        """Of a model in so many processes, which load their parts while this one loads its own; None: it has no others.
        Raises ConfigError for a model, or for kernels, that cannot be divided so."""
        if size == 1:
            return None
        spec = native_spec(folder)
        for rank in range(size):
            sharded(spec, Shard(rank, size))
        ranks = cls(size, spec)
        try:
            ranks.load(folder, ops, max_len, threads)
        except BaseException:
            ranks.close()
            raise
        return ranks

    def __init__(self, size: int, spec: DecoderSpec) -> None:
        self.size, self._spec = size, spec
        self.peers: Peers | None = None
        self._failure = ""
        descriptor = os.memfd_create("specserve-ranks")
        os.ftruncate(descriptor, _HEADER_BYTES + 2 * size * _PLACE_BYTES)
        self.memory = mmap.mmap(descriptor, 0)
        lifeline, ours = os.pipe()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(1, size):
                self._start(descriptor, lifeline)
        finally:
            os.close(descriptor)
            os.close(lifeline)
            self._finalizer = weakref.finalize(self, _end, self._processes, self._connections, ours)

    def _start(self, descriptor: int, lifeline: int) -> None:
        own, other = socket.socketpair()
        with other:
            inherited = other.fileno(), descriptor, lifeline
            parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
            command = [sys.executable, "-m", "specserve.parallel.rank", *map(str, [*inherited, parent])]
            with without_interrupts():
                self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited))
        self._connections.append(Connection(own, Reply))

    def load(self, folder: Path, ops: Ops, max_len: int | None, threads: int) -> None:
        self.peers = ops.peers(self.memory, 0, self.size)
        for rank, connection in enumerate(self._connections, 1):
            dtype = str(ops.dtype).removeprefix("torch.")
            isa = ops.instruction_set or "auto"
            where = str(folder.resolve())
            connection.send(Load(rank, self.size, where, max_len, dtype, ops.quantization, threads, isa))

    def kv_shapes(self) -> list[KVShape]:
        """Of all their layers, once they are loaded. Raises what loading raised there."""
        self._wait()
        specs = [sharded(self._spec, Shard(rank, self.size)) for rank in range(1, self.size)]
        return [shape for spec in specs for shape in spec.kv_shapes]

    def executor(self, local: LocalExecutor, num_adapters: int, max_lora_rank: int) -> ParallelExecutor:
        """For steps of all of them, of what computes this process's part."""
        rows = local.max_rows, local.max_logit_rows
        self.send(Begin(local.num_blocks, local.block_size, *rows, num_adapters, max_lora_rank))
        self._wait()
        _watch(weakref.ref(self), self._connections)
        return ParallelExecutor(local, self, self._spec)

    def _wait(self) -> None:
        for rank, connection in enumerate(self._connections, 1):
            try:
                reply = connection.receive()
            except EOFError:
                raise EngineError(f"Process {rank} of the model ended while it started.") from None
            if isinstance(reply, Failed):
                raise _error(reply, rank)

    def send(self, command: Command) -> None:
        """To all of them; to those that have ended it is nothing, which `check` tells."""
        message = self._connections[0].encoded(command)
        for connection in self._connections:
            with suppress(OSError):
                connection.send_bytes(message)

    def send_each(self, commands: list[Command]) -> None:
        for connection, command in zip(self._connections, commands, strict=True):
            with suppress(OSError):
                connection.send(command)

    def lost(self, why: str) -> None:
        """One has ended: nobody waits for it."""
        self._failure = self._failure or why
        if self.peers is not None:
            self.peers.leave()

    def check(self) -> None:
        """Raises EngineError where one has ended."""
        if self.peers is not None and self.peers.has_left:
            raise EngineError(self._failure or "A process of the model has ended.")

    def close(self) -> None:
        self._finalizer()


def _end(processes: list[subprocess.Popen[bytes]], connections: list[Connection], lifeline: int) -> None:
    os.close(lifeline)
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(ranks: weakref.ref[Ranks], connections: list[Connection]) -> None:
    """Each connection on a thread of its own: what comes now is an end."""

    def wait(rank: int, connection: Connection) -> None:
        try:
            reply = connection.receive()
            why = reply.message if isinstance(reply, Failed) else "it spoke out of turn"
        except (EOFError, ValueError):  # ValueError: closed here
            why = "it was killed, or crashed"
        if (owner := ranks()) is not None:
            owner.lost(f"Process {rank} of the model has ended: {why}.")

    for rank, connection in enumerate(connections, 1):
        threading.Thread(target=wait, args=(rank, connection), name=f"specserve-rank-{rank}", daemon=True).start()


def _error(failed: Failed, rank: int) -> SpecserveError:
    kind: Any = getattr(errors, failed.kind, EngineError)
    return kind(f"Process {rank} of the model: {failed.message}") if kind is EngineError else kind(failed.message)


class ParallelExecutor:
    """An executor whose model runs in this process and in others, each its part of every layer."""

    def __init__(self, local: LocalExecutor, ranks: Ranks, spec: DecoderSpec) -> None:
        self._local, self._ranks, self._spec = local, ranks, spec
        self.block_size, self.num_blocks, self.row_multiple = local.block_size, local.num_blocks, local.row_multiple
        self.max_rows, self.max_logit_rows = local.max_rows, local.max_logit_rows

    def start(self, step: StepInput) -> None:
        self._ranks.send(Run.of(step))
        self._local.start(step)

    def finish(self, masks: MakeMasks) -> StepOutput:
        output = self._local.finish(masks)
        self._ranks.check()
        return output

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        self._ranks.send(CopySlots(sources, targets))
        self._local.copy_slots(sources, targets)

    def read_blocks(self, ids: Sequence[int]) -> list[bytes]:
        raise ConfigError(_NO_BLOCKS)

    def write_blocks(self, ids: Sequence[int], data: Sequence[bytes]) -> None:
        raise ConfigError(_NO_BLOCKS)

    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None:
        self._local.set_outputs(taps, top_k)  # of what all processes have alike

    def load_adapter(self, digest: str, weights: Mapping[str, LowRank]) -> int:
        parts = [self._part(weights, Shard(rank, self._ranks.size)) for rank in range(self._ranks.size)]
        num_bytes = self._local.load_adapter(digest, parts[0])  # and refuses what all would
        self._ranks.send_each([LoadAdapter(digest, _packed(part)) for part in parts[1:]])
        return num_bytes * sum(map(_size, parts)) // max(_size(parts[0]), 1)

    def drop_adapter(self, digest: str) -> None:
        self._local.drop_adapter(digest)
        self._ranks.send(DropAdapter(digest))

    def place_adapter(self, slot: int, digest: str | None) -> None:
        self._ranks.send(PlaceAdapter(slot, digest))
        self._local.place_adapter(slot, digest)

    def _part(self, weights: Mapping[str, LowRank], shard: Shard) -> dict[str, LowRank]:
        """What a process needs of an adapter: b's rows where the layer's are divided, a's columns where those are."""
        found = {}
        for name, (a, b) in weights.items():
            part = sharded_part(self._spec, f"{name}.weight", shard)
            if part is None:
                found[name] = LowRank(a, b)
            else:
                axis, own = part
                rows = slice(own.start, own.stop)
                found[name] = LowRank(a, b[rows]) if axis == 0 else LowRank(a[:, rows], b)
        return found


def _size(weights: Mapping[str, LowRank]) -> int:
    return sum(each.a.numel() + each.b.numel() for each in weights.values())


def _packed(weights: Mapping[str, LowRank]) -> dict[str, Weights]:
    return {
        name: Weights(
            (each.a.shape[0], each.a.shape[1]),
            each.a.contiguous().numpy().tobytes(),
            (each.b.shape[0], each.b.shape[1]),
            each.b.contiguous().numpy().tobytes(),
        )
        for name, each in weights.items()
    }
