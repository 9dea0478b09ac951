"""The other processes of a model, as the first one sees them: started, told what it computes, and watched."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from specserve import errors
from specserve.cache.storage import KVShape
from specserve.errors import EngineError, SpecserveError
from specserve.machine.lifeline import without_interrupts
from specserve.models.adapted import adapter_bytes, check_adapted
from specserve.models.decoder import Decoder
from specserve.models.loader import AnyModel, outline
from specserve.models.product import LowRank
from specserve.models.sharding import sharded, sharded_part
from specserve.models.spec import DecoderSpec
from specserve.models.stages import number_of
from specserve.ops import Ops, Peers
from specserve.parallel.blocks import BlockParts, DividedBlocks
from specserve.parallel.layout import Layout, ModelMemory
from specserve.parallel.link import Link
from specserve.parallel.messages import (
    AddWeights,
    Begin,
    Blocks,
    Command,
    Connection,
    CopySlots,
    Done,
    DropAdapter,
    Failed,
    Finish,
    HandOn,
    Load,
    LoadAdapter,
    PlaceAdapter,
    Reply,
    Run,
    Show,
    Weights,
)
from specserve.parallel.stages import FirstRunner, Pipeline
from specserve.runtime.executor import LocalExecutor, MakeMasks, StepOutput
from specserve.runtime.pack import StepInput
from specserve.runtime.runner import Runner

_log = logging.getLogger(__name__)
_END_S = 2.0
_PARTED = "A step was interrupted halfway, and the processes of the model have parted."


class Ranks:
    """The other processes of a model, of which this one is process 0. They end with this object, and with this process,
    however it ends."""

    def __init__(self, layout: Layout, spec: DecoderSpec, ops: Ops, max_rows: int, pulse: int) -> None:
        self.layout, self.spec, self._ops = layout, spec, ops
        self.num_mapped_bytes = 0  # of the others' weights, once they are loaded
        self._failure, self._has_lost = "", threading.Event()
        self._read = [SimpleQueue[bytes | None]() for _ in range(1, layout.size)]
        descriptor = os.memfd_create("specserve-ranks")
        os.ftruncate(descriptor, ModelMemory.num_bytes(layout, max_rows, spec.hidden_size))
        self._memory = ModelMemory(descriptor, layout)
        lifeline, ours = os.pipe()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        links = _links(layout)
        self._link = _link(links[0])
        try:
            for rank in range(1, layout.size):
                watched = pulse if layout.stage(rank) and layout.leads(rank) else -1  # where the first one waits
                self._start(descriptor, lifeline, watched, links[rank])
        finally:
            os.close(descriptor)
            os.close(lifeline)
            for end in (end for ends in links[1:] for end in ends):
                end.close()
            self._finalizer = weakref.finalize(self, end_ranks, self._processes, self._connections, self._link, ours)
        # All, so that nobody waits in any when one has ended.
        self._groups = [ops.peers(self._memory.group(stage), 0, layout.width) for stage in range(len(layout.stages))]

    @property
    def peers(self) -> Peers | None:
        """Those that compute each layer with this process, if there are any."""
        return self._groups[0] if self.layout.width > 1 else None

    def _start(self, descriptor: int, lifeline: int, pulse: int, link: list[socket.socket]) -> None:
        own, other = socket.socketpair()
        with other:
            ends = [end.fileno() for end in link] or [-1]
            parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
            given = [other.fileno(), descriptor, lifeline, parent, pulse, *ends]
            inherited = [each for each in (*given[:3], pulse, *ends) if each >= 0]
            command = [sys.executable, "-m", "specserve.parallel.rank", *map(str, given)]
            with without_interrupts():
                self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited))
        self._connections.append(Connection(own, Reply))

    def load(self, folder: Path, dtype: str, max_len: int | None, threads: int) -> None:
        """Let them load their parts. `dtype` as it was asked for: "auto" may be another for weights than for KV."""
        self._send_load(folder, dtype, max_len, threads)

    def _send_load(self, folder: Path, dtype: str, max_len: int | None, threads: int, port: int = 0) -> None:
        ops, layout = self._ops, self.layout
        stages = [(each.start, each.stop) for each in layout.stages]
        isa = ops.instruction_set or "auto"
        where = str(folder.resolve())
        for rank, connection in enumerate(self._connections, 1):
            device = "cpu" if ops.device.index is None else f"{ops.device.type}:{ops.device.index + rank}"
            connection.send(
                Load(rank, layout.width, stages, where, max_len, dtype, ops.quantization, threads, isa, port, device)
            )

    def kv_shapes(self) -> list[list[KVShape]]:
        """Of the layers of each, once they are loaded. Raises what loading raised there."""
        self.num_mapped_bytes = sum(reply.num_mapped_bytes for reply in self._replies())
        layout, shapes = self.layout, list[list[KVShape]]()
        for rank in range(1, layout.size):
            layers = layout.layers(rank)
            shapes.append(sharded(self.spec, layout.shard(rank)).kv_shapes[layers.start : layers.stop])
        return shapes

    def runner(
        self,
        model: AnyModel,
        ops: Ops,
        kv: list[Tensor],
        block_size: int,
        max_rows: int,
        max_logit_rows: int,
        taps: tuple[int, ...],
        top_k: int,
    ) -> Runner | FirstRunner:
        """What runs the model from this process on, made as a Runner of the layers that this process has. The others
        make theirs meanwhile: on GPUs each captures what it does with all of them."""
        assert isinstance(model, Decoder), "no other is divided"
        sizes = kv[0].shape[1] // block_size, block_size, max_rows, max_logit_rows
        adapters = model.num_adapter_slots, model.max_adapter_rank
        self.send_each([Begin(*sizes, *adapters, [*self.layout.shown(i, taps)]) for i in range(1, self.layout.size)])
        if self._link is None:
            return Runner(model, ops, kv, block_size, max_rows, max_logit_rows, taps, top_k)
        states = self._memory.states(max_rows, self.spec.hidden_size)
        pipeline = Pipeline(self.layout, 0, states, self._link)
        return FirstRunner(model, ops, kv, block_size, max_rows, max_logit_rows, taps, top_k, pipeline)

    def executor(self, local: LocalExecutor) -> ParallelExecutor:
        """For steps of all of them, of what computes this process's part."""
        self._replies()
        _watch(weakref.ref(self), self._connections)
        model, has_all = local.runner.model, len(self.layout.stages) == 1
        assert isinstance(model, Decoder), "no other is divided"
        adapted = model.adapted if has_all else outline(self.spec, self._ops).adapted
        return ParallelExecutor(local, self, self.spec, adapted)

    def _replies(self) -> list[Done]:
        """One of each."""
        replies: list[Done] = []
        for rank, connection in enumerate(self._connections, 1):
            try:
                reply = connection.receive()
            except EOFError:
                raise EngineError(f"Process {rank} of the model ended while it started.") from None
            if isinstance(reply, Failed):
                raise _error(reply, rank)
            replies.append(reply)
        return replies

    def send(self, command: Command, count: int | None = None) -> None:
        """To all of them, or the first so many; to those that have ended it is nothing, which `check` tells."""
        message = self._connections[0].encoded(command)
        for connection in self._connections[:count]:
            with suppress(OSError):
                connection.send_bytes(message)

    def send_each(self, commands: list[Command]) -> None:
        for connection, command in zip(self._connections, commands, strict=True):
            with suppress(OSError):
                connection.send(command)

    def send_adapter(self, digest: str, parts: list[dict[str, LowRank]]) -> None:
        """To each its part, layer by layer, so that steps go on meanwhile. On any thread."""
        for connection, part in zip(self._connections, parts, strict=True):
            with suppress(OSError):
                for name, weights in part.items():
                    connection.send(AddWeights(digest, name, _packed(weights)))
                connection.send(LoadAdapter(digest))

    def blocks(self) -> list[bytes]:
        """What each has read, once that is there. Raises EngineError where one has ended."""
        self.check()
        found = [each.get() for each in self._read]
        if (whole := [each for each in found if each is not None]) != found:
            self.check(is_lost=True)
        return whole

    def take_blocks(self, rank: int, data: bytes) -> None:
        """A process has read them."""
        self._read[rank - 1].put(data)

    def lost(self, why: str) -> None:
        """One has ended: nobody waits for it."""
        self._failure = self._failure or why
        self._has_lost.set()
        for each in self._read:
            each.put(None)
        for group in self._groups:
            group.leave()
        if self._link is not None:
            self._link.close()

    def check(self, is_lost: bool = False) -> None:
        """Raises EngineError where one has ended; `is_lost`: one has, whether it has been noticed or not."""
        if is_lost:
            self._has_lost.wait(_END_S)
        if is_lost or self._has_lost.is_set() or any(group.has_left for group in self._groups):
            raise EngineError(self._failure or "A process of the model has ended.")

    def close(self) -> None:
        self._finalizer()


