"""Starts the process of an engine. Imports nothing that takes time, so that a server can start it before all else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Child:
    """A process that connects to `address`, a zmq endpoint, and waits there to be told what to load."""

    process: subprocess.Popen[bytes]
    address: str


class Nest:
    """Where engines come from: one process after another, their sockets in a folder that this user alone can read. A
    context manager; at its end the folder is gone and so is the process."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._prepared: Child | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start a process ahead of `take`."""
        self._prepared = self._spawn()

    def take(self) -> Child:
        """A process that waits; it ends with this one, however this one ends, and with the next one that is taken.
        Raises OSError when there are no means to start one."""
        child, self._prepared = self._prepared or self._spawn(), None
        return child

    def close_door(self) -> None:
        """The process has connected: nobody else shall, and when this process is killed nothing of it remains."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.close_door()

    def __enter__(self) -> Nest:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _spawn(self) -> Child:
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="specserve-"))  # readable by this user alone
        address = f"ipc://{self._folder}/engine.sock"
        command = [sys.executable, "-m", "specserve.server.engine.process", address, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return Child(self._process, address)
