"""The other processes of a model where they are on other hosts, as the first one sees them."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

from specserve.cache.storage import KVShape
from specserve.errors import EngineError
from specserve.models.spec import DecoderSpec
from specserve.ops import Ops
from specserve.parallel.gloo import GlooGather, meeting_place
from specserve.parallel.hosts import Gate, SealedConnection
from specserve.parallel.layout import Layout, ModelMemory, private_memory
from specserve.parallel.messages import Reply
from specserve.parallel.ranks import Ranks, end_ranks

_log = logging.getLogger(__name__)


class JoinedRanks(Ranks):
    """Processes 1 and up of a model, which join at a gate: who comes first has the lowest number. They leave when this
    object, or this process, ends."""

    def __init__(self, layout: Layout, spec: DecoderSpec, ops: Ops, gate: Gate) -> None:
        """Waits for them."""
        self.layout, self.spec, self._ops = layout, spec, ops
        self.num_mapped_bytes, self._link = 0, None
        self._failure, self._has_lost = "", threading.Event()
        self._read = [SimpleQueue() for _ in range(1, layout.size)]
        self._connections, self._processes, self._groups = [], [], []
        self._finalizer = weakref.finalize(self, end_ranks, self._processes, self._connections, None, None)
        missing = layout.size - 1
        with closing(gate):
            while missing:
                _log.info("Waiting for `specserve rank --join %s`: %d of them.", gate.address, missing)
                end, session = gate.admit()
                self._connections.append(SealedConnection(end, Reply, session))
                missing -= 1
        self._own = self._connections[0].own_host

    def load(self, folder: Path, dtype: str, max_len: int | None, threads: int) -> None:
        """Each from the files of its own host, with its own number of threads."""
        size = self.layout.size
        store = meeting_place(self._own, size)
        self._send_load(folder, dtype, max_len, threads, store.port)
        try:
            gather = GlooGather(store, self._own, 0, size)
        except RuntimeError as error:
            self._replies()  # perhaps one says why
            raise EngineError(f"The processes of the model did not meet: {error}") from error
        descriptor = private_memory(self.layout)
        try:
            memory = ModelMemory(descriptor, self.layout)
        finally:
            os.close(descriptor)
        self._groups = [self._ops.peers(memory.group(0), 0, size, gather)]

    def kv_shapes(self) -> list[list[KVShape]]:
        """Waits until they are loaded. Their KV, and the weights that they have mapped, take no memory of this host."""
        self._replies()
        return []