def _links(layout: Layout) -> list[list[socket.socket]]:
    """Of each process the socket of the stage before, and those of the processes after it that it hands on to."""
    ends = [list[socket.socket]() for _ in range(layout.size)]
    if len(layout.stages) == 1:
        return ends
    after: list[tuple[int, socket.socket]] = []
    for stage in range(len(layout.stages)):
        for reader in layout.readers(stage):
            own, other = socket.socketpair()
            ends[reader].append(own)
            after.append((stage * layout.width, other))
    for rank, other in after:
        ends[rank].append(other)
    return ends


def _link(ends: list[socket.socket]) -> Link | None:
    connections = [Connection(end, HandOn) for end in ends]
    return Link(connections[0], connections[1:]) if connections else None


def end_ranks(
    processes: list[subprocess.Popen[bytes]], connections: list[Connection], link: Link | None, lifeline: int | None
) -> None:
    """Of processes on this host, and connections to any."""
    if lifeline is not None:
        os.close(lifeline)
    if link is not None:
        link.close()
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(ranks: weakref.ref[Ranks], connections: list[Connection]) -> None:
    """Each connection on a thread of its own: what comes now is what blocks hold, or an end."""

    def wait(rank: int, connection: Connection) -> None:
        try:
            while isinstance(reply := connection.receive(), Blocks) and (owner := ranks()) is not None:
                owner.take_blocks(rank, reply.data)
                del owner  # which ends where nobody else has it
            why = reply.message if isinstance(reply, Failed) else "it spoke out of turn"
        except EOFError:
            why = "it was killed, or crashed"
        if (owner := ranks()) is not None:
            owner.lost(f"Process {rank} of the model has ended: {why}.")

    for rank, connection in enumerate(connections, 1):
        threading.Thread(target=wait, args=(rank, connection), name=f"specserve-rank-{rank}", daemon=True).start()


