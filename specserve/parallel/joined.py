"""One of the processes of a model whose first process is on another host.

    python -m specserve.parallel.joined HOST:PORT SECRET_FILE MODEL THREADS PARENT

It waits for that one at HOST:PORT, computes its part as it is told, and ends with status 0 once that one has ended;
with PARENT, the id of the process that started it, in any case.
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import msgspec
import torch

from specserve.cache.sizing import GIB, free_memory
from specserve.cache.storage import KVStorage
from specserve.checkpoint import catalog
from specserve.checkpoint.identity import model_digest
from specserve.errors import CapacityError, ConfigError, SpecserveError
from specserve.machine.lifeline import end_with
from specserve.machine.pulse import Pulse
from specserve.parallel.address import Address
from specserve.parallel.gloo import GlooGather, meeting_place_at
from specserve.parallel.handshake import LinkError, Welcome
from specserve.parallel.hosts import join
from specserve.parallel.layout import Layout, private_memory
from specserve.parallel.messages import Begin, Load
from specserve.parallel.rank import Rank, serve
from specserve.parallel.security import read_secret

_log = logging.getLogger(__name__)


class JoinedRank(Rank):
    """A Rank whose memory is that of another host than the first process's, which has sized the KV cache by its own."""

    def begin(self, begin: Begin) -> None:
        """Raises CapacityError, too."""
        shapes = self._model.spec.kv_shapes
        needed = begin.num_blocks * KVStorage.bytes_per_block(shapes, begin.block_size, self._ops.kv_dtype)
        if needed > (free := free_memory(self._ops.device)):
            raise CapacityError(
                f"The KV cache of a process that joined needs {needed / GIB:.2f} GiB on its host, and "
                f"{free / GIB:.2f} GiB are free there. Give the first process a smaller --kv-cache-gib."
            )
        super().begin(begin)


def run(address: Address, secret: bytes, folder: Path, threads: int) -> None:
    """Join the model of the first process at `address` and compute a part of it, until that process has ended. Raises
    SpecserveError."""
    digest = model_digest(folder)

    def check(welcome: Welcome) -> None:
        if welcome.digest != digest:
            raise LinkError(
                f"It serves {welcome.model}, and {folder} holds other files: name the same model here.", is_final=True
            )

    try:
        connection, own = join(address, secret, check)
    except LinkError as error:
        raise ConfigError(f"The model at {address} cannot be joined. {error}") from error

    def make(load: Load) -> JoinedRank:
        _log.info("Process %d of %d of the model at %s.", load.rank, load.width, address)
        here = msgspec.structs.replace(load, folder=str(folder), threads=threads)
        gather = GlooGather(meeting_place_at(address.host, load.port, load.width), own, load.rank, load.width)
        return JoinedRank(here, private_memory(Layout(load.width, (range(1),))), Pulse(), None, gather)

    with torch.inference_mode():
        serve(connection, make)


def main() -> None:
    where, secret_file, model, threads, parent = sys.argv[1:]
    end_with(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    try:
        secret = read_secret(Path(secret_file), "--secret-file")
        run(Address.parse(where, "--join"), secret, catalog.resolve(model), int(threads))
    except SpecserveError as error:
        sys.exit(f"specserve: {error}")


if __name__ == "__main__":
    main()
