"""Starts the process that turns conversations into tokens, and orders copies of it. Blocks; whoever must not be held up
asks on a thread."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from specserve.errors import EngineError
from specserve.machine.lifeline import without_interrupts
from specserve.text.chat import TemplateOptions
from specserve.text.worker import PREPARE, READY, STATUS, told

_START_S = 60.0  # to start, or to make what comes with PREPARE


class Worker:
    """Started by the first order, and again where it has ended. Orders come one at a time, and `close` as one."""

    def __init__(self, folder: Path, template: TemplateOptions) -> None:
        self._folder, self._template = folder, template
        self._starting = threading.Lock()
        self._killed = False  # for good
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def copy(self, name: int) -> tuple[socket.socket, int]:
        """A new copy in place of the one that had this name: the socket for its jobs, and the exit status of the other
        (0 for none). Raises EngineError when there is none to be had."""
        said, descriptors = self._order(bytes([name]), STATUS.size)
        (status,) = STATUS.unpack(said)
        return socket.socket(fileno=descriptors[0]), status

    def prepare(self) -> None:
        """Have copies from now on know what a text with control tokens needs. Raises EngineError as `copy` does."""
        self._order(PREPARE, len(PREPARE))

    def kill(self) -> None:
        """End it and its copies for good, also while it starts; from any thread. That order, and
        all that come, raise EngineError."""
        with self._starting:
            self._killed = True
            process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Free what it has."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._control is not None:
            self._control.close()
            self._control = None

    def _order(self, order: bytes, size: int) -> tuple[bytes, list[int]]:
        for _ in range(2):  # the second time with one that was started anew
            control = self._control or self._start()
            try:
                control.sendall(order)
                said, descriptors, _, _ = socket.recv_fds(control, size, 1)
            except OSError:
                said, descriptors = b"", []
            if len(said) == size:
                return said, list(descriptors)
            self.close()
        raise EngineError("The process that renders chat templates has ended; its log says why.")

    def _start(self) -> socket.socket:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_S)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-m", "specserve.text.worker", str(self._folder), str(number), str(os.getpid())]
            with self._starting, without_interrupts():
                if self._killed:
                    raise EngineError("The process that renders chat templates was ended.")
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number])
        try:
            self._control.sendall(told(self._template))
            said = self._control.recv(len(READY))
        except OSError:
            said = b""
        if said != READY:
            self.close()
            raise EngineError("The process that renders chat templates did not start; its log says why.")
        return self._control
