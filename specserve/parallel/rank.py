"""One of the processes of a model, but the first: it computes its part of each step, as it is told.

    python -m specserve.parallel.rank SOCKET MEMORY LIFELINE PARENT

SOCKET is where commands come from, MEMORY what all processes of the model share, and LIFELINE a pipe that nobody writes
to: when its other end is closed the first process has ended, and this one does. PARENT is its id where its main thread
has started this one, and 0 else: then it ends with that even while it is stopped.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from specserve.cache.storage import KVStorage
from specserve.errors import SpecserveError
from specserve.machine.lifeline import end_with
from specserve.models.decoder import Decoder, PackedAdapter
from specserve.models.loader import load_model
from specserve.models.product import LowRank
from specserve.ops import Ops, Peers
from specserve.ops.choice import choose_ops
from specserve.parallel.messages import (
    Begin,
    Command,
    Connection,
    CopySlots,
    Done,
    DropAdapter,
    Failed,
    Load,
    LoadAdapter,
    PlaceAdapter,
    Run,
    Weights,
)
from specserve.runtime.runner import Runner


class Rank:
    """A process's part of a model: `ops`, `model` and what they share with `peers`."""

    def __init__(self, load: Load, memory: mmap.mmap) -> None:
        device = torch.device("cpu")
        self._ops: Ops = choose_ops(device, load.dtype, load.quantization, load.threads, load.isa)
        self.peers: Peers = self._ops.peers(memory, load.rank, load.size)
        model = load_model(Path(load.folder), self._ops, load.max_len, peers=self.peers)
        assert isinstance(model, Decoder), "the first process looked"
        self._model = model
        self._adapters: dict[str, Future[PackedAdapter]] = {}
        self._packing = ThreadPoolExecutor(1, "specserve-adapters")

    def begin(self, begin: Begin) -> None:
        if begin.num_adapters:
            self._model.hold_adapters(begin.num_adapters, begin.max_lora_rank)
        ops, shapes = self._ops, self._model.spec.kv_shapes
        self._storage = KVStorage(shapes, begin.num_blocks, begin.block_size, ops.kv_dtype, ops.device, ops.copy_kv)
        layers = self._storage.layers
        self._runner = Runner(self._model, ops, layers, begin.block_size, begin.max_rows, begin.max_logit_rows)

    def obey(self, command: Command) -> None:
        match command:
            case Run():
                self._runner.start(command.step())
                self._runner.finish()
            case CopySlots():
                self._storage.copy_slots(command.sources, command.targets)
            case LoadAdapter():
                self._adapters[command.digest] = self._packing.submit(self._packed, command)
            case DropAdapter():
                del self._adapters[command.digest]
            case PlaceAdapter():
                packed = None if command.digest is None else self._adapters[command.digest].result()
                self._model.place_adapter(command.slot, packed)

    def _packed(self, command: LoadAdapter) -> PackedAdapter:
        return self._model.pack_adapter({name: _low_rank(each) for name, each in command.weights.items()})


def _low_rank(weights: Weights) -> LowRank:
    a, b = ((weights.a, weights.shape_a), (weights.b, weights.shape_b))
    return LowRank(*(torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape) for data, shape in (a, b)))


def serve(connection: Connection, memory: mmap.mmap) -> None:
    """Until the first process has ended, or something went wrong, which it is told and then ends with."""
    rank: Rank | None = None
    try:
        load = connection.receive()
        rank = Rank(load, memory)
        connection.send(Done())
        rank.begin(connection.receive())
        connection.send(Done())
        while True:
            rank.obey(connection.receive())
    except EOFError:
        return
    except Exception as error:
        if rank is not None:
            rank.peers.leave()
        name = type(error).__name__
        is_ours = isinstance(error, SpecserveError)
        connection.send(Failed(name, str(error)) if is_ours else Failed("EngineError", f"{name}: {error}"))
        raise


def main() -> None:
    end, shared, lifeline, parent = map(int, sys.argv[1:])
    if parent:
        end_with(parent)  # which is its thread, for Linux
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the first process
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    memory = mmap.mmap(shared, 0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        serve(Connection(socket.socket(fileno=end), Command), memory)


def _end_with(lifeline: int) -> None:
    """Wherever this process waits, it ends."""
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main()
