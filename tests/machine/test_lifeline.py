"""Copies of a process: none that is heard of outlives it, not even one that is stopped at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from specserve.machine import lifeline
from tests.processes import is_alive

STOPPED_AT_ONCE = """
import os, signal
from specserve.machine.lifeline import fork
pid, connection = fork(lambda theirs: theirs.recv(1))
os.kill(pid, signal.SIGSTOP)
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_that_is_stopped_at_once_ends_with_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED_AT_ONCE], capture_output=True, text=True, timeout=30)
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 10
    while is_alive(int(done.stdout)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_one_that_is_stopped_before_it_can_say_so_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "_ARM_S", 0.05)
    monkeypatch.setattr(lifeline, "end_with", lambda parent: os.kill(os.getpid(), signal.SIGSTOP))
    pid, connection = lifeline.fork(lambda theirs: None)
    with connection:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert connection.recv(1) == b""


def test_what_a_copy_says_comes_after_that() -> None:
    def serve(theirs: socket.socket) -> None:
        theirs.sendall(b"first")

    pid, connection = lifeline.fork(serve)
    with connection:
        assert connection.recv(5) == b"first"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "it ends when there is nothing more to serve"
