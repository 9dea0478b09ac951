"""Starts the process of an engine. Imports nothing that takes time, so that a server can start it before all else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from specserve.machine.lifeline import without_interrupts
from specserve.machine.pulse import Pulse, shared_memory


@dataclass(frozen=True, slots=True)
class Child:
    """A process that waits at the other end of a socket to be told what to load. Nobody else can reach it there: the
    socket has no name. `pulse` counts what its engine does inside a step."""

    process: subprocess.Popen[bytes]
    end: socket.socket
    pulse: Pulse


class Inheritance(NamedTuple):
    """What the process of a replica has that steps with others: its number, and the descriptors that Lockstep wants."""

    rank: int = 0
    descriptors: tuple[int, ...] = ()


class EngineSpawner:
    """Where engines come from: one process after another. A context manager; at its end the process is gone. Each gets
    what `inherit` gives when it is started."""

    def __init__(self, inherit: Callable[[], Inheritance] = Inheritance) -> None:
        self._inherit = inherit
        self._prepared: Child | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start a process ahead of `take`."""
        self._prepared = self._spawn()

    def take(self) -> Child:
        """A process that waits; it ends with this one, however this one ends, and with the next one that is taken. Its
        socket is the caller's to close. Raises OSError when there are no means to start one."""
        child, self._prepared = self._prepared or self._spawn(), None
        return child

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._prepared is not None:
            self._prepared.end.close()
            self._prepared = None

    def __enter__(self) -> EngineSpawner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _spawn(self) -> Child:
        self.close()
        memory = shared_memory()
        try:
            pulse = Pulse(memory)
            ours, theirs = socket.socketpair()
            with theirs:
                rank, descriptors = self._inherit()
                given = [theirs.fileno(), memory, os.getpid(), *([rank, *descriptors] if descriptors else [])]
                command = [sys.executable, "-m", "specserve.server.engine.process", *map(str, given)]
                inherited = [theirs.fileno(), memory, *descriptors]
                try:
                    with without_interrupts():
                        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
                except OSError:
                    ours.close()
                    raise
        finally:
            os.close(memory)
        return Child(self._process, ours, pulse)
