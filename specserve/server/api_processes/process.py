"""A process that answers HTTP and has no engine.

    python -m specserve.server.api_processes.process SOCKET MEMORY PARENT LISTENING...

It waits at the descriptor SOCKET, which it has inherited, to be told what it serves, counts in the descriptor MEMORY
what it has to do, takes connections at the descriptors LISTENING, and ends with the process PARENT, which started it,
however that one ends.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
from collections.abc import Sequence

from specserve.errors import SpecserveError
from specserve.machine.lifeline import end_with
from specserve.machine.memory import return_large_blocks
from specserve.server import logs
from specserve.server.api_processes.engines import (
    CoordinatedCounter,
    CoordinatedEngines,
    CoordinatedReports,
    CoordinatedValidator,
    Coordinator,
)
from specserve.server.api_processes.messages import Given, Up
from specserve.server.api_processes.table import SharedCounts, Table
from specserve.server.engine.messages import Failed
from specserve.server.http.front import SWITCH_S, Front
from specserve.text.encoding import use_own_threads_only

_BEAT_S = 0.1


def main(descriptor: int, memory: int, parent: int, *listening: int) -> int:
    """Answer until the coordinator says that it is enough."""
    end_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may reach the whole group; the coordinator decides
    sys.setswitchinterval(SWITCH_S)
    use_own_threads_only()
    return_large_blocks()
    end = socket.socket(fileno=descriptor)
    return asyncio.run(_live(end, memory, [socket.socket(fileno=each) for each in listening]))


async def _live(end: socket.socket, memory: int, sockets: Sequence[socket.socket]) -> int:
    coordinator = Coordinator(end)
    given = await coordinator.given
    logs.configure(given.settings.options.log_format, given.settings.options.log_level)
    table = Table(memory, given.num_processes)
    try:
        front = _front(coordinator, given, table, sockets)
        await front.start()
    except SpecserveError as error:
        coordinator.say(Failed.of(error))
        return 1
    beating = asyncio.create_task(_beat(table, given.row, coordinator))
    table.beat(given.row)  # before it is looked at
    coordinator.say(Up())
    gc.freeze()  # what was imported stays; to look at all of it takes 0.05 s, in which nobody is sent a token
    await asyncio.wait([coordinator.finished, beating], return_when=asyncio.FIRST_COMPLETED)
    await front.close()
    beating.cancel()
    coordinator.close()
    return 0 if coordinator.finished.done() else 1


def _front(coordinator: Coordinator, given: Given, table: Table, sockets: Sequence[socket.socket]) -> Front:
    engines = CoordinatedEngines(coordinator, table, given.stall_s)
    return Front(
        given.settings,
        engines,
        CoordinatedCounter(coordinator),
        CoordinatedValidator(coordinator),
        CoordinatedReports(coordinator, given.stall_s),
        timeline=engines.timeline,
        counts=SharedCounts(table, given.row),
        ids=given.ids,
        sockets=sockets,
    )


async def _beat(table: Table, row: int, coordinator: Coordinator) -> None:
    """As long as what the coordinator says can be read."""
    while not coordinator.is_broken:
        table.beat(row)
        await asyncio.sleep(_BEAT_S)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