def _error(failed: Failed, rank: int) -> SpecserveError:
    kind: Any = getattr(errors, failed.kind, EngineError)
    return kind(f"Process {rank} of the model: {failed.message}") if kind is EngineError else kind(failed.message)


class ParallelExecutor:
    """An executor whose model runs in this process and in others, each its part; `adapted` are the layers of all that
    take adapters."""

    def __init__(self, local: LocalExecutor, ranks: Ranks, spec: DecoderSpec, adapted: frozenset[str]) -> None:
        self._local, self._ranks, self._spec, self._adapted = local, ranks, spec, adapted
        self.block_size, self.num_blocks, self.row_multiple = local.block_size, local.num_blocks, local.row_multiple
        self.max_rows, self.max_logit_rows = local.max_rows, local.max_logit_rows
        num_bytes = local.storage.layers[0].itemsize
        self._blocks = DividedBlocks(BlockParts(ranks.layout, spec, local.block_size, num_bytes), local, ranks)
        self.most_under_way, self.is_asynchronous = len(ranks.layout.stages), local.is_asynchronous

    def start(self, step: StepInput) -> None:
        with self._whole():
            self._ranks.send(Run.of(step))
            self._local.start(step)

    def finish(self, masks: MakeMasks) -> StepOutput:
        with self._whole():
            if self.most_under_way > 1:
                self._ranks.send(Finish(), self._ranks.layout.width - 1)
            output = self._local.finish(masks)
        self._ranks.check()
        return output

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What is cut off in it leaves processes in different steps: none of them computes another."""
        try:
            yield
        except EOFError:
            self._ranks.check(is_lost=True)
            raise
        except KeyboardInterrupt:
            self._ranks.lost(_PARTED)
            raise

    def copy_slots(self, sources: list[int], targets: list[int]) -> None:
        self._ranks.send(CopySlots(sources, targets))
        self._local.copy_slots(sources, targets)

    def read_blocks(self, ids: Sequence[int]) -> list[bytes]:
        return self._blocks.read(ids)

    def write_blocks(self, ids: Sequence[int], data: Sequence[bytes]) -> None:
        self._blocks.write(ids, data)

    def set_outputs(self, taps: tuple[int, ...], top_k: int) -> None:
        layout, runner = self._ranks.layout, self._local.runner
        if (taps, top_k) == (runner.taps, runner.top_k):
            return
        if runner.ops.buckets:  # the others wait for what this one captures anew
            self._ranks.send(Show([]))
        elif len(layout.stages) > 1:  # all processes of a stage have alike what is shown of it
            self._ranks.send_each([Show([*layout.shown(rank, taps)]) for rank in range(1, layout.size)])
        self._local.set_outputs(taps, top_k)

    def load_adapter(self, digest: str, weights: Mapping[str, LowRank]) -> int:
        check_adapted(weights, self._adapted)
        parts = [self._part(weights, rank) for rank in range(self._ranks.layout.size)]
        self._local.load_adapter(digest, parts[0])  # and refuses what all would
        self._ranks.send_adapter(digest, parts[1:])
        return sum(adapter_bytes(part, self._local.runner.ops.dtype) for part in parts)

    def drop_adapter(self, digest: str) -> None:
        self._local.drop_adapter(digest)
        self._ranks.send(DropAdapter(digest))

    def place_adapter(self, slot: int, digest: str | None) -> None:
        self._ranks.send(PlaceAdapter(slot, digest))
        self._local.place_adapter(slot, digest)

    def abandon(self) -> None:
        self._local.abandon()
        if self.most_under_way > 1:  # else all are done with what has begun
            self._ranks.lost(_PARTED)

    def close(self) -> None:
        self._ranks.close()

    def _part(self, weights: Mapping[str, LowRank], rank: int) -> dict[str, LowRank]:
        """What a process needs of an adapter: its layers, and what belongs to none in the first stage; of these b's
        rows where the layer's are divided, a's columns where those are."""
        layout, found = self._ranks.layout, dict[str, LowRank]()
        shard, layers = layout.shard(rank), layout.layers(rank)
        for name, (a, b) in weights.items():
            if (number_of(name) or 0) not in layers:
                continue
            part = sharded_part(self._spec, f"{name}.weight", shard)
            if part is None:
                found[name] = LowRank(a, b)
            else:
                axis, own = part
                rows = slice(own.start, own.stop)
                found[name] = LowRank(a, b[rows]) if axis == 0 else LowRank(a[:, rows], b)
        return found


def _packed(weights: LowRank) -> Weights:
    a, b = (each.contiguous().numpy() for each in weights)
    return Weights((a.shape[0], a.shape[1]), a.tobytes(), (b.shape[0], b.shape[1]), b.tobytes())
