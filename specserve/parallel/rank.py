"""One of the processes of a model, but the first: it computes its part of each step, as it is told.

    python -m specserve.parallel.rank SOCKET MEMORY LIFELINE PARENT PULSE BEFORE [AFTER ...]

SOCKET is where commands come from, MEMORY what all processes of the model share, and LIFELINE a pipe that nobody writes
to: when its other end is closed the first process has ended, and this one does. PARENT is its id where its main thread
has started this one, and 0 else: then it ends with that even while it is stopped. PULSE is what a Pulse counts in for
whoever watches the first process, or -1; BEFORE and AFTER are the sockets of a Link, or -1 where there is one stage.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from specserve.cache.storage import KVStorage
from specserve.errors import SpecserveError
from specserve.machine.lifeline import end_with
from specserve.machine.pulse import Pulse
from specserve.models.adapted import PackedAdapter
from specserve.models.decoder import Decoder
from specserve.models.loader import load_model, load_stage
from specserve.models.product import LowRank
from specserve.models.stages import LaterStage
from specserve.ops import Ops, Peers
from specserve.ops.blocks import read_blocks, write_blocks
from specserve.ops.choice import choose_ops
from specserve.ops.peers import Gather
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
    ReadBlocks,
    Run,
    Show,
    Weights,
    WriteBlocks,
)
from specserve.parallel.stages import FirstRunner, LaterRunner, Pipeline, StageRunner
from specserve.runtime.pack import StepInput
from specserve.runtime.runner import Runner


class Rank:
    """A process's part of a model: some of its layers, or some of what each of these is, which it computes with
    `peers`."""

    def __init__(self, load: Load, memory: int, pulse: Pulse, link: Link | None, gather: Gather | None = None) -> None:
        self._layout = Layout(load.width, tuple(range(*each) for each in load.stages))
        self._rank, self._memory, self._link = load.rank, ModelMemory(memory, self._layout), link
        device = torch.device(load.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._ops: Ops = choose_ops(device, load.dtype, load.quantization, load.threads, load.isa)
        self._ops.watch(pulse)
        self.peers: Peers | None = None
        if load.width > 1:
            group = self._memory.group(self._layout.stage(load.rank))
            self.peers = self._ops.peers(group, self._layout.shard(load.rank).rank, load.width, gather)
        self._layers = layers = self._layout.layers(load.rank)
        folder = Path(load.folder)
        if layers.start:
            self._model: Decoder | LaterStage = load_stage(folder, self._ops, load.max_len, self.peers, layers)
        else:
            model = load_model(folder, self._ops, load.max_len, peers=self.peers, layers=layers)
            assert isinstance(model, Decoder), "the first process looked"
            self._model = model
        self._coming: defaultdict[str, dict[str, LowRank]] = defaultdict(dict)  # parts of adapters, by digest
        self._adapters: dict[str, Future[PackedAdapter]] = {}
        self._num_loads: Counter[str] = Counter()
        self._packing = ThreadPoolExecutor(1, "specserve-adapters")

    def begin(self, begin: Begin) -> None:
        if begin.num_adapters:
            self._model.hold_adapters(begin.num_adapters, begin.max_lora_rank)
        ops, shapes = self._ops, self._model.spec.kv_shapes[self._layers.start : self._layers.stop]
        self._storage = KVStorage(shapes, begin.num_blocks, begin.block_size, ops.kv_dtype, ops.device, ops.copy_kv)
        self._runner = self._made_runner(begin)

    def _made_runner(self, begin: Begin) -> Runner | FirstRunner | LaterRunner:
        model, ops, kv, rows = self._model, self._ops, self._storage.layers, begin.max_rows
        if self._link is None:
            assert isinstance(model, Decoder), "one stage has all layers"
            return Runner(model, ops, kv, begin.block_size, rows, begin.max_logit_rows)
        states = self._memory.states(rows, model.spec.hidden_size)
        pipeline = Pipeline(self._layout, self._rank, states, self._link)
        if isinstance(model, Decoder):
            return FirstRunner(model, ops, kv, begin.block_size, rows, begin.max_logit_rows, (), 0, pipeline)
        return LaterRunner(StageRunner(model, ops, kv, begin.block_size, rows, tuple(begin.shown), states), pipeline)

    def obey(self, command: Command) -> Blocks | None:
        """Returns what the first process asked for."""
        match command:
            case Run():
                self._run(command.step())
            case Finish():
                assert isinstance(self._runner, FirstRunner), "others are done with a step when they have run it"
                self._runner.finish()
            case Show():
                if isinstance(self._runner, Runner):
                    self._runner.capture()  # as the first process does, which waits for it
                else:
                    self._runner.show(tuple(command.layers))
            case CopySlots():
                self._storage.copy_slots(command.sources, command.targets)
            case ReadBlocks():
                storage = self._storage
                return Blocks(b"".join(read_blocks(self._ops, storage.layers, storage.block_size, command.ids)))
            case WriteBlocks():
                storage, data = self._storage, [command.data]  # which it joins
                write_blocks(self._ops, storage.layers, storage.block_size, command.ids, data)
            case AddWeights():
                self._coming[command.digest][command.layer] = _low_rank(command.weights)
            case LoadAdapter():
                weights = self._coming.pop(command.digest, {})
                self._num_loads[command.digest] += 1
                self._adapters[command.digest] = self._packing.submit(self._model.pack_adapter, weights)
            case DropAdapter():
                self._num_loads[command.digest] -= 1
                if not self._num_loads[command.digest]:
                    del self._adapters[command.digest], self._num_loads[command.digest]
            case PlaceAdapter():
                packed = None if command.digest is None else self._adapters[command.digest].result()
                self._model.place_adapter(command.slot, packed)
        return None

    def _run(self, step: StepInput) -> None:
        """All of its part, or what it computes before other stages."""
        if isinstance(self._runner, LaterRunner):
            self._runner.run(step)
            return
        self._runner.start(step)
        if isinstance(self._runner, Runner):
            self._runner.finish()

    @property
    def num_mapped_bytes(self) -> int:
        return self._model.num_mapped_bytes


def _low_rank(weights: Weights) -> LowRank:
    a, b = ((weights.a, weights.shape_a), (weights.b, weights.shape_b))
    return LowRank(*(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape) for data, shape in (a, b)))


def serve(connection: Connection, make: Callable[[Load], Rank]) -> None:
    """Until the first process has ended, or something went wrong, which it is told and then ends with."""
    rank: Rank | None = None
    try:
        rank = make(connection.receive())
        connection.send(Done(rank.num_mapped_bytes))
        rank.begin(connection.receive())
        connection.send(Done())
        while True:
            command = connection.receive()
            try:
                if (found := rank.obey(command)) is not None:
                    with suppress(OSError):  # it has ended, as the next command says
                        connection.send(found)
            except EOFError:  # the process before it has ended, which the first one hears, and ends this one
                threading.Event().wait()
    except EOFError:
        return
    except Exception as error:
        if rank is not None and rank.peers is not None:
            rank.peers.leave()
        name = type(error).__name__
        is_ours = isinstance(error, SpecserveError)
        connection.send(Failed(name, str(error)) if is_ours else Failed("EngineError", f"{name}: {error}"))
        raise


def main() -> None:
    end, memory, lifeline, parent, pulse, before, *after = map(int, sys.argv[1:])
    if parent:
        end_with(parent)  # which is its thread, for Linux
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the first process
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(1)
    link = None if before < 0 else Link(_connected(before, HandOn), [_connected(each, HandOn) for each in after])
    with torch.inference_mode():
        serve(_connected(end, Command), lambda load: Rank(load, memory, Pulse(pulse), link))


def _connected(end: int, kind: Any) -> Connection:
    return Connection(socket.socket(fileno=end), kind)


def _end_with(lifeline: int) -> None:
    """Wherever this process waits, it ends."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main()
